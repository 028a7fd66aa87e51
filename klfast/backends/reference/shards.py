"""The readable specification where each rank has a shard of the vocabulary: the chain rule in
float64, differentiated by autograd.

A rank's numbers carry its graph, those of the other ranks none: so a gradient is that of the rank's
own logits, from a loss that all ranks have the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.backends.reference.logits import (
    divergence,
    entropies_of,
    expectation,
    overwritten,
    taken_of,
    temperature_of,
    wide_rows,
    zero_where_masked,
)
from klfast.backends.reference.penalty import kl_penalty
from klfast.dtypes import arithmetic_dtype
from klfast.formulas import zero_at
from klfast.logits.arguments import NO_ID, of_k
from klfast.logits.call import KLDivergenceCall, TokenLogprobsCall
from klfast.logits.outputs import BesideDivergences, KLDivergence, outputs_of
from klfast.logits.shards import Shards
from klfast.ops import autograd


class _Shard(NamedTuple):
    """A model's distribution over this rank's words."""

    logprobs: Tensor
    """[R, V_r]: within the shard; of equal words where it has none with a probability."""
    far: Tensor
    """[R], like the next: the log-sum-exp is their sum."""
    near: Tensor
    has_none: Tensor


def token_logprobs(call: TokenLogprobsCall) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies: log p(w) = log p|r(w) + log P_r, and sum P_r (H(p|r) - log P_r)."""
    assert call.shards is not None
    logits = overwritten(call.logits) if call.inplace_backward else call.logits
    arithmetic = arithmetic_dtype(logits)
    shard = _shard_of(logits, call)
    picks = of_k(_picks_of(shard, call)).unbind(-1)
    columns = [shard.far, shard.near, *picks]
    if call.return_entropy:
        columns.append(entropies_of(shard.logprobs, call.keep))
    far, near, *others = _everywhere(call.shards, columns)
    masses = _log_masses(far, near)
    own = torch.stack([pick.sum(-1) for pick in others[: len(picks)]], -1)
    taken = _with_masses(own.view(call.token_ids.shape), masses, call)
    entropy = None
    if call.return_entropy:
        entropy = expectation(masses, others[-1] - masses)
        entropy = zero_where_masked(entropy, call.keep).to(arithmetic).view(call.rows_shape)
    return taken.to(arithmetic).view(call.shape), entropy


def divergences(call: KLDivergenceCall) -> Tensor:
    """[R] divergences alone."""
    return _rows_of(call)[0]


def kl_divergence(call: KLDivergenceCall) -> KLDivergence:
    """The divergence and what else is asked for. See ``klfast.kl_divergence``."""
    rows, beside = _rows_of(call)
    return outputs_of(call, kl_penalty(call.reduce(rows)), beside, kl_penalty)


def _rows_of(call: KLDivergenceCall) -> tuple[Tensor, BesideDivergences]:
    """[R]: sum P_r KL(p|r || q|r) + KL(P || Q), and what else is asked for."""
    assert call.shards is not None
    arithmetic = arithmetic_dtype(call.logits, call.ref_logits)
    policy, reference = (_shard_of(x, call) for x in (call.logits, call.ref_logits))
    first, second = policy, reference
    if call.direction == "forward":
        first, second = second, first
    within = divergence(first.logprobs, second.logprobs)
    columns = [policy.far, policy.near, reference.far, reference.near, within]
    if call.return_entropy:
        columns.append(entropies_of(policy.logprobs, call.keep))
    if call.token_ids is not None:
        columns += [_picks_of(model, call) for model in (policy, reference)]
    table = _everywhere(call.shards, columns)
    masses, ref_masses = _log_masses(*table[:2]), _log_masses(*table[2:4])
    p, q = (ref_masses, masses) if call.direction == "forward" else (masses, ref_masses)
    rows = expectation(p, table[4]) + divergence(p, q)
    rows = zero_at(rows < 0, rows)
    rows = zero_where_masked(rows, call.keep).to(arithmetic)
    beside = BesideDivergences()
    if call.return_entropy:
        entropies = zero_where_masked(expectation(masses, table[5] - masses), call.keep)
        entropies = torch.where(rows.isnan(), torch.nan, entropies.to(arithmetic))
        beside = beside._replace(entropies=entropies)
    if call.token_ids is not None:
        taken, ref_taken = (
            _with_masses(own.sum(-1), of, call).to(arithmetic)
            for own, of in zip(table[-2:], (masses, ref_masses), strict=True)
        )
        beside = beside._replace(logprobs=taken, ref_logprobs=ref_taken)
    return rows, beside


