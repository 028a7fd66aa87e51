"""The contexts of the differentiable ops: what a Function saves, and how it hands out gradients.

A Function keeps only saved tensors, so that the graph frees them and hooks can offload them. The
only exception is the unit gradient of a scalar, which the first backward returns. Hooks disable the
unit gradient. ``saved`` refuses tensors that changed without autograd's knowledge.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_unflatten

from klfast.args.checks import GATHERED, shape_text
from klfast.args.values import are_tracing
from klfast.ops.schemas import Ops
from klfast.types.device import DEVICES

P = ParamSpec("P")
R = TypeVar("R")
Grads = Sequence[Tensor | None]  # gradients, in the order of the inputs; None if not needed


def may_need_gradient(*tensors: Tensor | None) -> bool:
    """True if a Function must record a call.

    ``requires_grad`` does not show everything: a transform may differentiate tensors without it,
    and so do forward-mode derivatives, which the Functions refuse.
    """
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return torch._C._are_functorch_transforms_active() or is_forward_mode()


def not_compiled(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """``torch.compiler.disable``, applied only after dynamo is imported, as it would import it."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        # Not functools.cache, of which dynamo would warn when it meets it behind a graph break.
        disabled: list[Callable[P, R]] = []

        @functools.wraps(function)
        def served(*args: P.args, **kwargs: P.kwargs) -> R:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            if not disabled:
                disabled.append(torch.compiler.disable(function, reason=reason))  # type: ignore[no-untyped-call]
            return disabled[0](*args, **kwargs)

        # Dynamo reads these attributes before it traces a function.
        served._torchdynamo_disable = True  # type: ignore[attr-defined]
        served._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return served

    return decorate


