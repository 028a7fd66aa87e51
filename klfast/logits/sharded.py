"""The functions over logits where each rank has a shard of the vocabulary, for every compiled
backend alike.

The ops compute the rows of the own shard, ``klfast.logits.chain_rule`` those of all words.
Shapes: R rows, K token ids a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.dtypes import arithmetic_dtype
from klfast.logits.arguments import NO_ID
from klfast.logits.call import DIVERGENCES, ENTROPIES, KLDivergenceCall, TokenLogprobsCall
from klfast.logits.chain_rule import (
    PairPieces,
    PairRows,
    TokenPieces,
    TokenRows,
    combine_pairs,
    combine_tokens,
    weigh_pairs,
    weigh_tokens,
)
from klfast.logits.inplace import SERVES_ONE_BACKWARD
from klfast.logits.normalizers import LogSumExp, Units, of_pairs, of_tokens, rounded_scale
from klfast.logits.outputs import BesideDivergences
from klfast.logits.shards import Shards
from klfast.ops import autograd
from klfast.ops.table import Ops


class _Plan(NamedTuple):
    """All but the logits."""

    call: Any
    """A call with shards; its logits are not looked at."""
    ops: Ops
    units: Units

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those that autograd keeps in place of the plan."""
        return self.call.token_ids, self.call.keep, self.call.inverse_temperature

    def with_tensors(self, *tensors: Tensor | None) -> _Plan:
        token_ids, keep, inverse = tensors
        return self._replace(
            call=self.call._replace(token_ids=token_ids, keep=keep, inverse_temperature=inverse)
        )

    def has(self) -> tuple[bool, ...]:
        """Which outputs of two models there are."""
        return True, *(self.call.token_ids is not None,) * 2, self.call.return_entropy

    def scale(self, dtype: torch.dtype) -> float | Tensor:
        return rounded_scale(
            self.call.temperature, self.call.inverse_temperature, dtype, self.units
        )


_TENSORS = 3
"""Of a plan, which autograd keeps."""


def token_logprobs(call: TokenLogprobsCall, ops: Ops, units: Units) -> tuple[Tensor, Tensor | None]:
    """Log-probs, and entropies if asked for, in the call's shapes; differentiable once."""
    _refuse_transforms()
    plan = _Plan(call._replace(logits=_nothing(call.logits)), ops, units)
    if autograd.may_need_gradient(call.logits):
        function = _InplaceTokenLogprobs if call.inplace_backward else _TokenLogprobs
        logprobs, entropy = function.apply(call.logits, plan)  # type: ignore[no-untyped-call]
    else:
        _, rows = _token_rows(call.logits, plan)
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
    own = call._replace(logits=_nothing(call.logits), ref_logits=_nothing(call.ref_logits))
    plan = _Plan(own, ops, units)
    if autograd.may_need_gradient(first, second):
        outputs = _KLRows.apply(first, second, plan)  # type: ignore[no-untyped-call]
    else:
        outputs = _pair_outputs(_pair_rows(first, second, plan)[1], first, second)
    kl, logprobs, ref_logprobs, entropies = outputs
    if forward:
        logprobs, ref_logprobs = ref_logprobs, logprobs
    has_ids = call.token_ids is not None
    return kl, BesideDivergences(
        logprobs if has_ids else None,
        ref_logprobs if has_ids else None,
        entropies if call.return_entropy else None,
    )


def _nothing(logits: Tensor) -> Tensor:
    return logits.new_empty((0,))


def _refuse_transforms() -> None:
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "group must be None under torch.func: a transform would make other collectives on "
            "every rank"
        )


def _optional(tensor: Tensor | None, like: Tensor) -> Tensor:
    """As a Function returns it: empty for what there is not."""
    return like.new_empty((0,)) if tensor is None else tensor


# ---------------------------------------------------------------- one model


class _TokensOfShard(NamedTuple):
    """What the op made of this rank's words, as its backward takes it."""

    token_ids: Tensor
    """[R, K], as words of the shard."""
    saved: Tensor
    logprobs: Tensor
    """[R, K]."""
    entropy: Tensor


def _token_rows(logits: Tensor, plan: _Plan) -> tuple[_TokensOfShard, TokenRows]:
    call, ops = plan.call, plan.ops
    shards: Shards = call.shards
    own, lse = _tokens_of_shard(logits, plan)
    pieces = TokenPieces(lse, own.logprobs.unbind(-1), own.entropy if call.return_entropy else None)
    return own, combine_tokens(pieces, call.token_ids, call.keep, shards, ops)