class _Once(torch.autograd.Function):
    """Its input, whose gradient depends on other ranks' logits too: no graph of it is made."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        return autograd.guarded((grad,), grad)[0]


def added_up(hidden: Tensor, shards: Shards) -> Tensor:
    """The same hidden states, whose gradient is the sum of all ranks' gradients."""
    result: Tensor = _AddedUp.apply(hidden, shards)  # type: ignore[no-untyped-call]
    return result


class _AddedUp(torch.autograd.Function):
    """Its input, whose gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shards: Shards) -> Tensor:
        ctx.ranks = shards.ranks
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        total = grad.detach().clone(memory_format=torch.contiguous_format)
        ctx.ranks.add_up(total)
        return autograd.guarded((total,), grad)[0], None


def _shard_of(logits: Tensor, call: TokenLogprobsCall | KLDivergenceCall) -> _Shard:
    logits = _Once.apply(logits)  # type: ignore[no-untyped-call]
    rows = wide_rows(logits, call.keep)
    if rows.shape[-1] == 0:
        nothing = rows.sum(-1)
        none = torch.ones_like(nothing, dtype=torch.bool)
        near = zero_where_masked(nothing - torch.inf, call.keep)
        return _Shard(rows, nothing, near, none)
    has_none = (rows == -torch.inf).all(-1)
    rows = torch.where(has_none[:, None], 0.0, rows)
    greatest = rows.detach().amax(-1, keepdim=True)
    temperature = temperature_of(call)
    rest = (rows - greatest) / temperature
    near = torch.where(has_none, -torch.inf, rest.logsumexp(-1))
    return _Shard(rest.log_softmax(-1), (greatest / temperature)[:, 0], near, has_none)


def _picks_of(shard: _Shard, call: TokenLogprobsCall | KLDivergenceCall) -> Tensor:
    """The log-probs of ids within the shard; 0 of those that are words of another."""
    assert call.shards is not None
    assert call.token_ids is not None
    ids = call.token_ids
    has = call.shards.has(ids)
    none = shard.has_none if ids.dim() == 1 else shard.has_none[:, None]
    if shard.logprobs.shape[-1] == 0:
        return shard.logprobs.new_zeros(ids.shape)
    taken = taken_of(shard.logprobs, call.shards.own_ids(ids, 0), call.keep)
    return torch.where(has, torch.where(none, -torch.inf, taken), 0.0)


def _with_masses(own: Tensor, masses: Tensor, call: TokenLogprobsCall | KLDivergenceCall) -> Tensor:
    """Log-probs: those within the shards of their ids, plus these shards' own."""
    assert call.shards is not None
    assert call.token_ids is not None
    owners = call.shards.owners(call.token_ids)
    is_word = (owners >= 0) & (owners < masses.shape[-1])
    of_shards = taken_of(masses, torch.where(is_word, owners, 0), None)
    taken = own + torch.where(is_word, of_shards, torch.nan)
    exist = owners != NO_ID
    if call.keep is not None:
        exist = exist & (call.keep if owners.dim() == 1 else call.keep[:, None])
    return torch.where(exist, taken, 0.0)


def _everywhere(shards: Shards, columns: list[Tensor]) -> list[Tensor]:
    """Each column of all ranks, [R, S], of which this rank's carries its graph."""
    table = shards.gather([column.detach() for column in columns])
    is_own = torch.arange(shards.ranks.size, device=table.device) == shards.ranks.rank
    return [
        torch.where(is_own, own[:, None], others)
        for own, others in zip(columns, table, strict=True)
    ]


def _log_masses(far: Tensor, near: Tensor) -> Tensor:
    """[R, S]: log P_r, of the shards' log-sum-exps."""
    place = (far + near).detach().argmax(-1, keepdim=True)
    apart = near - near.detach().gather(-1, place) + (far - far.gather(-1, place))
    return apart.log_softmax(-1)
