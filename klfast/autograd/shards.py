"""The ops over a sharded vocabulary, one shard per rank, from the ops over each rank's own shard.

The ops use the chain rule. P_r and Q_r are the masses of shard r under the models, and p|r, q|r the
distributions within it:

- log p(v) = log p|r(v) + log P_r, for an entry v of shard r;
- H(p) = sum_r P_r H(p|r) + H(P);
- KL(p || q) = sum_r P_r KL(p|r || q|r) + KL(P || Q).

P is the softmax of the shards' log-sum-exps: a distribution over a vocabulary of S entries. The
same ops compute its log-probs, entropies, divergences and their gradients, in fp64. So the ranks
exchange a few numbers per row, and all compute the same result by the same arithmetic. A backward
needs nothing from the other ranks. A rank's rows get weights, and gradients of their log-sum-exps.
One table of numbers per row holds what a backward needs from both steps, in place of ``saved``.

Shapes: R rows, K token ids per row, S shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.args.logits import NO_ID, of_k
from klfast.args.rows import ENTROPIES, Shards
from klfast.autograd.lse import LogSumExp, UnitsOf, of_pairs, of_tokens, rounded_scale
from klfast.formulas.divergences import DIVERGENCES
from klfast.ops.schemas import SAVED_OF_PAIRS, SAVED_OF_TOKENS, Ops
from klfast.types.dtypes import arithmetic_dtype, picks_dtype, wide

_KL, _NO_ENTROPY = DIVERGENCES.index("kl"), ENTROPIES.index("none")
# Divergence, parameter and temperature of the row of shards. A KL takes no parameter, and the
# log-sum-exps are over the temperature already.
_OF_MASSES = (_KL, 0.5, 1.0)


def over_shards(ops: Ops, shards: Shards, units_of: UnitsOf) -> Ops:
    """The ops over the whole of a sharded vocabulary."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "group must be None under torch.func, whose transforms would make the ranks run "
            "different collectives"
        )
    tokens, pairs = _TokenOps(ops, shards, units_of), _PairOps(ops, shards, units_of)
    return ops._replace(
        token_logprobs_fwd=tokens.forward,
        token_logprobs_bwd=tokens.backward,
        token_logprobs_bwd_=tokens.backward_in_place,
        kl_divergence_fwd=pairs.forward,
        kl_divergence_fwd_=pairs.forward_in_place,
        kl_divergence_bwd=pairs.backward,
        kl_divergence_bwd_=pairs.backward_in_place,
    )