def _tokens_of_shard(logits: Tensor, plan: _Plan) -> tuple[_TokensOfShard, LogSumExp]:
    call, dtype = plan.call, arithmetic_dtype(logits)
    shards: Shards = call.shards
    rows = call.rows_shape.numel()
    ids = shards.own_ids(call.token_ids, NO_ID).view(rows, -1)
    if logits.shape[-1] == 0:
        nothing = logits.new_zeros((rows,), dtype=torch.float64)
        taken = logits.new_zeros(ids.shape, dtype=dtype)
        entropy = nothing if call.return_entropy else nothing[:0]
        own = _TokensOfShard(ids, nothing.expand(2, rows), taken, entropy.to(dtype))
        return own, LogSumExp(nothing, _without_words(nothing, call.keep))
    logprobs, entropy, saved = plan.ops.token_logprobs_fwd(
        logits, ids, call.keep, call.temperature, call.return_entropy, call.inverse_temperature
    )
    lse = of_tokens(saved, plan.scale(dtype), plan.units)
    # The op has NaN for the words of a row of nothing but -inf; here other shards have words.
    none = lse.near == -torch.inf
    logprobs = torch.where(none[:, None] & (ids != NO_ID), -torch.inf, logprobs.view(ids.shape))
    if call.return_entropy:
        entropy = torch.where(none, 0.0, entropy)
    # Against 0 each of these words has the probability and the gradient 0.
    saved = torch.where(saved == -torch.inf, 0.0, saved)
    return _TokensOfShard(ids, saved, logprobs, entropy), lse


def _without_words(zeros: Tensor, keep: Tensor | None) -> Tensor:
    """The log-sum-exps [R] of no words, 0 where masked."""
    none = zeros - torch.inf
    return none if keep is None else torch.where(keep, none, 0.0)


def _outputs_of(rows: TokenRows, logits: Tensor) -> tuple[Tensor, Tensor]:
    dtype = arithmetic_dtype(logits)
    logprobs = rows.logprobs.to(dtype)
    entropy = None if rows.entropy is None else rows.entropy.to(dtype)
    return logprobs, _optional(entropy, logprobs)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
        own, rows = _token_rows(logits, plan)
        ctx.plan = plan.with_tensors(None, None, None)
        autograd.save(ctx, (logits, *plan.tensors(), *own, *rows))
        outputs = _outputs_of(rows, logits)
        if not plan.call.return_entropy:
            ctx.mark_non_differentiable(outputs[1])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None]:
        grad_entropy = grad_entropy if ctx.plan.call.return_entropy else None
        if grad_logprobs is None and grad_entropy is None:
            return None, None
        logits, arguments = _backward_of_tokens(ctx, grad_logprobs, grad_entropy)
        with torch.no_grad():
            grad = (
                ctx.plan.ops.token_logprobs_bwd(logits, *arguments)
                if logits.shape[-1] > 0
                else torch.empty_like(logits)
            )
        return autograd.once((grad, None), logits, grad_logprobs, grad_entropy)[0], None


def _backward_of_tokens(
    ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Tensor, tuple[Any, ...]]:
    """The logits, and the other arguments of the op that makes their gradient."""
    logits, *saved = autograd.saved(ctx)
    assert logits is not None
    call, ops, _ = ctx.plan.with_tensors(*saved[:_TENSORS])
    own = _TokensOfShard(*saved[_TENSORS : -len(TokenRows._fields)])  # type: ignore[arg-type]
    rows = TokenRows(*saved[-len(TokenRows._fields) :])  # type: ignore[arg-type]
    with torch.no_grad():
        weights = weigh_tokens(
            rows, call.token_ids, call.keep, call.shards, ops, grad_logprobs, grad_entropy
        )
        dtype = arithmetic_dtype(logits)
        # The op takes no gradient of an id of other words.
        grad = None if grad_logprobs is None else grad_logprobs.reshape(-1).contiguous()
        return logits, (
            own.token_ids,
            call.keep,
            own.saved,
            own.logprobs.reshape(-1),
            own.entropy,
            call.temperature,
            grad,
            None if weights.entropy is None else weights.entropy.to(dtype),
            call.inverse_temperature,
            weights.lse.to(dtype).contiguous(),
        )