@not_compiled("torch.compile can trace a torch.func transform only of backend='reference'")
def _untraced(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply``. Outside of traces it skips torch's inspection of the signature, which
    takes 20 us if there is a ``setup_context``.
    """
    if not are_tracing():
        return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
    # In a transform dynamo takes the context for the first argument, or leaves the backward out.
    if torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return _untraced(function.apply, *args)
    return function.apply(*args)  # type: ignore[no-untyped-call]


def is_forward_mode() -> bool:
    """True if forward-mode derivatives may be taken."""
    return forward_ad._current_level >= 0


def are_packed() -> bool:
    """True if saved-tensor hooks are active, as under offloading and checkpoints."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def save(ctx: Any, tensors: Sequence[Tensor | None], names: Sequence[str] = ()) -> None:
    """Save for backward. Inference tensors, whose changes autograd does not see, are copied.

    ``names`` are of the first tensors, which a caller holds and may change. ``saved`` compares
    their shapes and storages.
    """
    ctx.known = ()
    if not torch.compiler.is_compiling():  # it has no inference tensors
        for tensor in tensors:
            if tensor is not None and tensor.is_inference():
                tensors = [t.clone() if t is not None and t.is_inference() else t for t in tensors]
                break
        if names and not torch._C._are_functorch_transforms_active():
            ctx.names, ctx.known, packed = names, [], are_packed()
            for _, tensor in zip(names, tensors, strict=False):
                # Storages are unknown under hooks, which replace them. Weak references keep no
                # memory, and no other storage has their address.
                ctx.known.append(
                    tensor
                    if tensor is None
                    else (tensor.shape, None if packed else weakref.ref(tensor.untyped_storage()))
                )
    ctx.save_for_backward(*tensors)


def save_all(ctx: Any, values: Any, names: Sequence[str] = ()) -> None:
    """``save`` the tensors in nested tuples and lists, so that the graph frees them."""
    # torch would take a Size apart, and put a plain tuple in its place.
    leaves, ctx.structure = tree_flatten(values, lambda value: isinstance(value, torch.Size))
    ctx.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    save(ctx, [leaf if isinstance(leaf, Tensor) else None for leaf in leaves], names)


def saved_all(ctx: Any, *, are_read: bool = True) -> Any:
    """The values of ``save_all``; ``are_read`` is as for ``saved``."""
    both = zip(saved(ctx, are_read=are_read), ctx.others, strict=True)
    return tree_unflatten([o if t is None else t for t, o in both], ctx.structure)


def saved(ctx: Any, *, are_read: bool = True) -> Sequence[Tensor | None]:
    """The saved tensors. Read them once in a backward, because checkpointing allows only one read.

    ``are_read``: whether the backward reads a caller's tensors again. Otherwise they may be freed,
    but a tensor that gets a gradient keeps its shape.

    Raises:
        RuntimeError: a caller's tensor has another shape or storage than in the forward, or its
            storage was freed. A storage that was freed and filled again passes (FSDP).
    """
    tensors: tuple[Tensor | None, ...] = ctx.saved_tensors
    for at, known in enumerate(ctx.known):
        tensor = tensors[at]
        if known is None or tensor is None:
            continue
        shape, storage = known
        now = None
        if tensor.shape != shape:
            if are_read or tensor.requires_grad:
                now = f"shape {shape_text(tensor)} in place of {list(shape)}"
        elif are_read and storage is not None and storage() is not tensor.untyped_storage():
            now = "another storage"
        elif are_read and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0:
            now = "a storage that was freed"
        if now is not None:
            raise RuntimeError(
                f"{ctx.names[at]} must keep its shape and storage from the forward to the "
                f"backward, got {now}: {GATHERED}"
            )
    return tensors


def take(ctx: Any, name: str) -> Any:
    """Remove and return an attribute of a Function's context; None if it was already removed.

    If several threads run the backward at the same time, only one gets it.
    """
    return vars(ctx).pop(name, None)


def take_unit_gradients(ctx: Any, grad_out: Tensor, *, keep: bool = False) -> Grads | None:
    """The unit gradients of a one-read Function times ``grad_out``, for its first backward. With
    ``keep``, every backward of a retained graph gets copies.
    """
    if keep and torch._C._autograd._get_current_graph_task_keep_graph():
        copies = [None if grad is None else grad.clone() for grad in ctx.unit_grads]
        return scaled(copies, grad_out, ctx.ops)
    grads: Grads | None = vars(ctx).pop("unit_grads", None)  # one thread gets them
    if grads is None:
        return None
    product = scaled(grads, grad_out, ctx.ops)
    if product is not grads:  # many scalars get new memory
        ctx.unit_grads = grads
    return product


class _NotTwice(torch.autograd.Function):
    """A gradient that raises when it is differentiated again. Without this the second derivative
    would silently be zero, as torch's once_differentiable checks only grad_output.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, *depends_on: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "klfast's compiled backends are differentiable once; for second derivatives pass "
            "backend='reference', without group="
        )


def guarded(grads: Grads, *depends_on: Tensor | None) -> Grads:
    """The gradients, guarded if a graph of them is recorded (create_graph)."""
    if not torch.is_grad_enabled():
        return grads
    tensors = [t for t in depends_on if t is not None]
    # They are inputs of the guard, so that a second derivative by them leads to it and is not 0.
    guard: Any = _NotTwice.apply
    return [None if grad is None else guard(grad, *tensors) for grad in grads]


def wanted(grads: Grads, needs: Sequence[bool]) -> Grads:
    """The gradients, with None for a gradient that is not needed."""
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)]


_NOTHING = nullcontext()


def without_graph() -> AbstractContextManager[Any]:
    """``torch.no_grad``, which takes microseconds, only if a graph of a backward is recorded."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def holds_unit_gradient(tensor: Tensor | None) -> bool:
    """True if the tensor's dtype can hold a gradient before it is multiplied by grad_output.

    In fp16 one token's share of a mean underflows, but the gradient of a loss that was scaled for
    fp16 does not.
    """
    return tensor is None or tensor.dtype != torch.float16


@functools.cache  # torch takes microseconds to make a device's properties
def cache_size(device: torch.device) -> int:
    return DEVICES[device.type].cache_bytes(device)


def is_batched(tensor: Tensor) -> bool:
    """True if a backward is for many grad_outputs at once (``is_grads_batched``)."""
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def scaled(grads: Grads, grad_out: Tensor, ops: Ops) -> Grads:
    """Gradients times a scalar. They are scaled in place, except for many scalars at once, because
    autograd owns them from here on.
    """
    if is_batched(grad_out):
        return [None if grad is None else grad * grad_out for grad in grads]
    with without_graph():
        for grad in grads:
            if grad is not None:
                ops.scale_(grad, grad_out)
    return grads
