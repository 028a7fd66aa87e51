"""The truth about calls over logits: what masks, layouts and reductions make of the rows'.

The rows' own is in ``oracle_divergences``, the tokens' shares in a result in ``oracle``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import oracle
import torch
from oracle_divergences import Pair, Words, divergence, finite, tokens
from torch import Tensor

from klfast import Estimator


class TokenTruth(NamedTuple):
    """A call of ``token_logprobs`` in float64, each with how far a backend may be from it."""

    logprobs: Tensor
    logprobs_tolerance: Tensor
    entropy: Tensor
    entropy_tolerance: Tensor
    grad: Tensor
    grad_tolerance: Tensor


@torch.no_grad()
def token_logprobs(logits, token_ids, keep=None, *, temperature=1.0, upstream=(None, None)):
    """What klfast.token_logprobs must return, and the gradient for ``upstream``: of the log-probs
    and of the entropies, or None. ``keep``: which ids exist, [...] or [..., K] like these.
    """
    dtype, rows = oracle.arithmetic_dtype(logits), logits.shape[:-1]
    kept = torch.ones(token_ids.shape, dtype=torch.bool) if keep is None else keep
    temperature = of_rows(temperature, rows)
    words = Words(logits, temperature, dtype)
    grad = Gradient.zero(words.p)
    has_k = token_ids.dim() == logits.dim()
    columns = [t.unbind(-1) if has_k else [t] for t in (token_ids, kept)]
    sent = [None] * len(columns[0])
    if upstream[0] is not None:
        sent = upstream[0].unbind(-1) if has_k else [upstream[0]]
    found = []
    for ids, exist, of in zip(*columns, sent, strict=True):
        truth = of_tokens(words, ids, exist, temperature)
        found.append([torch.where(exist.flatten(), t, 0.0).reshape(rows) for t in truth[:2]])
        of_existing = of if of is None else torch.where(exist, of, 0.0)
        grad.add(of_existing, truth.grad, truth.grad_tolerance)
    grad.add(upstream[1], truth.entropy_grad, truth.entropy_grad_tolerance)
    of_ids = (torch.stack(t, -1) if has_k else t[0] for t in zip(*found, strict=True))
    kept = kept.any(-1) if has_k else kept
    of_each_row = (torch.where(kept.flatten(), t, 0.0).reshape(rows) for t in truth[4:6])
    return TokenTruth(*of_ids, *of_each_row, *grad.where(kept, logits.shape, dtype))


def of_rows(temperature, rows):
    """A number as it is, a tensor as one number a row, [R, 1]."""
    if not isinstance(temperature, Tensor):
        return temperature
    wide = temperature.double().reshape(*temperature.shape, *[1] * (len(rows) - temperature.dim()))
    return wide.expand(rows).reshape(-1, 1)


def of_tokens(words, token_ids, kept, temperature):
    ids = torch.where(kept, token_ids.long(), 0).flatten()
    return tokens(words, ids, temperature)


class Gradient(NamedTuple):
    """A gradient and its tolerance, [R, V], that grow with each result it is of."""

    exact: Tensor
    tolerance: Tensor

    @classmethod
    def zero(cls, like):
        return cls(torch.zeros_like(like), torch.zeros_like(like))

    def add(self, grad_out, exact, tolerance):
        """The gradient of rows' results for a grad_out of as many; None for nothing. Where that is
        0 an infinite gradient is none.
        """
        if grad_out is not None:
            factor = grad_out.double().flatten()[:, None]
            self.exact.add_(torch.where(factor == 0, 0.0, factor * exact))
            self.tolerance.add_(torch.where(factor == 0, 0.0, factor.abs() * tolerance))

    def where(self, kept, shape, dtype):
        """(exact, tolerance) in a shape, 0 where masked; factors and their products round too."""
        tolerance = self.tolerance + 8 * oracle.unit_roundoff(dtype) * self.exact.abs()
        keep = kept.flatten()[:, None]
        return (torch.where(keep, t, 0.0).reshape(shape) for t in (self.exact, tolerance))


class Truth(NamedTuple):
    """A call of ``kl_divergence`` in float64, each with how far a backend may be from it."""

    result: Tensor
    result_tolerance: Tensor
    kl: Tensor  # of the statistics
    kl_tolerance: Tensor
    length: Tensor
    length_tolerance: Tensor
    grad: Tensor
    grad_tolerance: Tensor
    grad_ref: Tensor
    grad_ref_tolerance: Tensor
    entropy: Tensor  # of the policy
    entropy_tolerance: Tensor


@torch.no_grad()
def kl_divergence(
    logits,
    ref_logits,
    mask=None,
    *,
    direction="reverse",
    jsd_beta=0.5,
    temperature=1.0,
    reduction="none",
    cu_seqlens=None,
    normalizer=None,
    coef=1.0,
    token_ids=None,
    upstream=(None, None, None),
    entropy_upstream=None,
) -> Truth:
    """What klfast.kl_divergence must return, and the gradients for ``upstream``: of the result, by
    default ones, and of the log-probs under either model; and for that of the entropies, if any.
    The log-probs: see ``token_logprobs``.
    """
    dtype, shape = oracle.arithmetic_dtype(logits, ref_logits), logits.shape[:-1]
    temperature = of_rows(temperature, shape)
    kept = torch.ones(shape, dtype=torch.bool) if mask is None else mask != 0
    swap = (lambda pair: pair[::-1]) if direction == "forward" else tuple
    pair = Pair(*swap((logits, ref_logits)), temperature, dtype)
    truth = divergence(pair, "jsd" if direction == "jsd" else "kl", jsd_beta, temperature)
    value, off = (torch.where(kept.flatten(), t, 0.0) for t in truth[:2])

    layout = {"cu_seqlens": cu_seqlens}
    options = {"reduction": reduction, "normalizer": normalizer, "coef": coef, **layout}
    share, *lengths = shares(shape, dtype, mask, **options)
    sums = Sums(shape, reduction, cu_seqlens)
    result, tolerance = sums.of(share * value, share.abs() * off, dtype)
    weight, *_ = shares(shape, dtype, mask, reduction="seq-sum", **layout)
    statistics = Sums(shape, "seq-sum", cu_seqlens).of(weight * value, weight * off, dtype)

    grad_out = torch.ones_like(result) if upstream[0] is None else upstream[0]
    factor = share * sums.spread(grad_out)
    of_first, of_second = Gradient.zero(pair.p), Gradient.zero(pair.p)
    of_first.add(factor, truth.grad_first, truth.grad_first_tolerance)
    of_second.add(factor, truth.grad_second, truth.grad_second_tolerance)
    grads = swap((of_first, of_second))
    if token_ids is not None:
        for words, grad, of in zip(
            swap((pair.first, pair.second)), grads, upstream[1:], strict=True
        ):
            taken = of_tokens(words, token_ids, kept, temperature)
            grad.add(of, taken.grad, taken.grad_tolerance)
    policy, _ = swap((pair.first, pair.second))
    any_word = torch.zeros(shape, dtype=torch.int64)
    own = of_tokens(policy, any_word, kept, temperature)
    grads[0].add(entropy_upstream, own.entropy_grad, own.entropy_grad_tolerance)
    entropies = (
        torch.where(kept.flatten(), t, 0.0).reshape(shape)
        for t in (own.entropy, own.entropy_tolerance)
    )
    of_logits = (part for grad in grads for part in grad.where(kept, logits.shape, dtype))
    return Truth(result, tolerance, *statistics, *lengths, *of_logits, *entropies)


def shares(shape, dtype, mask, **options):
    """By how much a result grows with each token's divergence (the slope of k1), and lengths."""
    zeros = torch.zeros(shape, dtype=dtype)
    truth = oracle.kl_penalty(zeros, zeros, mask, estimator=Estimator("k1"), **options)
    return truth.grad.flatten(), truth.stats["length"], truth.stats_tolerance["length"]


class Sums:
    """Which tokens a reduction adds up."""

    def __init__(self, shape, reduction, cu_seqlens):
        tokens = range(math.prod(shape))
        self.shape, self.pieces = (), [tokens]
        if reduction == "none":
            self.shape, self.pieces = shape, [[t] for t in tokens]
        elif reduction in ("seq-sum", "seq-mean"):
            self.pieces = oracle.sequences_of(shape, cu_seqlens)
            self.shape = (len(self.pieces),)

    def of(self, terms, tolerances, dtype):
        """(sums, tolerances): adding n numbers rounds as in ``oracle``."""
        off = tolerances + 16 * oracle.unit_roundoff(dtype) * finite(terms).abs()
        return [self._add(t.tolist()) for t in (terms, off)]

    def _add(self, terms):
        sums = [math.fsum(terms[t] for t in piece) for piece in self.pieces]
        return torch.tensor(sums, dtype=torch.float64).reshape(self.shape)

    def spread(self, of_sums):
        """Of each sum to each of its tokens, [R]."""
        spread = torch.zeros(sum(len(piece) for piece in self.pieces), dtype=torch.float64)
        for piece, value in zip(self.pieces, of_sums.double().flatten(), strict=True):
            spread[list(piece)] = value
        return spread