class _InplaceTokenLogprobs(_TokenLogprobs):
    """The same with a backward that leaves its gradient in the logits' memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
        ctx.is_fresh = True
        return _TokenLogprobs.forward(ctx, logits, plan)

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None]:
        grad_entropy = grad_entropy if ctx.plan.call.return_entropy else None
        sent = [grad for grad in (grad_logprobs, grad_entropy) if grad is not None]
        if not sent:
            return None, None
        if any(map(autograd.is_batched, sent)):
            raise RuntimeError("inplace_backward=True serves one gradient, not a batch of them")
        if torch.is_grad_enabled() or autograd.take(ctx, "is_fresh") is None:
            raise RuntimeError(SERVES_ONE_BACKWARD)
        logits, arguments = _backward_of_tokens(ctx, grad_logprobs, grad_entropy)
        if logits.shape[-1] > 0:
            ctx.plan.ops.token_logprobs_bwd_(logits, *arguments)
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), None


# --------------------------------------------------------------- two models


class _PairsOfShard(NamedTuple):
    """What the op made of this rank's words, as its backward takes it."""

    token_ids: Tensor | None
    """[R], as words of the shard; 0 where the shard has no such word."""
    has_word: Tensor | None
    """[R]: where it has."""
    saved: Tensor
    kl: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    entropy: Tensor


def _pair_rows(first: Tensor, second: Tensor, plan: _Plan) -> tuple[_PairsOfShard, PairRows]:
    call = plan.call
    own, lse, ref_lse = _pairs_of_shard(first, second, plan)
    pieces = PairPieces(
        lse,
        ref_lse,
        own.kl,
        own.entropy if call.return_entropy else None,
        (own.logprobs, own.ref_logprobs) if call.token_ids is not None else None,
    )
    return own, combine_pairs(
        pieces, call.token_ids, call.keep, _entropy_of(call), call.shards, plan.ops
    )


def _entropy_of(call: KLDivergenceCall) -> int:
    policy = "second" if call.direction == "forward" else "first"
    return ENTROPIES.index(policy if call.return_entropy else "none")


def _options(call: KLDivergenceCall, entropy_of: int) -> tuple[int, float, float, int]:
    return DIVERGENCES.index("kl"), 0.5, call.temperature, entropy_of


def _pairs_of_shard(
    first: Tensor, second: Tensor, plan: _Plan
) -> tuple[_PairsOfShard, LogSumExp, LogSumExp]:
    call, dtype = plan.call, arithmetic_dtype(first, second)
    ids = has_word = None
    if call.token_ids is not None:
        has_word = call.shards.has(call.token_ids)
        ids = call.shards.own_ids(call.token_ids, 0)
    if first.shape[-1] == 0:
        return _pairs_of_no_word(first, ids, has_word, call, dtype)
    whole = _ops_of_pair(first, second, ids, call.keep, _entropy_of(call), plan)
    missing = (whole.lse.near + whole.ref_lse.near).isnan()
    if first.device.type != "cpu" or missing.any():  # elsewhere a look would wait for the device
        whole = _with_missing(first, second, ids, plan, whole, missing)
    found, lse, ref_lse = whole
    own = _PairsOfShard(ids, has_word, *found)
    if has_word is not None:
        own = own._replace(
            logprobs=torch.where(has_word, own.logprobs, 0.0),
            ref_logprobs=torch.where(has_word, own.ref_logprobs, 0.0),
        )
    return own, lse, ref_lse


class _Outputs(NamedTuple):
    """The outputs of the op, in the order of ``_PairsOfShard``."""

    saved: Tensor
    kl: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    entropy: Tensor


class _Found(NamedTuple):
    outputs: _Outputs
    lse: LogSumExp
    ref_lse: LogSumExp


def _ops_of_pair(
    first: Tensor,
    second: Tensor,
    ids: Tensor | None,
    keep: Tensor | None,
    entropy_of: int,
    plan: _Plan,
) -> _Found:
    call = plan.call
    kl, logprobs, ref_logprobs, saved, _, _, entropy = plan.ops.kl_divergence_fwd(
        *(first, second, ids, keep),
        *_options(call, entropy_of),
        *(None, False, False),
        call.inverse_temperature,
    )
    scale = plan.scale(arithmetic_dtype(first, second))
    outputs = _Outputs(saved, kl, logprobs, ref_logprobs, entropy)
    return _Found(outputs, *of_pairs(saved, scale, plan.units))