class _ShardOps:
    """The ops of ``klfast.ops.schemas``, with their arguments and results."""

    def __init__(self, ops: Ops, shards: Shards, units_of: UnitsOf) -> None:
        self._ops, self._shards, self._units_of = ops, shards, units_of

    def _gathered(self, columns: Sequence[Tensor]) -> Tensor:
        """All ranks' columns, [columns, R, S], in ``wide_dtype``: a call's one collective."""
        table, apart = torch.stack([wide(column) for column in columns]), self._shards.are_apart
        if apart is not None:
            # A GPU has compared the ranks' calls, and the host has not waited for the outcome. NaN
            # on every rank says that they differ.
            table = torch.where(apart, torch.nan, table)
        return self._shards.ranks.all_gather(table).permute(1, 2, 0)

    def _weighed(
        self, masses: Tensor, values: Tensor, *, shows_infinity: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's mass, its value less the mean over shards, and this mean, [R] each."""
        shares, rank = masses[0].softmax(-1), self._shards.ranks.rank
        weights = torch.where(values == torch.inf, 1.0, shares) if shows_infinity else shares
        mean = (weights * values).sum(-1)
        return shares[:, rank], values[:, rank] - mean, mean


class _TokenOps(_ShardOps):
    """The ops over one model."""

    def forward(
        self, logits: Tensor, token_ids: Tensor, keep: Tensor | None, *options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        _, want_entropy, _ = options
        ids = of_k(self._shards.own_ids(token_ids, NO_ID))
        own, own_entropy, saved, lse = self._of_shard(logits, ids, keep, *options)
        columns = [*lse, *own.unbind(-1), *([own_entropy] if want_entropy else [])]
        table = self._gathered(columns)
        masses = _masses(table[0], table[1])
        # In the row of shards, a token's id is the rank that owns its id.
        of_shards, entropy_of_shards, saved_of_shards = self._ops.token_logprobs_fwd(
            masses, self._shards.owners(token_ids), keep, 1.0, want_entropy, None
        )
        of_shards = of_shards.view(ids.shape)
        # The ranks without an id have gathered 0 for it.
        logprobs = table[2 : 2 + ids.shape[1]].sum(-1).T + of_shards
        parts = [saved, saved_of_shards, own.T, of_shards.T, masses[0].T]
        entropy, dtype = own_entropy[:0], arithmetic_dtype(logits)
        if want_entropy:
            share, surplus, mean = self._weighed(masses, table[-1])
            entropy = (entropy_of_shards + _where_kept(mean, keep)).to(dtype)
            parts += [own_entropy, entropy_of_shards, share, surplus]
        return logprobs.reshape(-1).to(picks_dtype(token_ids, dtype)), entropy, _packed(parts)

    def _of_shard(
        self, logits: Tensor, ids: Tensor, keep: Tensor | None, *options: Any
    ) -> tuple[Tensor, Tensor, Tensor, LogSumExp]:
        """This rank's log-probs [R, K], entropies, saved numbers and log-sum-exps."""
        temperature, want_entropy, inverse = options
        dtype = arithmetic_dtype(logits)
        if logits.shape[-1] == 0:
            zeros = logits.new_zeros(ids.shape[0], dtype=torch.float64)
            own, saved = zeros.new_zeros(ids.shape), zeros.expand(SAVED_OF_TOKENS, -1)
            return own, zeros.to(dtype), saved, _no_words(zeros, keep)
        logprobs, entropy, saved = self._ops.token_logprobs_fwd(logits, ids, keep, *options)
        units = self._units_of[dtype]
        lse = of_tokens(saved, rounded_scale(temperature, inverse, dtype, units), units)
        # The op gives NaN if all logits of a row are -inf. Here other shards may have finite ones.
        none = lse.near == -torch.inf
        logprobs = torch.where(none[:, None] & (ids != NO_ID), -torch.inf, logprobs.view(ids.shape))
        if want_entropy:
            entropy = torch.where(none, 0.0, entropy)
        # With a log-sum-exp of 0, each of these entries has probability 0 and gradient 0.
        return logprobs, entropy, torch.where(saved == -torch.inf, 0.0, saved), lse

    def backward(self, logits: Tensor, *arguments: Any) -> Tensor:
        if logits.shape[-1] == 0:
            return torch.empty_like(logits)
        return self._ops.token_logprobs_bwd(logits, *self._weights(logits, *arguments))

    def backward_in_place(self, logits: Tensor, *arguments: Any) -> None:
        if logits.shape[-1] > 0:
            self._ops.token_logprobs_bwd_(logits, *self._weights(logits, *arguments))

    def _weights(
        self, logits: Tensor, token_ids: Tensor, keep: Tensor | None, table: Tensor, *rest: Any
    ) -> tuple[Any, ...]:
        """The inputs of the op's backward for this rank's shard, after the logits."""
        *_, temperature, grad_logprobs, grad_entropy, inverse = rest
        dtype, size = arithmetic_dtype(logits), self._shards.ranks.size
        ids = of_k(self._shards.own_ids(token_ids, NO_ID))
        sizes = SAVED_OF_TOKENS, SAVED_OF_TOKENS, ids.shape[1], ids.shape[1], size
        (saved, saved_of_shards, own, of_shards, masses), others = _unpacked(table, sizes)
        own_entropy, entropy_of_shards, share, surplus = others or (table.new_empty(0),) * 4
        # A shard's log-sum-exp is a logit in the row of shards, so it has this logit's gradient.
        of_masses = self._ops.token_logprobs_bwd(
            *(masses.T.contiguous()[None], self._shards.owners(token_ids), keep, saved_of_shards),
            *(of_shards.T.reshape(-1), entropy_of_shards, 1.0),
            *(_in(torch.float64, grad_logprobs), _in(torch.float64, grad_entropy), None),
        )
        grad_lse, of_entropy = of_masses[0, :, self._shards.ranks.rank], None
        if grad_entropy is not None:
            # sum_r P_r H_r changes with the log-sum-exp of shard r by P_r (H_r - the mean).
            of_entropy = _times(grad_entropy, share)
            grad_lse = grad_lse + _times(of_entropy, surplus)
        # The op takes no gradient for an id of another shard.
        of_ids, of_lse = (_in(torch.float64, grad) for grad in (grad_logprobs, grad_lse))
        return (
            *(ids, keep, saved, own.T.reshape(-1), own_entropy.to(dtype), temperature),
            *(of_ids, _in(dtype, of_entropy), inverse, of_lse),
        )


class _ShardRows(NamedTuple):
    """The op's outputs on this rank's shard under two models, [R] each, and both log-sum-exps."""

    kl: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    saved: Tensor
    entropy: Tensor
    far: Tensor
    near: Tensor
    ref_far: Tensor
    ref_near: Tensor


class _Pair(NamedTuple):
    """Two models' logits over this rank's shard, and the requested outputs."""

    first: Tensor
    second: Tensor
    ids: Tensor | None  # [R], positions in this rank's shard
    options: Sequence[Any]  # divergence, parameter, temperature, entropy_of
    inverse: Tensor | None

    def dtype(self) -> torch.dtype:
        return arithmetic_dtype(self.first, self.second)


class _PairOps(_ShardOps):
    """The ops over two models."""

    def forward(
        self,
        first: Tensor,
        second: Tensor,
        token_ids: Tensor | None,
        keep: Tensor | None,
        *rest: Any,
    ) -> tuple[Tensor | None, ...]:
        *options, row_weights, want_grad, want_grad_ref, inverse = rest
        entropy_of = options[-1]
        # The op over two models takes no NO_ID. The log-probs of other shards' ids are dropped.
        own_ids = None if token_ids is None else self._shards.own_ids(token_ids, 0)
        own = self._of_shard(_Pair(first, second, own_ids, options, inverse), keep)
        # The indices into the gathered table below follow this order.
        columns = [own.far, own.near, own.ref_far, own.ref_near, own.kl]
        owners = None
        if token_ids is not None:
            has, owners = self._shards.has(token_ids), self._shards.owners(token_ids)
            columns += [torch.where(has, x, 0.0) for x in (own.logprobs, own.ref_logprobs)]
        if entropy_of != _NO_ENTROPY:
            columns.append(own.entropy)
        table = self._gathered(columns)
        masses = _masses(table[0], table[1]), _masses(table[2], table[3])
        of_shards, logprobs, ref_logprobs, saved, _, _, entropies = self._ops.kl_divergence_fwd(
            *(*masses, owners, keep, *_OF_MASSES, entropy_of, None, False, False, None)
        )
        # An infinite divergence shows even if its shard has very little weight.
        share, surplus, mean = self._weighed(masses[0], table[4], shows_infinity=True)
        parts = [own.saved, saved, own.kl, of_shards, share, surplus, *(x[0].T for x in masses)]
        if token_ids is not None:
            logprobs, ref_logprobs = logprobs + table[5].sum(-1), ref_logprobs + table[6].sum(-1)
        kl = of_shards + _where_kept(mean, keep)
        if entropy_of != _NO_ENTROPY:
            share, surplus, mean = self._weighed(masses[_is_of_second(entropy_of)], table[-1])
            parts += [own.entropy, entropies, share, surplus]
            entropies = entropies + _where_kept(mean, keep)
        kl, logprobs, ref_logprobs, entropies = (
            x.to(own.kl.dtype) for x in (kl, logprobs, ref_logprobs, entropies)
        )
        saved = _packed(parts)
        grads: Sequence[Tensor | None] = (None, None)
        if want_grad or want_grad_ref:
            # Every rank knows all sums by now, so the gradient takes no second collective.
            known = (kl, saved, entropies, row_weights, None, None, None)
            wants = (want_grad, want_grad_ref, inverse)
            grads = self.backward(first, second, None, keep, *options, *known, *wants)
        return kl, logprobs, ref_logprobs, saved, *grads, entropies

    def forward_in_place(
        self, first: Tensor, second: Tensor, keep: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        *options, row_weights, want_grad, want_grad_ref, inverse = rest
        nothing = (_NO_ENTROPY, None, False, False, inverse)
        found: Any = self.forward(first, second, None, keep, *options, *nothing)
        known = (found[0], found[3], row_weights, want_grad, want_grad_ref, inverse)
        self.backward_in_place(first, second, keep, *options, *known)
        return found[0], found[3]

    def _of_shard(self, of: _Pair, keep: Tensor | None) -> _ShardRows:
        """The rows of this rank's shard."""
        if of.first.shape[-1] == 0:
            zeros = of.first.new_zeros(of.first.shape[0] * of.first.shape[1], dtype=torch.float64)
            own, lse = zeros.to(of.dtype()), _no_words(zeros, keep)
            return _ShardRows(own, own, own, zeros.expand(SAVED_OF_PAIRS, -1), own, *lse, *lse)
        found = self._rows(of, keep)
        missing = (found.near + found.ref_near).isnan()
        if of.first.device.type == "cpu" and not missing.any():  # on a GPU this would wait
            return found
        return self._with_missing(of, found, missing)

    def _rows(self, of: _Pair, keep: Tensor | None) -> _ShardRows:
        kl, logprobs, ref_logprobs, saved, _, _, entropy = self._ops.kl_divergence_fwd(
            of.first, of.second, of.ids, keep, *of.options, None, False, False, of.inverse
        )
        dtype, units = of.dtype(), self._units_of[of.dtype()]
        scale = rounded_scale(of.options[2], of.inverse, dtype, units)
        lse, ref_lse = of_pairs(saved, scale, units)
        return _ShardRows(kl, logprobs, ref_logprobs, saved, entropy, *lse, *ref_lse)

    def _with_missing(self, of: _Pair, found: _ShardRows, missing: Tensor) -> _ShardRows:
        """The same rows, without the NaN that the op gives if a model excludes the whole shard.

        The op runs with the other model as both models, which gives the other model's outputs. Both
        log-sum-exps are then the other model's, so the excluded entries have probability 0 and
        gradient 0. The divergence is between the shards. NaN in the logits stays NaN.
        """
        *of_kl, wanted = of.options

        def alone(model: Tensor, place: str) -> tuple[_ShardRows, Tensor]:
            entropy_of = ENTROPIES.index("first" if ENTROPIES[wanted] == place else "none")
            own = of._replace(first=model, second=model, options=(*of_kl, entropy_of))
            rows = self._rows(own, missing)
            none = rows.near == -torch.inf
            of_ids, entropy = rows.logprobs, rows.entropy
            return rows._replace(
                logprobs=of_ids if of.ids is None else torch.where(none, -torch.inf, of_ids),
                entropy=torch.where(none, 0.0, entropy) if entropy.numel() else entropy,
            ), none

        (one, no_first), (two, no_second) = alone(of.first, "first"), alone(of.second, "second")
        saved = torch.where(one.near.isfinite(), one.saved, two.saved)
        apart = _ShardRows(
            torch.zeros_like(found.kl),
            one.logprobs,
            two.logprobs,
            torch.where(no_first & no_second, 0.0, saved),
            two.entropy if _is_of_second(wanted) else one.entropy,
            *(one.far, one.near, two.far, two.near),
        )
        pairs = zip(apart, found, strict=True)
        return _ShardRows(*(torch.where(missing, x, y) if y.numel() else y for x, y in pairs))

    def backward(
        self,
        first: Tensor,
        second: Tensor,
        token_ids: Tensor | None,
        keep: Tensor | None,
        *rest: Any,
    ) -> tuple[Tensor | None, ...]:
        *options, _, table, _, of_kl, logprobs, ref_logprobs, of_entropy = rest[:-3]
        wants = rest[-3:]
        if first.shape[-1] == 0:
            models = zip((first, second), wants, strict=False)
            return tuple(torch.empty_like(x) if want else None for x, want in models)
        known, of_ids, incoming = self._weights(
            *(first, second, token_ids, keep, table, options[-1]),
            (of_kl, logprobs, ref_logprobs, of_entropy),
        )
        own, saved, entropy = known
        ids = None
        if token_ids is not None:
            ids = self._shards.own_ids(token_ids, 0)
        return self._ops.kl_divergence_bwd(
            *(first, second, ids, keep, *options, own, saved, entropy),
            *(incoming[0], *of_ids, incoming[1], *wants, *incoming[2:]),
        )

    def backward_in_place(
        self, first: Tensor, second: Tensor, keep: Tensor | None, *rest: Any
    ) -> None:
        *options, _, table, of_kl, want_grad, want_grad_ref, inverse = rest
        if first.shape[-1] == 0:
            return
        (own, saved, _), _, (of_kl, _, *lses) = self._weights(
            first, second, None, keep, table, _NO_ENTROPY, (of_kl, None, None, None)
        )
        known = (own, saved, of_kl, want_grad, want_grad_ref, inverse, *lses)
        self._ops.kl_divergence_bwd_(first, second, keep, *options, *known)

    def _weights(
        self,
        first: Tensor,
        second: Tensor,
        token_ids: Tensor | None,
        keep: Tensor | None,
        table: Tensor,
        entropy_of: int,
        sent: Sequence[Tensor | None],
    ) -> tuple[Sequence[Tensor], Sequence[Tensor | None], Sequence[Tensor | None]]:
        """The inputs of the op's backward for this rank's shard. They are its rows, saved numbers
        and entropies, and the gradients of log-probs, divergences, entropies and log-sum-exps.
        """
        dtype, size = arithmetic_dtype(first, second), self._shards.ranks.size
        sizes = SAVED_OF_PAIRS, SAVED_OF_PAIRS, 1, 1, 1, 1, size, size
        (saved, saved_of_shards, *rows, masses, ref_masses), others = _unpacked(table, sizes)
        own, of_shards, share, surplus = (x[0] for x in rows)
        own_entropy, entropies, entropy_share, entropy_surplus = others or (own[:0],) * 4
        of_kl, *of_ids, of_entropy = sent
        owners = None
        if token_ids is not None:
            has, owners = self._shards.has(token_ids), self._shards.owners(token_ids)
            # Every rank gets a log-prob's gradient, but only the owner of its id has the logit.
            of_ids = [None if grad is None else torch.where(has, grad, 0.0) for grad in of_ids]
        grads = self._ops.kl_divergence_bwd(
            *(x.T.contiguous()[None] for x in (masses, ref_masses)),
            *(owners, keep, *_OF_MASSES, entropy_of, of_shards, saved_of_shards, entropies),
            *(*(_in(torch.float64, grad) for grad in sent), True, True, None),
        )
        lses = [grad[0, :, self._shards.ranks.rank] for grad in grads if grad is not None]
        if of_kl is not None:
            of_kl = _times(of_kl, share)
            lses[0] = lses[0] + _times(of_kl, surplus)
        if of_entropy is not None:
            of_entropy, of = _times(of_entropy, entropy_share), _is_of_second(entropy_of)
            lses[of] = lses[of] + _times(of_entropy, entropy_surplus)
        incoming = [_in(dtype, grad) for grad in (of_kl, of_entropy, *lses)]
        return (own.to(dtype), saved, own_entropy.to(dtype)), of_ids, incoming


def _is_of_second(entropy_of: int) -> bool:
    return ENTROPIES[entropy_of] == "second"


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """[numbers, R] from parts [R] or [numbers, R], in fp64, which holds every part exactly."""
    return torch.cat([(part if part.dim() == 2 else part[None]).double() for part in parts])


def _unpacked(table: Tensor, sizes: Sequence[int]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The parts of these sizes, and the rows [R] after them."""
    *parts, others = torch.split(table, [*sizes, len(table) - sum(sizes)])
    return parts, others.unbind()


def _masses(far: Tensor, near: Tensor) -> Tensor:
    """[1, R, S]: log-sum-exps [R, S] less the greatest in each row, as logits of the shards."""
    # Far parts are subtracted from far parts, so that a large origin takes no digits from near.
    place = (far + near).argmax(-1, keepdim=True)
    return ((far - far.gather(-1, place)) + (near - near.gather(-1, place)))[None].contiguous()


def _no_words(zeros: Tensor, keep: Tensor | None) -> LogSumExp:
    """The log-sum-exps [R] of an empty shard, 0 where masked."""
    return LogSumExp(zeros, _where_kept(zeros - torch.inf, keep))


def _where_kept(values: Tensor, keep: Tensor | None) -> Tensor:
    return values if keep is None else torch.where(keep, values, 0.0)


def _in(dtype: torch.dtype, grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.to(dtype).contiguous()


def _times(grad: Tensor, value: Tensor) -> Tensor:
    """The product; 0 where the incoming gradient is 0, because the value may be NaN or infinite.
    The ops give a row no gradient if all its incoming gradients are 0.
    """
    return torch.where(grad == 0, 0.0, grad * value)
