"""Loads the extension, and joins its ops to torch: fakes, vmap, and the one autograd.Function.

The Function is shared by every compiled backend: a backend brings ``Kernels``, the Function decides what
to compute when. For a scalar reduction the forward writes the unit gradient in the same read; the first
backward scales that in place and hands it out, every later one computes the gradient anew, since what
was handed out belongs to autograd and may have been changed since.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from klfast.call import KLCall
from klfast.stats import KLStats
from klfast.value_checks import are_tracing, check_values

Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""result, length [S], stats [8, S], grad_logprobs, grad_ref_logprobs; what was not asked for is empty."""


class Kernels(NamedTuple):
    """The compiled functions of a backend, with the signatures of the ops in ``csrc/ops.cpp``."""

    forward: Callable[..., Forward]
    backward: Callable[..., tuple[Tensor, Tensor]]
    scale_: Callable[[Tensor, Tensor], None]


@functools.cache
def load_error() -> str | None:
    """Why the extension is not here, in one sentence; None once it is loaded."""
    try:
        importlib.import_module("klfast._C")
    except ModuleNotFoundError:
        return "the extension was not built; run pip install --no-build-isolation ."
    except ImportError as error:
        return f"the extension does not load with torch {torch.__version__}: {error}"
    _register_fakes()
    return None


def native_kernels() -> Kernels:
    """The ops of the extension, which must be loaded."""
    ops = torch.ops.klfast
    return Kernels(ops.kl_penalty_fwd.default, ops.kl_penalty_bwd.default, ops.scale_.default)


def kl_penalty(call: KLCall, kernels: Kernels) -> tuple[Tensor, KLStats | None]:
    """The penalty by ``kernels``, differentiable once, and its statistics if asked for."""
    logprobs, ref_logprobs = call.logprobs, call.ref_logprobs
    differentiable = (
        call.estimator.gradient != "none"
        and call.scores is None
        and torch.is_grad_enabled()
        and (logprobs.requires_grad or ref_logprobs.requires_grad)
    )
    try:
        if torch._C._are_functorch_transforms_active():
            result, stats = _TransformableKLPenalty.apply(logprobs, ref_logprobs, call, kernels)
        elif differentiable:
            result, stats = _KLPenalty.apply(logprobs, ref_logprobs, call, kernels)
        else:
            result, _, stats, _, _ = _forward(call, kernels, False, False)
    except RuntimeError:
        if not are_tracing():
            check_values(call)  # says which value the kernel has refused
        raise
    return result, KLStats(*stats.unbind(0)) if call.return_stats else None


def _spec(call: KLCall) -> tuple[Any, ...]:
    """The part of a call that forward and backward kernels take in the same order."""
    estimator, coef, normalizer = call.estimator, call.coef, call.normalizer
    coef_is_tensor = isinstance(coef, Tensor)
    normalizer_is_tensor = isinstance(normalizer, Tensor)
    return (
        estimator.name,
        estimator.gradient,
        estimator.importance,
        estimator.limits,
        call.reduction,
        coef if coef_is_tensor else None,
        1.0 if coef_is_tensor else coef,
        normalizer if normalizer_is_tensor else None,
        0.0 if normalizer_is_tensor or normalizer is None else normalizer,
    )


def _forward(call: KLCall, kernels: Kernels, logprobs_grad: bool, ref_grad: bool) -> Forward:
    return kernels.forward(
        call.logprobs,
        call.ref_logprobs,
        call.old_logprobs,
        call.mask,
        call.cu_seqlens,
        call.scores,
        *_spec(call),
        logprobs_grad,
        ref_grad,
        call.return_stats,
    )


def _backward(
    call: KLCall,
    kernels: Kernels,
    grad_out: Tensor,
    length: Tensor,
    logprobs_grad: bool,
    ref_grad: bool,
) -> tuple[Tensor | None, Tensor | None]:
    grads = kernels.backward(
        grad_out,
        length,
        call.logprobs,
        call.ref_logprobs,
        call.old_logprobs,
        call.mask,
        call.cu_seqlens,
        *_spec(call),
        logprobs_grad,
        ref_grad,
    )
    return (grads[0] if logprobs_grad else None, grads[1] if ref_grad else None)


