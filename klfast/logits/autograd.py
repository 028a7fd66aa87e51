"""Makes the ops over logits differentiable, for every compiled backend alike.

An op works on rows: from logits [A, T, V] to numbers [R], R = A * T. Reductions are those of
``klfast.ops.autograd``, over one number a row. The gradient of a scalar reduction comes out of the
forward's read, in three steps:

1. ``token_weights`` gives each row's weight in the result, which depends on the mask alone;
2. the forward writes weight times gradient;
3. the backward scales that by ``grad_out``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from klfast.checks.values import are_tracing
from klfast.dtypes import arithmetic_dtype
from klfast.logits.call import (
    DIVERGENCES,
    ENTROPIES,
    OF_ONE_MODEL,
    OF_TWO_MODELS,
    KLDivergenceCall,
    TokenLogprobsCall,
)
from klfast.logits.outputs import BesideDivergences, KLDivergence, outputs_of
from klfast.logits.shard_ops import over_shards
from klfast.ops import autograd
from klfast.ops.table import Ops
from klfast.stats import KLStats


def token_logprobs(call: TokenLogprobsCall, ops: Ops) -> tuple[Tensor, Tensor | None]:
    """Log-probs, and entropies if asked for, in the call's shape; differentiable once."""
    ops = over_shards(ops, call.shards)
    function = _InplaceTokenLogprobs if call.inplace_backward else _TokenLogprobs
    arguments = (
        call.logits,
        call.token_ids,
        call.keep,
        call.temperature,
        call.return_entropy,
        call.inverse_temperature,
    )
    try:
        if autograd.may_need_gradient(call.logits):
            logprobs, entropy, _ = function.apply(*arguments, ops)
        else:
            logprobs, entropy, _ = ops.token_logprobs_fwd(*arguments)
    except RuntimeError:
        call.explain()
        raise
    entropies = entropy.view(call.rows_shape) if call.return_entropy else None
    return logprobs.view(call.shape), entropies


def kl_divergence(call: KLDivergenceCall, ops: Ops) -> KLDivergence:
    """The reduced divergence, differentiable once, and what else was asked for."""
    ops = over_shards(ops, call.shards)
    try:
        reduced, beside = _run(call, ops)
    except RuntimeError:
        call.explain()
        raise
    return outputs_of(call, reduced, beside, lambda call: autograd.kl_penalty(call, ops))


def _run(
    call: KLDivergenceCall, ops: Ops
) -> tuple[tuple[Tensor, KLStats | None], BesideDivergences]:
    # KL(ref || policy) is KL(policy || ref) with the roles exchanged.
    forward = call.direction == "forward"
    first, second = call.logits, call.ref_logits
    if forward:
        first, second = second, first
    divergence = DIVERGENCES.index("jsd" if call.direction == "jsd" else "kl")
    policy = "second" if forward else "first"
    entropy_of = ENTROPIES.index(policy if call.return_entropy else "none")
    options = (divergence, call.jsd_beta, call.temperature, entropy_of)
    inputs = (first, second, call.token_ids, call.keep)
    needed = autograd.may_need_gradient(first, second)
    if needed and _is_one_read(call):
        plan = (call, options, ops)
        result, statistics = _OneReadKL.apply(first, second, plan)
        stats = KLStats(*statistics.unbind(0)) if call.return_stats else None
        return (result, stats), BesideDivergences()
    if needed:
        rows, logprobs, ref_logprobs, entropies, _ = _KLRows.apply(
            *inputs, call.inverse_temperature, *options, ops
        )
    else:
        outputs = ops.kl_divergence_fwd(
            *inputs, *options, None, False, False, call.inverse_temperature
        )
        rows, logprobs, ref_logprobs, *_, entropies = outputs
    if forward:
        logprobs, ref_logprobs = ref_logprobs, logprobs
    beside = BesideDivergences(
        logprobs if call.token_ids is not None else None,
        ref_logprobs if call.token_ids is not None else None,
        entropies if call.return_entropy else None,
    )
    return autograd.kl_penalty(call.reduce(rows), ops), beside


