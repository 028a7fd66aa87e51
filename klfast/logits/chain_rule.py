"""A vocabulary in shards: the rows of all words, from the rows of each rank's words.

By the chain rule. With P_r and Q_r the masses of shard r under the models, and p|r, q|r the
distributions within it:

- log p(w) = log p|r(w) + log P_r, of a word w of shard r;
- H(p) = sum_r P_r H(p|r) + H(P);
- KL(p || q) = sum_r P_r KL(p|r || q|r) + KL(P || Q).

P is the softmax of the shards' log-sum-exps: a vocabulary of S words, of which the same ops compute
log-probs, entropies, divergences and their gradients, in fp64. So the ranks tell each other a few
numbers a row, from which all compute the same by the same arithmetic, and a backward needs nothing
of the other ranks: a rank's rows get weights, and gradients of their log-sum-exps.

Shapes: R rows, K token ids a row, S shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from klfast.logits.call import DIVERGENCES, ENTROPIES
from klfast.logits.normalizers import LogSumExp
from klfast.logits.shards import Shards
from klfast.ops.table import Ops

_KL = DIVERGENCES.index("kl")


class TokenPieces(NamedTuple):
    """What the kernels say of the rows of a shard, under one model."""

    lse: LogSumExp
    logprobs: Sequence[Tensor]
    """K tensors [R]: of ids within the shard; 0 elsewhere."""
    entropy: Tensor | None
    """[R]; None where it is not wanted."""


class TokenRows(NamedTuple):
    """The rows of the whole vocabulary, in fp64, and what their backward needs: small tensors."""

    logprobs: Tensor
    """[R] or [R, K], as the ids are."""
    entropy: Tensor | None
    masses: Tensor
    """[1, R, S]: the shards' log-sum-exps, as logits of the shards."""
    saved: Tensor
    """What the op over shards saved, as the next two."""
    of_shards: Tensor
    entropy_of_shards: Tensor
    share: Tensor | None
    """[R]: the mass of this rank's shard."""
    surplus: Tensor | None
    """[R]: the entropy of this rank's shard less the mean over shards."""


def combine_tokens(
    pieces: TokenPieces, token_ids: Tensor, keep: Tensor | None, shards: Shards, ops: Ops
) -> TokenRows:
    """Log-probs, and entropies where pieces have some.

    Args:
        pieces: of this rank's shard.
        token_ids: [R] or [R, K], of the whole vocabulary.
        keep: [R], which rows exist.
        shards: all of them.
        ops: of which those over rows of S words serve the shards.
    """
    has_entropy = pieces.entropy is not None
    columns = [*pieces.lse, *pieces.logprobs]
    if pieces.entropy is not None:
        columns.append(pieces.entropy)
    table = shards.gather(columns)
    masses = _masses(table[0], table[1])
    of_shards, entropy_of_shards, saved = ops.token_logprobs_fwd(
        masses, shards.owners(token_ids), keep, 1.0, has_entropy, None
    )
    own = table[2 : 2 + len(pieces.logprobs)].sum(-1).T.reshape(token_ids.shape)
    logprobs = own + of_shards.view(token_ids.shape)
    if not has_entropy:
        return TokenRows(logprobs, None, masses, saved, of_shards, entropy_of_shards, None, None)
    entropies, shares = table[-1], masses[0].softmax(-1)
    mean = _mean(shares, entropies)
    rank = shards.ranks.rank
    return TokenRows(
        logprobs,
        entropy_of_shards + _where_kept(mean, keep),
        masses,
        saved,
        of_shards,
        entropy_of_shards,
        shares[:, rank],
        entropies[:, rank] - mean,
    )


class TokenWeights(NamedTuple):
    """The incoming gradients of a shard's own rows, [R], fp64; log-probs keep theirs."""

    entropy: Tensor | None
    lse: Tensor


