"""The rows of one shard of a vocabulary, by the ops, and with them the rows of all words.

Nothing here is differentiated by autograd: ``klfast.logits.sharded`` and ``klfast.linear.autograd``
have the Functions. Shapes: R rows, K token ids a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from klfast.dtypes import arithmetic_dtype
from klfast.logits.arguments import NO_ID, of_k
from klfast.logits.call import DIVERGENCES, ENTROPIES
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
from klfast.logits.normalizers import LogSumExp, Units, of_pairs, of_tokens, rounded_scale
from klfast.logits.shards import Shards
from klfast.ops.table import SAVED_OF_PAIRS, SAVED_OF_TOKENS, Ops

NO_ENTROPY = ENTROPIES.index("none")


class Plan(NamedTuple):
    """All but the logits."""

    token_ids: Tensor | None
    """[R], or [R, K] of one model; of the whole vocabulary."""
    keep: Tensor | None
    """[R]."""
    inverse_temperature: Tensor | None
    temperature: float
    rows: int
    entropy_of: int
    """The model whose entropies are wanted, a position in ``ENTROPIES``."""
    shards: Shards
    ops: Ops
    units: Units

    @property
    def has_entropy(self) -> bool:
        return self.entropy_of != NO_ENTROPY

    def has(self) -> tuple[bool, ...]:
        """Which outputs of two models there are."""
        return True, *(self.token_ids is not None,) * 2, self.has_entropy

    def scale(self, dtype: torch.dtype) -> float | Tensor:
        return rounded_scale(self.temperature, self.inverse_temperature, dtype, self.units)


# ---------------------------------------------------------------- one model


class TokensOfShard(NamedTuple):
    """What the op made of this rank's words, as its backward takes it."""

    token_ids: Tensor
    """[R, K], as words of the shard."""
    saved: Tensor
    logprobs: Tensor
    """[R, K]."""
    entropy: Tensor


def token_rows(logits: Tensor, plan: Plan) -> tuple[TokensOfShard, TokenRows]:
    """The rows of this rank's shard, and those of all words."""
    own, lse = _tokens_of_shard(logits, plan)
    pieces = TokenPieces(lse, own.logprobs.unbind(-1), own.entropy if plan.has_entropy else None)
    assert plan.token_ids is not None
    return own, combine_tokens(pieces, plan.token_ids, plan.keep, plan.shards, plan.ops)


def _tokens_of_shard(logits: Tensor, plan: Plan) -> tuple[TokensOfShard, LogSumExp]:
    assert plan.token_ids is not None
    dtype = arithmetic_dtype(logits)
    ids = of_k(plan.shards.own_ids(plan.token_ids, NO_ID))
    if logits.shape[-1] == 0:
        nothing = logits.new_zeros((plan.rows,), dtype=torch.float64)
        taken = logits.new_zeros(ids.shape, dtype=dtype)
        entropy = nothing if plan.has_entropy else nothing[:0]
        own = TokensOfShard(
            ids, nothing.expand(SAVED_OF_TOKENS, plan.rows), taken, entropy.to(dtype)
        )
        return own, LogSumExp(nothing, _without_words(nothing, plan.keep))
    logprobs, entropy, saved = plan.ops.token_logprobs_fwd(
        logits, ids, plan.keep, plan.temperature, plan.has_entropy, plan.inverse_temperature
    )
    lse = of_tokens(saved, plan.scale(dtype), plan.units)
    # The op has NaN for the words of a row of nothing but -inf; here other shards have words.
    none = lse.near == -torch.inf
    logprobs = torch.where(none[:, None] & (ids != NO_ID), -torch.inf, logprobs.view(ids.shape))
    if plan.has_entropy:
        entropy = torch.where(none, 0.0, entropy)
    # Against 0 each of these words has the probability and the gradient 0.
    saved = torch.where(saved == -torch.inf, 0.0, saved)
    return TokensOfShard(ids, saved, logprobs, entropy), lse


def _without_words(zeros: Tensor, keep: Tensor | None) -> Tensor:
    """The log-sum-exps [R] of no words, 0 where masked."""
    none = zeros - torch.inf
    return none if keep is None else torch.where(keep, none, 0.0)


def token_gradient(
    logits: Tensor,
    plan: Plan,
    own: TokensOfShard,
    rows: TokenRows,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    *,
    in_place: bool,
) -> Tensor:
    """The gradient of this rank's logits, of those of all words' rows; in place it is left in the
    logits' memory.
    """
    if logits.shape[-1] == 0:
        return torch.empty_like(logits)
    assert plan.token_ids is not None
    weights = weigh_tokens(
        rows, plan.token_ids, plan.keep, plan.shards, plan.ops, grad_logprobs, grad_entropy
    )
    dtype = arithmetic_dtype(logits)
    arguments = (
        logits,
        own.token_ids,
        plan.keep,
        own.saved,
        own.logprobs.reshape(-1),
        own.entropy,
        plan.temperature,
        # The op takes no gradient of an id of other words.
        None if grad_logprobs is None else grad_logprobs.reshape(-1).contiguous(),
        None if weights.entropy is None else weights.entropy.to(dtype),
        plan.inverse_temperature,
        weights.lse.to(dtype).contiguous(),
    )
    if not in_place:
        return plan.ops.token_logprobs_bwd(*arguments)
    plan.ops.token_logprobs_bwd_(*arguments)
    return logits


# --------------------------------------------------------------- two models


class PairsOfShard(NamedTuple):
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