def _is_one_read(call: KLDivergenceCall) -> bool:
    """Whether the forward can write the gradient: nothing else flows back, and it is known."""
    return (
        call.spec.reduction.is_scalar()
        and call.token_ids is None
        and not call.return_entropy
        and call.shards is None  # whose gradient takes a read of its own
        and not are_tracing()
        and not autograd.are_packed()  # hooks see saved tensors alone
        and all(
            autograd.holds_unit_gradient(logits) or not logits.requires_grad
            for logits in (call.logits, call.ref_logits)
        )
    )


def _contiguous(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.contiguous()


class _TokenLogprobs(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor,
        token_ids: Tensor,
        keep: Tensor | None,
        temperature: float,
        want_entropy: bool,
        inverse_temperature: Tensor | None,
        ops: Ops,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return ops.token_logprobs_fwd(
            logits, token_ids, keep, temperature, want_entropy, inverse_temperature
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, token_ids, keep, ctx.temperature, ctx.want_entropy, inverse, ctx.ops = inputs
        logprobs, entropy, saved = output
        tensors = (logits, token_ids, keep, saved, logprobs, entropy, inverse)
        autograd.save(ctx, tensors, OF_ONE_MODEL)
        ctx.mark_non_differentiable(*((saved,) if ctx.want_entropy else (entropy, saved)))
        autograd.take_gradients_as_sent(ctx)

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Any
    ) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 7
        logits, *others, inverse = autograd.saved(ctx)
        with torch.no_grad():
            grad = ctx.ops.token_logprobs_bwd(
                logits,
                *others,
                ctx.temperature,
                _contiguous(grad_logprobs),
                _contiguous(grad_entropy) if ctx.want_entropy else None,
                inverse,
            )
        grads = autograd.once((grad, None), logits, grad_logprobs, grad_entropy)
        return grads[0], *(None,) * 6


class _InplaceTokenLogprobs(_TokenLogprobs):
    """The same with a backward that leaves its gradient in the logits' memory."""

    generate_vmap_rule = False

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _TokenLogprobs.setup_context(ctx, inputs, output)
        ctx.is_fresh = True

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Any
    ) -> tuple[Tensor | None, ...]:
        sent = [grad for grad in (grad_logprobs, grad_entropy) if grad is not None]
        if not sent:
            return (None,) * 7
        autograd.check_one_backward(ctx, sent)
        logits, *others, inverse = autograd.saved(ctx)
        assert logits is not None
        ctx.ops.token_logprobs_bwd_(
            logits,
            *others,
            ctx.temperature,
            _contiguous(grad_logprobs),
            _contiguous(grad_entropy) if ctx.want_entropy else None,
            inverse,
        )
        # As torch's own ops do, for whoever has saved the logits too.
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), *(None,) * 6


