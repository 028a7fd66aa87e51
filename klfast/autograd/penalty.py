"""The differentiable ops over log-probs, the same for every compiled backend.

A backend provides ``Ops``, and the Function decides what to compute when. For a scalar reduction
the forward writes the unit gradient in the same read, unless a GPU's cache holds the inputs. The
first backward scales it in place and returns it. Every later backward computes the gradient again,
because the returned gradient belongs to autograd and may have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.args.penalty import PenaltyCall
from klfast.args.values import are_tracing
from klfast.autograd import context
from klfast.ops.schemas import Ops
from klfast.stats.kl import KLStats


def kl_penalty(call: PenaltyCall, ops: Ops) -> tuple[Tensor, KLStats | None]:
    """The penalty by ``ops``, differentiable once, and its statistics if requested."""
    tensors, encoded, return_stats = call.tensors(), call.spec.encoded(), call.return_stats
    first, second = tensors[:2]
    statistics: Tensor | None
    if call.scores is not None or not context.may_need_gradient(first, second):
        result, _, statistics, _, _ = ops.kl_penalty_fwd(
            *tensors, *encoded, call.scores, False, False, False, return_stats
        )
    else:
        is_one_read = call.spec.reduction.result == "scalar" and not call.is_of_rows
        plan = _Plan(ops, encoded, is_one_read, return_stats)
        if are_tracing():
            result, _, statistics = context.apply(_TransformableKLPenalty, *tensors, plan)
        else:  # few arguments, because torch inspects each of them in Python
            result, statistics = _apply(first, second, (tensors[2:], plan))
    if not return_stats or statistics is None:
        return result, None
    return result, KLStats(*statistics.unbind(0))


class RowReducer:
    """The reduction of one value per row to a scalar, outside of autograd.

    First the derivative, and later the scalar. ``call.logprobs`` has the shape of the values.
    """

    def __init__(self, call: PenaltyCall, ops: Ops) -> None:
        _, *self._others = call.tensors()
        self._like = call.logprobs
        self._encoded, self._return_stats, self._ops = call.spec.encoded(), call.return_stats, ops

    def weights(self, dtype: torch.dtype) -> Tensor:
        """[R]: the derivative of the scalar by each value, which depends on none of them."""
        options = (*self._encoded, dtype == torch.float64)
        return self._ops.token_weights(self._like, *self._others[2:], *options)

    def reduce(self, values: Tensor) -> tuple[Tensor, KLStats | None]:
        """The scalar of values [R], and its statistics if the call wants them."""
        wants = (None, False, False, False, self._return_stats)
        result, _, statistics, _, _ = self._ops.kl_penalty_fwd(
            values.view(self._like.shape), *self._others, *self._encoded, *wants
        )
        return result, KLStats(*statistics.unbind(0)) if self._return_stats else None


class _Plan(NamedTuple):
    """The ops, options and outputs of a penalty's Function: everything except its tensors."""

    ops: Ops
    encoded: tuple[Sequence[int], Sequence[float]]  # the choices and numbers of a spec
    is_one_read: bool  # True if the forward writes the gradient of a scalar
    return_stats: bool


def _recompute(ctx: Any, inputs: Sequence[Tensor | None], grad_out: Tensor) -> context.Grads:
    """The gradients by a second read of the inputs, and the weights if they were not saved."""
    *tensors, weights = inputs
    needs = ctx.needs_input_grad[:2]
    with context.without_graph():
        if weights is None:
            wants = (True, False, False, False)
            weights = ctx.ops.kl_penalty_fwd(*tensors, *ctx.encoded, None, *wants)[1]
        grads: context.Grads = ctx.ops.kl_penalty_bwd(
            *tensors, *ctx.encoded, grad_out, weights, *needs
        )
    return grads


_LOGPROBS = (
    *("logprobs", "ref_logprobs", "old_logprobs", "mask", "weights"),
    *("cu_seqlens", "coef", "normalizer"),
)
_VALUES = ("values", *_LOGPROBS[1:])
"""The names of a call's tensors in the public functions."""


class _KLPenalty(torch.autograd.Function):
    """Outside of torch.func. A ``setup_context`` would take some 10 us per call (torch 2.13)."""

    @staticmethod
    def forward(
        ctx: Any, first: Tensor, second: Tensor | None, others: tuple[Any, _Plan]
    ) -> tuple[Tensor, Tensor | None]:
        constants, (ops, ctx.encoded, is_one_read, return_stats) = others
        ctx.ops = ops
        needs, needs_second, _ = ctx.needs_input_grad
        cache = context.cache_size(first.device)
        unit = (
            is_one_read
            and context.holds_unit_gradient(first)
            and context.holds_unit_gradient(second)
            and not context.are_packed()  # hooks see only saved tensors
            # If a backward finds the tensors in a GPU's L2 cache, to read them again takes fewer
            # launches than to count the mask first and to scale a gradient.
            and (
                cache == 0
                or sum([t.nbytes for t in (first, second, *constants) if t is not None])
                > 0.6 * cache
            )
        )
        wants = (not unit, unit and needs, unit and needs_second, return_stats)
        result, weights, statistics, grad, grad_second = ops.kl_penalty_fwd(
            first, second, *constants, *ctx.encoded, None, *wants
        )
        tensors = (first, second, *constants, None if unit else weights)
        context.save(ctx, tensors, _VALUES if second is None else _LOGPROBS)
        if unit:
            ctx.unit_grads = context.wanted((grad, grad_second), (needs, needs_second))
        ctx.set_materialize_grads(False)
        if not return_stats:
            return result, None
        ctx.mark_non_differentiable(statistics)
        return result, statistics

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            context.take(ctx, "unit_grads")
            return None, None, None
        grads = context.take_unit_gradients(ctx, grad_out)
        if grads is not None and not torch.is_grad_enabled():
            return (*grads, None)  # valid even if the inputs changed
        inputs = context.saved(ctx)
        if grads is None:
            grads = _recompute(ctx, inputs, grad_out)
        return (*context.guarded(grads, *inputs[:2], grad_out), None)


# The C++ apply. Function.apply also handles setup_context and functorch, which are not needed here.
_apply = super(torch.autograd.Function, _KLPenalty).apply


class _TransformableKLPenalty(torch.autograd.Function):
    """For torch.func transforms and torch.compile: a backward changes no state."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        *tensors, (ops, encoded, _, return_stats) = args
        result, weights, statistics, _, _ = ops.kl_penalty_fwd(
            *tensors, *encoded, None, True, False, False, return_stats
        )
        return result, weights, statistics if return_stats else None

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, (ctx.ops, ctx.encoded, _, return_stats) = inputs
        _, weights, statistics = output
        context.save(ctx, (*tensors, weights))
        ctx.mark_non_differentiable(*((weights, statistics) if return_stats else (weights,)))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        inputs = context.saved(ctx)
        grads = _recompute(ctx, inputs, grad_out)
        nothing = (None,) * (len(ctx.needs_input_grad) - 2)
        return (*context.guarded(grads, *inputs[:2], grad_out), *nothing)