def pair_rows(first: Tensor, second: Tensor, plan: Plan) -> tuple[PairsOfShard, PairRows]:
    """The rows of this rank's shard, and those of all words; KL(first || second)."""
    own, lse, ref_lse = _pairs_of_shard(first, second, plan)
    pieces = PairPieces(
        lse,
        ref_lse,
        own.kl,
        own.entropy if plan.has_entropy else None,
        (own.logprobs, own.ref_logprobs) if plan.token_ids is not None else None,
    )
    return own, combine_pairs(
        pieces, plan.token_ids, plan.keep, plan.entropy_of, plan.shards, plan.ops
    )


def _options(plan: Plan) -> tuple[int, float, float]:
    return DIVERGENCES.index("kl"), 0.5, plan.temperature


def _pairs_of_shard(
    first: Tensor, second: Tensor, plan: Plan
) -> tuple[PairsOfShard, LogSumExp, LogSumExp]:
    ids = has_word = None
    if plan.token_ids is not None:
        has_word = plan.shards.has(plan.token_ids)
        ids = plan.shards.own_ids(plan.token_ids, 0)
    if first.shape[-1] == 0:
        return _pairs_of_no_word(first, ids, has_word, plan, arithmetic_dtype(first, second))
    whole = _ops_of_pair(first, second, ids, plan.keep, plan.entropy_of, plan)
    missing = (whole.lse.near + whole.ref_lse.near).isnan()
    if first.device.type != "cpu" or missing.any():  # elsewhere a look would wait for the device
        whole = _with_missing(first, second, ids, plan, whole, missing)
    found, lse, ref_lse = whole
    own = PairsOfShard(ids, has_word, *found)
    if has_word is not None:
        own = own._replace(
            logprobs=torch.where(has_word, own.logprobs, 0.0),
            ref_logprobs=torch.where(has_word, own.ref_logprobs, 0.0),
        )
    return own, lse, ref_lse


class _Outputs(NamedTuple):
    """The outputs of the op, in the order of ``PairsOfShard``."""

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
    plan: Plan,
) -> _Found:
    kl, logprobs, ref_logprobs, saved, _, _, entropy = plan.ops.kl_divergence_fwd(
        *(first, second, ids, keep),
        *_options(plan),
        entropy_of,
        *(None, False, False),
        plan.inverse_temperature,
    )
    scale = plan.scale(arithmetic_dtype(first, second))
    outputs = _Outputs(saved, kl, logprobs, ref_logprobs, entropy)
    return _Found(outputs, *of_pairs(saved, scale, plan.units))


def _with_missing(
    first: Tensor,
    second: Tensor,
    ids: Tensor | None,
    plan: Plan,
    found: _Found,
    missing: Tensor,
) -> _Found:
    """The same, where the op has NaN since a model says none of the shard's words.

    What the other says comes from the op over that model twice; then both of its log-sum-exps are
    this model's, against which the words of the first have the probability and the gradient 0. The
    divergence is between the shards. Where there is a NaN, NaN stays.
    """
    wanted = ENTROPIES[plan.entropy_of]

    def alone(model: Tensor, place: str) -> tuple[_Outputs, LogSumExp, Tensor]:
        entropy_of = ENTROPIES.index("first") if wanted == place else NO_ENTROPY
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
    plan: Plan,
    dtype: torch.dtype,
) -> tuple[PairsOfShard, LogSumExp, LogSumExp]:
    nothing = logits.new_zeros((plan.rows,), dtype=torch.float64)
    own = nothing.to(dtype)
    found = _Outputs(nothing.expand(SAVED_OF_PAIRS, plan.rows), own, own, own, own)
    lse = LogSumExp(nothing, _without_words(nothing, plan.keep))
    return PairsOfShard(ids, has_word, *found), lse, lse


def pair_gradients(
    first: Tensor,
    second: Tensor,
    plan: Plan,
    own: PairsOfShard,
    rows: PairRows,
    incoming: Sequence[Tensor | None],
    needs: Sequence[bool],
    *,
    in_place: bool = False,
) -> tuple[Tensor, ...]:
    """The gradients of this rank's logits under either model, of those of all words' rows.

    Args:
        first: logits, as ``second``.
        second: of the other model.
        plan: all else.
        own: of ``pair_rows``, as ``rows``.
        rows: of all words.
        incoming: of divergences, log-probs under either model, and entropies.
        needs: which of both gradients are wanted.
        in_place: leave them in the logits' memory; of divergences alone.
    """
    if first.shape[-1] == 0:
        return torch.empty_like(first), torch.empty_like(second)
    dtype = arithmetic_dtype(first, second)
    weights = weigh_pairs(
        rows, plan.token_ids, plan.keep, plan.entropy_of, plan.shards, plan.ops, *incoming
    )

    def of_own_words(grad: Tensor | None) -> Tensor | None:
        if grad is None or own.has_word is None:
            return None
        return torch.where(own.has_word, grad, 0.0)

    def rounded(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.to(dtype).contiguous()

    last = (*needs, plan.inverse_temperature, rounded(weights.lse), rounded(weights.ref_lse))
    if in_place:
        known = own.kl, own.saved, rounded(weights.kl)
        plan.ops.kl_divergence_bwd_(first, second, plan.keep, *_options(plan), *known, *last)
        return first, second
    grads: tuple[Tensor, ...] = plan.ops.kl_divergence_bwd(
        *(first, second, own.token_ids, plan.keep),
        *_options(plan),
        plan.entropy_of,
        *(own.kl, own.saved, own.entropy),
        rounded(weights.kl),
        *map(of_own_words, incoming[1:3]),
        rounded(weights.entropy),
        *last,
    )
    return grads