class _KLRows(torch.autograd.Function):
    """Divergences of rows, read again by the backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        *tensors, inverse, divergence, beta, temperature, entropy_of, ops = args
        options = (divergence, beta, temperature, entropy_of)
        rows, logprobs, ref_logprobs, saved, _, _, entropies = ops.kl_divergence_fwd(
            *tensors, *options, None, False, False, inverse
        )
        return rows, logprobs, ref_logprobs, entropies, saved

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, divergence, beta, temperature, entropy_of, ctx.ops = inputs
        ctx.options = (divergence, beta, temperature, entropy_of)
        rows, logprobs, ref_logprobs, entropies, saved = output
        ctx.has_tokens = tensors[2] is not None
        ctx.has_entropies = ENTROPIES[entropy_of] != "none"
        # The inverse temperature is the last of the tensors.
        own = (rows, saved, entropies if ctx.has_entropies else None)
        autograd.save(ctx, (*tensors, *own), OF_TWO_MODELS)
        no_gradient = [saved]
        if not ctx.has_tokens:
            no_gradient += [logprobs, ref_logprobs]
        if not ctx.has_entropies:
            no_gradient += [entropies]
        ctx.mark_non_differentiable(*no_gradient)
        autograd.take_gradients_as_sent(ctx)

    @staticmethod
    def backward(
        ctx: Any,
        grad_rows: Tensor | None,
        grad_logprobs: Tensor | None,
        grad_ref_logprobs: Tensor | None,
        grad_entropies: Tensor | None,
        _: Any,
    ) -> tuple[Tensor | None, ...]:
        of_tokens = (grad_logprobs, grad_ref_logprobs) if ctx.has_tokens else (None, None)
        incoming = (grad_rows, *of_tokens, grad_entropies if ctx.has_entropies else None)
        if all(grad is None for grad in incoming):
            return (None,) * 10
        *saved, entropies = autograd.saved(ctx)
        grads = _recompute(ctx, saved, entropies, *incoming)
        grads = autograd.once(grads, *saved[:2], *incoming)
        return (*grads, *(None,) * 8)


def _recompute(
    ctx: Any, saved: Sequence[Tensor | None], entropies: Tensor | None, *incoming: Tensor | None
) -> autograd.Grads:
    """The gradients by a second read of the logits, for those that come in: of divergences, of the
    tokens' log-probs under either model, of entropies.
    """
    *tensors, inverse, rows, state = saved
    needs = ctx.needs_input_grad[:2]
    with torch.no_grad():
        grads = ctx.ops.kl_divergence_bwd(
            *tensors,
            *ctx.options,
            rows,
            state,
            entropies,
            *map(_contiguous, incoming),
            *needs,
            inverse,
        )
    return autograd.wanted(grads, needs)


class _OneReadKL(torch.autograd.Function):
    """A scalar of the divergences, with the gradient from the same read.

    A later backward reads the logits again. Inference tensors are never read again: as long as
    the graph is retained, the unit gradients are.
    """

    @staticmethod
    def forward(
        ctx: Any, first: Tensor, second: Tensor, plan: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        call, ctx.options, ctx.ops = plan
        weights = row_weights(call, ctx.ops)
        needs = ctx.needs_input_grad[:2]
        rows, _, _, saved, *grads, _ = ctx.ops.kl_divergence_fwd(
            *(first, second, None, call.keep),
            *ctx.options,
            weights,
            *needs,
            call.inverse_temperature,
        )
        reduced = call.reduce(rows)
        result, _, statistics, _, _ = ctx.ops.kl_penalty_fwd(
            *reduced.tensors(),
            *reduced.spec.encoded(),
            None,
            False,
            False,
            False,
            reduced.return_stats,
        )
        # Autograd sees no change of an inference tensor; a copy would be of the logits' size.
        models = [None if logits.is_inference() else logits for logits in (first, second)]
        ctx.is_read_once = any(logits is None for logits in models)
        own = (None, call.keep, call.inverse_temperature, rows, saved, weights)
        autograd.save(ctx, (*models, *own), OF_TWO_MODELS)
        ctx.unit_grads = autograd.wanted(grads, needs)
        if reduced.return_stats:
            ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        return result, statistics

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            autograd.take(ctx, "unit_grads")
            return None, None, None
        grads = autograd.take_unit_gradients(ctx, grad_out, keep=ctx.is_read_once)
        saved = autograd.saved(ctx) if grads is None or torch.is_grad_enabled() else []
        if grads is None:
            *inputs, weights = saved
            assert weights is not None
            none = (None, None, None)
            grads = _recompute(ctx, inputs, None, weights * grad_out, *none)
        return (*autograd.once(grads, *saved[:2], grad_out), None)


def row_weights(call: KLDivergenceCall, ops: Ops) -> Tensor:
    """[R]: by how much the result grows with each row's divergence; 0 where masked."""
    is_double = arithmetic_dtype(call.logits, call.ref_logits) == torch.float64
    return autograd.token_weights(call.reduce(call.logits.select(-1, 0)), is_double, ops)
