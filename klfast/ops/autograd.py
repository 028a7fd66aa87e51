"""The ops over log-probs, differentiable.

The autograd.Function is shared by every compiled backend: a backend brings ``Kernels``, the
Function decides what to compute when. For a scalar reduction the forward writes the unit gradient
in the same read; the first backward scales that in place and hands it out, every later one computes
the gradient anew, since what was handed out belongs to autograd and may have been changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from klfast.call import REDUCTIONS, SCALAR_REDUCTIONS, KLCall
from klfast.checks.values import are_tracing, check_coef, check_values
from klfast.stats import KLStats

Grads = tuple[Tensor | None, Tensor | None]
"""Gradients to logprobs and ref_logprobs; None where not needed."""


class Kernels(NamedTuple):
    """The compiled functions of a backend, with the signatures of ``klfast.ops.table``."""

    forward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor]]
    scale_: Callable[[Tensor, Tensor], None]

    @classmethod
    def of(cls, namespace: Any) -> Kernels:
        """Those of ``torch.ops.<namespace>``."""
        return cls(
            namespace.kl_penalty_fwd.default,
            namespace.kl_penalty_bwd.default,
            namespace.scale_.default,
        )


def native_kernels() -> Kernels:
    """The ops of the extension, which must be loaded."""
    return Kernels.of(torch.ops.klfast)


def kl_penalty(call: KLCall, kernels: Kernels) -> tuple[Tensor, KLStats | None]:
    """The penalty by ``kernels``, differentiable once, and its statistics if asked for."""
    try:
        result, per_sequence = _run(call, kernels)
    except RuntimeError:
        explain(call)
        raise
    return result, stats_of(per_sequence) if call.return_stats else None


def explain(call: KLCall) -> None:
    """Raise ValueError for a value that the kernels refuse: in tensors on a CPU, and in numbers."""
    if not are_tracing() and call.tensors.logprobs.device.type == "cpu":
        check_values(call)
    check_coef(call, call.coef)


def options_of(call: KLCall) -> tuple[Any, ...]:
    """What the kernels take after the tensors."""
    return (
        *call.estimator.encoded,
        REDUCTIONS.index(call.reduction),
        call.coef,
        0.0 if call.normalizer is None else call.normalizer,
    )


def _run(call: KLCall, kernels: Kernels) -> tuple[Tensor, Tensor]:
    tensors, options = call.tensors, options_of(call)
    differentiable = call.scores is None and may_need_gradient(
        tensors.logprobs, tensors.ref_logprobs
    )
    if differentiable and are_tracing():
        outputs = _TransformableKLPenalty.apply(*tensors, kernels, options, call.return_stats)
        return outputs[0], outputs[1]
    if differentiable:
        # Few arguments: torch looks at each of them in Python.
        is_scalar = call.reduction in SCALAR_REDUCTIONS
        plan = (tensors[2:], kernels, options, is_scalar, call.return_stats)
        outputs = _KLPenalty.apply(tensors.logprobs, tensors.ref_logprobs, plan)
        return outputs[0], outputs[1]
    return kernels.forward(*tensors, *options, call.scores, False, False, call.return_stats)[:2]


def may_need_gradient(*tensors: Tensor) -> bool:
    """Whether a Function must record a call.

    A transform may differentiate tensors that do not say so, and forward-mode derivatives, which
    the Functions refuse, do not show in requires_grad either.
    """
    return torch.is_grad_enabled() and (
        any(tensor.requires_grad for tensor in tensors)
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def stats_of(per_sequence: Tensor) -> KLStats:
    """The rows after the weights, as the user's own: backward reads what the kernel wrote."""
    length, kl, *others = per_sequence[1:].clone().unbind(0)
    return KLStats(kl, length, *others)


def save(ctx: Any, tensors: Sequence[Tensor | None], *, copy: bool = True) -> bool:
    """Save for backward; whether there are inference tensors among them.

    Autograd refuses those, as it does not see their changes: they are kept as copies, or as they
    are (``copy=False``) by a Function that looks for changes itself.
    """
    if torch.compiler.is_compiling():  # which knows no inference tensors
        ctx.inference = (None,) * len(tensors)
        ctx.save_for_backward(*tensors)
        return False
    found = [t if t is not None and t.is_inference() else None for t in tensors]
    ctx.inference = tuple(t.clone() if copy and t is not None else t for t in found)
    kept = zip(tensors, found, strict=True)
    ctx.save_for_backward(*(t if other is None else None for t, other in kept))
    return any(t is not None for t in found)


def saved(ctx: Any) -> list[Tensor | None]:
    """What was saved; a backward asks once, as checkpointing allows no more."""
    pairs = zip(ctx.saved_tensors, ctx.inference, strict=True)
    return [other if t is None else t for t, other in pairs]