def weigh_tokens(
    rows: TokenRows,
    token_ids: Tensor,
    keep: Tensor | None,
    shards: Shards,
    ops: Ops,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> TokenWeights:
    """What the backward of this rank's rows needs, of the incoming gradients of all words' rows."""
    of_masses = ops.token_logprobs_bwd(
        rows.masses,
        shards.owners(token_ids),
        keep,
        rows.saved,
        rows.of_shards,
        rows.entropy_of_shards,
        1.0,
        _double(grad_logprobs),
        _double(grad_entropy),
        None,
    )
    lse = of_masses[0, :, shards.ranks.rank]
    if grad_entropy is None or rows.share is None or rows.surplus is None:
        return TokenWeights(None, lse)
    entropy = grad_entropy * rows.share
    return TokenWeights(entropy, lse + _times(entropy, rows.surplus))


class PairPieces(NamedTuple):
    """What the kernels say of the rows of a shard, under two models; KL(first || second)."""

    first: LogSumExp
    second: LogSumExp
    kl: Tensor
    """[R]."""
    entropy: Tensor | None
    """[R], of the model that is asked for; None where none is."""
    logprobs: tuple[Tensor, Tensor] | None
    """[R], of ids within the shard, under either model; 0 elsewhere. None without ids."""


class PairRows(NamedTuple):
    """The rows of the whole vocabulary, in fp64, and what their backward needs: small tensors."""

    kl: Tensor
    """[R], like the next three; None for what there is not."""
    entropy: Tensor | None
    logprobs: Tensor | None
    ref_logprobs: Tensor | None
    masses: Tensor
    """[1, R, S]: the shards' log-sum-exps, as logits of the shards, under either model."""
    ref_masses: Tensor
    saved: Tensor
    """What the op over shards saved, as the next two."""
    of_shards: Tensor
    entropy_of_shards: Tensor
    share: Tensor
    """[R]: the first model's mass of this rank's shard."""
    surplus: Tensor
    """[R]: the divergence of this rank's shard less the mean over shards."""
    entropy_share: Tensor | None
    """[R]: the same two of the entropies, and of their model."""
    entropy_surplus: Tensor | None


def combine_pairs(
    pieces: PairPieces,
    token_ids: Tensor | None,
    keep: Tensor | None,
    entropy_of: int,
    shards: Shards,
    ops: Ops,
) -> PairRows:
    """KL(first || second), and what else the pieces have.

    Args:
        pieces: of this rank's shard.
        token_ids: [R], of the whole vocabulary.
        keep: [R], which rows exist.
        entropy_of: the model of the entropies, a position in ``ENTROPIES``.
        shards: all of them.
        ops: of which those over rows of S words serve the shards.
    """
    columns = [*pieces.first, *pieces.second, pieces.kl, *(pieces.logprobs or ())]
    if pieces.entropy is not None:
        columns.append(pieces.entropy)
    table = shards.gather(columns)
    rank = shards.ranks.rank
    masses, ref_masses = _masses(table[0], table[1]), _masses(table[2], table[3])
    owners = None if token_ids is None else shards.owners(token_ids)
    options = (_KL, 0.5, 1.0, entropy_of)
    of_shards, logprobs, ref_logprobs, saved, _, _, entropy_of_shards = ops.kl_divergence_fwd(
        masses, ref_masses, owners, keep, *options, None, False, False, None
    )
    shares = masses[0].softmax(-1)
    # An infinite divergence shows however little its shard weighs.
    mean = _mean(torch.where(table[4] == torch.inf, 1.0, shares), table[4])
    rows = PairRows(
        of_shards + _where_kept(mean, keep),
        None,
        None if token_ids is None else logprobs + table[5].sum(-1),
        None if token_ids is None else ref_logprobs + table[6].sum(-1),
        masses,
        ref_masses,
        saved,
        of_shards,
        entropy_of_shards,
        shares[:, rank],
        table[4, :, rank] - mean,
        None,
        None,
    )
    if pieces.entropy is None:
        return rows
    if ENTROPIES[entropy_of] == "second":
        shares = ref_masses[0].softmax(-1)
    mean = _mean(shares, table[-1])
    return rows._replace(
        entropy=entropy_of_shards + _where_kept(mean, keep),
        entropy_share=shares[:, rank],
        entropy_surplus=table[-1, :, rank] - mean,
    )


class PairWeights(NamedTuple):
    """The incoming gradients of a shard's own rows, [R], fp64; log-probs keep theirs."""

    kl: Tensor | None
    entropy: Tensor | None
    lse: Tensor
    ref_lse: Tensor


def weigh_pairs(
    rows: PairRows,
    token_ids: Tensor | None,
    keep: Tensor | None,
    entropy_of: int,
    shards: Shards,
    ops: Ops,
    grad_kl: Tensor | None,
    grad_logprobs: Tensor | None,
    grad_ref_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> PairWeights:
    """What the backward of this rank's rows needs, of the incoming gradients of all words' rows."""
    grads = ops.kl_divergence_bwd(
        rows.masses,
        rows.ref_masses,
        None if token_ids is None else shards.owners(token_ids),
        keep,
        *(_KL, 0.5, 1.0, entropy_of),
        rows.of_shards,
        rows.saved,
        rows.entropy_of_shards,
        *map(_double, (grad_kl, grad_logprobs, grad_ref_logprobs, grad_entropy)),
        True,
        True,
        None,
    )
    lse, ref_lse = (grad[0, :, shards.ranks.rank] for grad in grads)
    kl = entropy = None
    if grad_kl is not None:
        kl = grad_kl * rows.share
        lse = lse + _times(kl, rows.surplus)
    if grad_entropy is not None and rows.entropy_share is not None:
        assert rows.entropy_surplus is not None
        entropy = grad_entropy * rows.entropy_share
        of_entropy = _times(entropy, rows.entropy_surplus)
        if ENTROPIES[entropy_of] == "first":
            lse = lse + of_entropy
        else:
            ref_lse = ref_lse + of_entropy
    return PairWeights(kl, entropy, lse, ref_lse)


def _masses(far: Tensor, near: Tensor) -> Tensor:
    """[1, R, S]: log-sum-exps [R, S], less the greatest of each row."""
    place = (far + near).argmax(-1, keepdim=True)
    return ((far - far.gather(-1, place)) + (near - near.gather(-1, place)))[None].contiguous()


def _mean(weights: Tensor, values: Tensor) -> Tensor:
    """[R]: the sum over shards of weights times values."""
    return (weights * values).sum(-1)


def _where_kept(values: Tensor, keep: Tensor | None) -> Tensor:
    return values if keep is None else torch.where(keep, values, 0.0)


def _double(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.to(torch.float64).contiguous()


def _times(grad: Tensor, value: Tensor) -> Tensor:
    """The product; 0 where no gradient comes in, whatever the value is."""
    return torch.where(grad == 0, 0.0, grad * value)