_SCALARS = ("token-sum", "token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def _has_unit_gradient(call: KLCall, needs: Sequence[bool]) -> bool:
    """Whether the forward should write the gradient: of a scalar, in a dtype that can hold it.

    The unit gradient of a mean over many tokens underflows in fp16, where the true one, of a loss
    scaled for fp16, does not.
    """
    wanted = [t for t, need in zip((call.logprobs, call.ref_logprobs), needs, strict=True) if need]
    return call.reduction in _SCALARS and all(t.dtype != torch.float16 for t in wanted)


def _saved(call: KLCall, length: Tensor) -> list[Tensor | None]:
    """The tensors of a call, for save_for_backward; ``_restored`` puts them back."""
    constants = (call.coef, call.normalizer)
    tensors = [value if isinstance(value, Tensor) else None for value in constants]
    return [*call[:5], *tensors, length]


def _without_tensors(call: KLCall) -> KLCall:
    coef, normalizer = (
        0.0 if isinstance(value, Tensor) else value for value in (call.coef, call.normalizer)
    )
    nothing: Any = None
    return call._replace(
        logprobs=nothing,
        ref_logprobs=nothing,
        mask=None,
        cu_seqlens=None,
        old_logprobs=None,
        coef=coef,
        normalizer=normalizer,
    )


def _restored(rest: KLCall, saved: Sequence[Any]) -> tuple[KLCall, Tensor]:
    logprobs, ref_logprobs, mask, cu_seqlens, old_logprobs, coef, normalizer, length = saved
    call = rest._replace(
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        mask=mask,
        cu_seqlens=cu_seqlens,
        old_logprobs=old_logprobs,
        coef=rest.coef if coef is None else coef,
        normalizer=rest.normalizer if normalizer is None else normalizer,
    )
    return call, length


class _KLPenalty(torch.autograd.Function):
    """Outside torch.func: ctx style, 10 us cheaper than setup_context."""

    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, ref_logprobs: Tensor, call: KLCall, kernels: Kernels
    ) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad[:2]
        unit = _has_unit_gradient(call, needs)
        call = call._replace(logprobs=logprobs, ref_logprobs=ref_logprobs)
        result, length, stats, *unit_grads = _forward(
            call, kernels, unit and needs[0], unit and needs[1]
        )
        ctx.save_for_backward(*_saved(call, length))
        ctx.rest, ctx.kernels = _without_tensors(call), kernels
        ctx.unit_grads = unit_grads if unit else None
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        return result, stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            return None, None, None, None
        needs = ctx.needs_input_grad[:2]
        if ctx.unit_grads is not None:
            grads = [g if need else None for g, need in zip(ctx.unit_grads, needs, strict=True)]
            if torch.compiler.is_compiling():
                scaled = [None if g is None else (g * grad_out).to(g.dtype) for g in grads]
                return (*scaled, None, None)
            ctx.unit_grads = None  # handed out: autograd may change it from here on
            for grad in grads:
                if grad is not None:
                    ctx.kernels.scale_(grad, grad_out)
            return (*grads, None, None)
        call, length = _restored(ctx.rest, ctx.saved_tensors)
        return (*_backward(call, ctx.kernels, grad_out, length, *needs), None, None)


class _TransformableKLPenalty(torch.autograd.Function):
    """Under torch.func transforms: setup_context style, the gradient always recomputed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logprobs: Tensor, ref_logprobs: Tensor, call: KLCall, kernels: Kernels
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = call._replace(logprobs=logprobs, ref_logprobs=ref_logprobs)
        result, length, stats, _, _ = _forward(call, kernels, False, False)
        return result, stats, length

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logprobs, ref_logprobs, call, kernels = inputs
        call = call._replace(logprobs=logprobs, ref_logprobs=ref_logprobs)
        _, stats, length = output
        ctx.save_for_backward(*_saved(call, length))
        ctx.rest, ctx.kernels = _without_tensors(call), kernels
        ctx.mark_non_differentiable(stats, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        call, length = _restored(ctx.rest, ctx.saved_tensors)
        needs = ctx.needs_input_grad[:2]
        return (*_backward(call, ctx.kernels, grad_out, length, *needs), None, None)


def _register_fakes() -> None:
    pass