def take(ctx: Any, name: str) -> Any:
    """An attribute of a Function's context, which is gone then; None if it is.

    One of several threads that run the backward at once gets it.
    """
    return vars(ctx).pop(name, None)


def take_unit_gradients(ctx: Any, grad_out: Tensor) -> Grads | None:
    """The unit gradients of a one-read Function times ``grad_out``, for its first backward."""
    grads: Grads | None = take(ctx, "unit_grads")
    if grads is None:
        return None
    product = scaled(grads, grad_out, ctx.kernels)
    if is_batched(grad_out):
        ctx.unit_grads = grads  # the product has memory of its own
    return product


def _recompute(ctx: Any, inputs: list[Tensor | None], grad_out: Tensor) -> Grads:
    """The gradients by a second read of the inputs."""
    *tensors, per_sequence = inputs
    needs = ctx.needs_input_grad[:2]
    with torch.no_grad():
        grads = ctx.kernels.backward(*tensors, *ctx.options, grad_out, per_sequence, *needs)
    return wanted(grads, needs)


class _NotTwice(torch.autograd.Function):
    """A gradient that says so when it is differentiated again. Without this the second derivative
    would be silently zero, as torch's once_differentiable looks at grad_output alone.
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
            "klfast's compiled backends are differentiable once; "
            "for second derivatives use backend='reference'"
        )


def once(grads: Grads, *depends_on: Tensor | None) -> Grads:
    """The gradients, guarded where a graph of them is being made (create_graph)."""
    if not torch.is_grad_enabled():
        return grads
    tensors = [t for t in depends_on if t is not None]
    first, second = (None if grad is None else _NotTwice.apply(grad, *tensors) for grad in grads)
    return first, second


def wanted(grads: Sequence[Tensor], needs: Sequence[bool]) -> Grads:
    """Those of the two gradients that are needed."""
    return (grads[0] if needs[0] else None, grads[1] if needs[1] else None)


def holds_unit_gradient(tensor: Tensor) -> bool:
    """Whether a dtype can hold a gradient that has not met grad_output yet.

    In fp16 the share of one token in a mean underflows, where the gradient of a loss that was
    scaled for fp16 does not.
    """
    return tensor.dtype != torch.float16


def is_batched(tensor: Tensor) -> bool:
    """Whether a backward is for many grad_outputs at once (``is_grads_batched``)."""
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def scaled(grads: Grads, grad_out: Tensor, kernels: Kernels) -> Grads:
    """Gradients times a scalar: in place, as autograd owns them from here on, but for many scalars
    at once.
    """
    if is_batched(grad_out):
        first, second = (None if grad is None else grad * grad_out for grad in grads)
        return first, second
    with torch.no_grad():
        for grad in grads:
            if grad is not None:
                kernels.scale_(grad, grad_out)
    return grads


class _KLPenalty(torch.autograd.Function):
    """Outside torch.func: ctx style, 10 us cheaper than setup_context."""

    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, ref_logprobs: Tensor, plan: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        constants, kernels, options, is_scalar, return_stats = plan
        tensors = (logprobs, ref_logprobs, *constants)
        needs = ctx.needs_input_grad[:2]
        unit = is_scalar and holds_unit_gradient(logprobs) and holds_unit_gradient(ref_logprobs)
        wants = needs if unit else (False, False)
        result, per_sequence, *unit_grads = kernels.forward(
            *tensors, *options, None, *wants, return_stats
        )
        save(ctx, (*tensors, per_sequence))
        ctx.kernels, ctx.options = kernels, options
        ctx.unit_grads = wanted(unit_grads, needs) if unit else None
        ctx.mark_non_differentiable(per_sequence)
        ctx.set_materialize_grads(False)
        return result, per_sequence

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            return None, None, None
        grads = take_unit_gradients(ctx, grad_out)
        # The first backward has its gradient, whatever became of the inputs.
        inputs = saved(ctx) if grads is None or torch.is_grad_enabled() else []
        if grads is None:
            grads = _recompute(ctx, inputs, grad_out)
        return (*once(grads, *inputs[:2], grad_out), None)


class _TransformableKLPenalty(torch.autograd.Function):
    """Under torch.func transforms and torch.compile: no state that a backward changes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        *tensors, kernels, options, return_stats = args
        forward = kernels.forward(*tensors, *options, None, False, False, return_stats)
        return forward[0], forward[1]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, kernels, options, _ = inputs
        _, per_sequence = output
        save(ctx, (*tensors, per_sequence))
        ctx.kernels, ctx.options = kernels, options
        ctx.mark_non_differentiable(per_sequence)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        nothing = (None,) * (len(ctx.needs_input_grad) - 2)
        inputs = saved(ctx)
        grads = _recompute(ctx, inputs, grad_out)
        return (*once(grads, *inputs[:2], grad_out), *nothing)
