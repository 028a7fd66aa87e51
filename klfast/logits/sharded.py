"""The functions over logits where each rank has a shard of the vocabulary, for every compiled
backend alike.

``klfast.logits.shard_rows`` has the rows. Shapes: R rows, K token ids a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from klfast.dtypes import arithmetic_dtype
from klfast.logits.call import ENTROPIES, KLDivergenceCall, TokenLogprobsCall
from klfast.logits.chain_rule import PairRows, TokenRows
from klfast.logits.normalizers import Units
from klfast.logits.outputs import BesideDivergences
from klfast.logits.shard_rows import (
    TENSORS,
    PairsOfShard,
    Plan,
    TokensOfShard,
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


def _save(ctx: Any, plan: Plan, logits: Iterable[Tensor], others: Iterable[Any]) -> None:
    """Keep logits, the plan's tensors and others for the backward."""
    ctx.plan = plan.with_tensors((None,) * TENSORS)
    autograd.save(ctx, (*logits, *plan.tensors(), *others))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        own, rows = token_rows(logits, plan)
        _save(ctx, plan, (logits,), (*own, *rows))
        outputs = _outputs_of(rows, logits)
        if not plan.has_entropy:
            ctx.mark_non_differentiable(outputs[1])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None]:
        grad_entropy = grad_entropy if ctx.plan.has_entropy else None
        if grad_logprobs is None and grad_entropy is None:
            return None, None
        logits, *saved = autograd.saved(ctx)
        assert logits is not None
        with torch.no_grad():
            grad = _token_gradient(ctx, logits, saved, (grad_logprobs, grad_entropy))
        return autograd.once((grad, None), logits, grad_logprobs, grad_entropy)[0], None


def _token_gradient(
    ctx: Any, logits: Tensor, saved: Any, incoming: Any, in_place: bool = False
) -> Tensor:
    plan = ctx.plan.with_tensors(saved[:TENSORS])
    own = TokensOfShard(*saved[TENSORS : -len(TokenRows._fields)])
    rows = TokenRows(*saved[-len(TokenRows._fields) :])
    return token_gradient(logits, plan, own, rows, *incoming, in_place=in_place)


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
        grad_entropy = grad_entropy if ctx.plan.has_entropy else None
        sent = [grad for grad in (grad_logprobs, grad_entropy) if grad is not None]
        if not sent:
            return None, None
        autograd.check_one_backward(ctx, sent)
        logits, *saved = autograd.saved(ctx)
        assert logits is not None
        _token_gradient(ctx, logits, saved, (grad_logprobs, grad_entropy), in_place=True)
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
        _save(ctx, plan, (first, second), (*own, *rows))
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
        first, second, *saved = autograd.saved(ctx)
        assert first is not None
        assert second is not None
        needs = ctx.needs_input_grad[:2]
        plan = ctx.plan.with_tensors(saved[:TENSORS])
        own = PairsOfShard(*saved[TENSORS : -len(PairRows._fields)])  # type: ignore[arg-type]
        rows = PairRows(*saved[-len(PairRows._fields) :])  # type: ignore[arg-type]
        with torch.no_grad():
            found = pair_gradients(first, second, plan, own, rows, incoming, needs)
        grads = autograd.wanted(found, needs)
        return (*autograd.once(grads, first, second, *incoming), None)