def _with_missing(
    first: Tensor,
    second: Tensor,
    ids: Tensor | None,
    plan: _Plan,
    found: _Found,
    missing: Tensor,
) -> _Found:
    """The same, where the op has NaN since a model says none of the shard's words.

    What the other says comes from the op over that model twice; then both of its log-sum-exps are
    this model's, against which the words of the first have the probability and the gradient 0. The
    divergence is between the shards. Where there is a NaN, NaN stays.
    """
    wanted = ENTROPIES[_entropy_of(plan.call)]

    def alone(model: Tensor, place: str) -> tuple[_Outputs, LogSumExp, Tensor]:
        entropy_of = ENTROPIES.index("first" if wanted == place else "none")
        outputs, lse, _ = _ops_of_pair(model, model, ids, missing, entropy_of, plan)
        return outputs, lse, lse.near == -torch.inf

    of_first, lse, no_first = alone(first, "first")
    of_second, ref_lse, no_second = alone(second, "second")
    saved = torch.where(lse.near.isfinite(), of_first.saved, of_second.saved)
    outputs = found.outputs._replace(
        saved=torch.where(no_first & no_second, 0.0, saved),
        kl=torch.zeros_like(found.outputs.kl),
    )
    if ids is not None:
        outputs = outputs._replace(
            logprobs=torch.where(no_first, -torch.inf, of_first.logprobs),
            ref_logprobs=torch.where(no_second, -torch.inf, of_second.logprobs),
        )
    if wanted == "first":
        outputs = outputs._replace(entropy=torch.where(no_first, 0.0, of_first.entropy))
    elif wanted == "second":
        outputs = outputs._replace(entropy=torch.where(no_second, 0.0, of_second.entropy))
    together = zip(outputs, found.outputs, strict=True)
    return _Found(
        _Outputs(*(x if x is y else torch.where(missing, x, y) for x, y in together)),
        _either(missing, lse, found.lse),
        _either(missing, ref_lse, found.ref_lse),
    )


def _either(condition: Tensor, lse: LogSumExp, other: LogSumExp) -> LogSumExp:
    return LogSumExp(*(torch.where(condition, *pair) for pair in zip(lse, other, strict=True)))


def _pairs_of_no_word(
    logits: Tensor,
    ids: Tensor | None,
    has_word: Tensor | None,
    call: KLDivergenceCall,
    dtype: torch.dtype,
) -> tuple[_PairsOfShard, LogSumExp, LogSumExp]:
    rows = call.shape.numel()
    nothing = logits.new_zeros((rows,), dtype=torch.float64)
    own = nothing.to(dtype)
    found = _Outputs(nothing.expand(5, rows), own, own, own, own)
    lse = LogSumExp(nothing, _without_words(nothing, call.keep))
    return _PairsOfShard(ids, has_word, *found), lse, lse


def _pair_outputs(rows: PairRows, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """Divergences, log-probs under the first model and the second, entropies."""
    dtype = arithmetic_dtype(first, second)
    kl = rows.kl.to(dtype)
    others = (rows.logprobs, rows.ref_logprobs, rows.entropy)
    return kl, *(_optional(None if x is None else x.to(dtype), kl) for x in others)


class _KLRows(torch.autograd.Function):
    """KL(first || second) of rows, read again by the backward."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, plan: _Plan) -> tuple[Tensor, ...]:
        own, rows = _pair_rows(first, second, plan)
        ctx.plan, ctx.has = plan.with_tensors(None, None, None), plan.has()
        autograd.save(ctx, (first, second, *plan.tensors(), *own, *rows))
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
        with torch.no_grad():
            found = _backward_of_pairs(ctx, first, second, saved, incoming)
        grads = autograd.wanted(found, ctx.needs_input_grad[:2])
        return (*autograd.once(grads, first, second, *incoming), None)


def _backward_of_pairs(
    ctx: Any, first: Tensor, second: Tensor, saved: Any, incoming: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    needs = ctx.needs_input_grad[:2]
    if first.shape[-1] == 0:
        return torch.empty_like(first), torch.empty_like(second)
    call, ops, _ = ctx.plan.with_tensors(*saved[:_TENSORS])
    own = _PairsOfShard(*saved[_TENSORS : -len(PairRows._fields)])
    rows = PairRows(*saved[-len(PairRows._fields) :])
    entropy_of = _entropy_of(call)
    weights = weigh_pairs(rows, call.token_ids, call.keep, entropy_of, call.shards, ops, *incoming)
    dtype = arithmetic_dtype(first, second)

    def of_own_words(grad: Tensor | None) -> Tensor | None:
        if grad is None or own.has_word is None:
            return None
        return torch.where(own.has_word, grad, 0.0)

    def rounded(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.to(dtype).contiguous()

    grads: tuple[Tensor, ...] = ops.kl_divergence_bwd(
        *(first, second, own.token_ids, call.keep),
        *_options(call, entropy_of),
        own.kl,
        own.saved,
        own.entropy,
        rounded(weights.kl),
        *map(of_own_words, incoming[1:3]),
        rounded(weights.entropy),
        *needs,
        call.inverse_temperature,
        rounded(weights.lse),
        rounded(weights.ref_lse),
    )
    return grads
