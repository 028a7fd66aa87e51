"""The functions over logits where each rank has a shard of the vocabulary, for every compiled
backend alike.

``klfast.logits.shard_rows`` has the rows. Shapes: R rows, K token ids a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from klfast.dtypes import arithmetic_dtype
from klfast.logits.call import (
    ENTROPIES,
    OF_ONE_MODEL,
    OF_TWO_MODELS,
    KLDivergenceCall,
    TokenLogprobsCall,
)
from klfast.logits.chain_rule import PairRows, TokenRows
from klfast.logits.normalizers import Units
from klfast.logits.outputs import BesideDivergences
from klfast.logits.shard_rows import (
    Plan,
    pair_gradients,
    pair_rows,
    token_gradient,
    token_rows,
)
from klfast.ops import autograd
from klfast.ops.table import Ops


def token_logprobs(call: TokenLogprobsCall, ops: Ops, units: Units) -> tuple[Tensor, Tensor | None]:
    """Log-probs, and entropies if asked for, in the call's shapes; differentiable once."""
    _refuse_transforms()
    plan = _plan_of(call, call.rows_shape.numel(), "first", ops, units)
    if autograd.may_need_gradient(call.logits):
        function = _InplaceTokenLogprobs if call.inplace_backward else _TokenLogprobs
        logprobs, entropy = function.apply(call.logits, plan)  # type: ignore[no-untyped-call]
    else:
        _, rows = token_rows(call.logits, plan)
        logprobs, entropy = _outputs_of(rows, call.logits)
    entropies = entropy.view(call.rows_shape) if call.return_entropy else None
    return logprobs.view(call.shape), entropies


def kl_rows(call: KLDivergenceCall, ops: Ops, units: Units) -> tuple[Tensor, BesideDivergences]:
    """[R] divergences, reverse or forward, and what else was asked for; differentiable once."""
    _refuse_transforms()
    # KL(ref || policy) is KL(policy || ref) with the roles exchanged.
    forward = call.direction == "forward"
    first, second = call.logits, call.ref_logits
    if forward:
        first, second = second, first
    policy = "second" if forward else "first"
    plan = _plan_of(call, call.shape.numel(), policy, ops, units)
    if autograd.may_need_gradient(first, second):
        outputs = _KLRows.apply(first, second, plan)  # type: ignore[no-untyped-call]
    else:
        outputs = _pair_outputs(pair_rows(first, second, plan)[1], first, second)
    kl, logprobs, ref_logprobs, entropies = outputs
    if forward:
        logprobs, ref_logprobs = ref_logprobs, logprobs
    has_ids = call.token_ids is not None
    return kl, BesideDivergences(
        logprobs if has_ids else None,
        ref_logprobs if has_ids else None,
        entropies if call.return_entropy else None,
    )


def _plan_of(
    call: TokenLogprobsCall | KLDivergenceCall, rows: int, policy: str, ops: Ops, units: Units
) -> Plan:
    """The plan of a call with shards; ``policy``: its place among the models."""
    assert call.shards is not None
    return Plan(
        call.token_ids,
        call.keep,
        call.inverse_temperature,
        call.temperature,
        rows,
        ENTROPIES.index(policy if call.return_entropy else "none"),
        call.shards,
        ops,
        units,
    )


def _refuse_transforms() -> None:
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "group must be None under torch.func: a transform would make other collectives on "
            "every rank"
        )


def _optional(tensor: Tensor | None, like: Tensor) -> Tensor:
    """As a Function returns it: empty for what there is not."""
    return like.new_empty((0,)) if tensor is None else tensor


def _outputs_of(rows: TokenRows, logits: Tensor) -> tuple[Tensor, Tensor]:
    dtype = arithmetic_dtype(logits)
    logprobs = rows.logprobs.to(dtype)
    entropy = None if rows.entropy is None else rows.entropy.to(dtype)
    return logprobs, _optional(entropy, logprobs)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        own, rows = token_rows(logits, plan)
        autograd.save_all(ctx, (logits, plan, own, rows), OF_ONE_MODEL)
        ctx.has_entropy = plan.has_entropy
        outputs = _outputs_of(rows, logits)
        if not plan.has_entropy:
            ctx.mark_non_differentiable(outputs[1])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None]:
        grad_entropy = grad_entropy if ctx.has_entropy else None
        if grad_logprobs is None and grad_entropy is None:
            return None, None
        logits, plan, own, rows = autograd.saved_all(ctx)
        incoming = grad_logprobs, grad_entropy
        with torch.no_grad():
            grad = token_gradient(logits, plan, own, rows, *incoming, in_place=False)
        return autograd.once((grad, None), logits, grad_logprobs, grad_entropy)[0], None


class _InplaceTokenLogprobs(_TokenLogprobs):
    """The same with a backward that leaves its gradient in the logits' memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        ctx.is_fresh = True
        return _TokenLogprobs.forward(ctx, logits, plan)

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None]:
        grad_entropy = grad_entropy if ctx.has_entropy else None
        sent = [grad for grad in (grad_logprobs, grad_entropy) if grad is not None]
        if not sent:
            return None, None
        autograd.check_one_backward(ctx, sent)
        logits, plan, own, rows = autograd.saved_all(ctx)
        token_gradient(logits, plan, own, rows, grad_logprobs, grad_entropy, in_place=True)
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), None


def _pair_outputs(rows: PairRows, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """Divergences, log-probs under the first model and the second, entropies."""
    dtype = arithmetic_dtype(first, second)
    kl = rows.kl.to(dtype)
    others = (rows.logprobs, rows.ref_logprobs, rows.entropy)
    return kl, *(_optional(None if x is None else x.to(dtype), kl) for x in others)


class _KLRows(torch.autograd.Function):
    """KL(first || second) of rows, read again by the backward."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, plan: Plan) -> tuple[Tensor, ...]:
        own, rows = pair_rows(first, second, plan)
        autograd.save_all(ctx, (first, second, plan, own, rows), OF_TWO_MODELS)
        ctx.has = plan.has()
        outputs = _pair_outputs(rows, first, second)
        no_gradient = [x for x, is_there in zip(outputs, ctx.has, strict=True) if not is_there]
        ctx.mark_non_differentiable(*no_gradient)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        incoming = tuple(g if own else None for g, own in zip(incoming, ctx.has, strict=True))
        if all(grad is None for grad in incoming):
            return None, None, None
        first, second, plan, own, rows = autograd.saved_all(ctx)
        needs = ctx.needs_input_grad[:2]
        with torch.no_grad():
            found = pair_gradients(first, second, plan, own, rows, incoming, needs)
        grads = autograd.wanted(found, needs)
        return (*autograd.once(grads, first, second, *incoming), None)
