"""The controls: klfast's formulas in eager float64, stated anew. Nothing here is klfast's.

x = logprobs - ref_logprobs, in nats. Slopes are written out, so that infinite x have theirs.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

INF = math.inf
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
REDUCTIONS = (
    "none",
    "seq-sum",
    "seq-mean",
    "token-sum",
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
)
DIRECTIONS = ("reverse", "forward", "jsd")


def _lack(x):
    """expm1(x) - x without cancellation."""
    series = sum(x**n / math.factorial(n) for n in range(2, 12))
    return torch.where(x.abs() < 0.1, series, torch.where(x.isinf(), INF, torch.expm1(x) - x))


def _weighted(x, factor):
    """exp(x) * factor, which is 0 at x = -inf."""
    return torch.where(x == -INF, 0.0, torch.exp(x) * factor)


FORMULAS = {
    "k1": (lambda x: x, lambda x: torch.where(x.isnan(), x, 1.0)),
    "abs": (lambda x: x.abs(), lambda x: x.sign()),
    "k2": (lambda x: x * x / 2, lambda x: x),
    "k3": (lambda x: _lack(-x), lambda x: -torch.expm1(-x)),
    "k3_ref": (_lack, lambda x: torch.expm1(x)),
    "r_log_r": (lambda x: _weighted(x, x), lambda x: _weighted(x, 1 + x)),
}
"""f(x) and its slope."""


def single(*tensors):
    """Whether arithmetic and results are fp32."""
    return all(t is None or t.dtype != torch.float64 for t in tensors)


class Penalty(NamedTuple):
    """Value, how large its terms are together, and the gradients for a grad_out of ones."""

    value: Tensor
    size: Tensor
    grad: Tensor
    grad_ref: Tensor
    steepness: Tensor


def penalty(
    a, b, mask=None, name="k3", reduction="none", *, cu=None, old=None, coef=1.0, normalizer=None
):
    f, slope = FORMULAS[name]
    x = a.double() - b.double()
    weight = torch.ones_like(x) if mask is None else mask.double()
    keep = weight != 0
    w = torch.ones_like(x) if old is None else torch.exp(a.double() - old.double())
    value = torch.where(keep, weight * w * f(x), 0.0)
    through_x = torch.where(keep, weight * w * slope(x), 0.0)
    through_w = value if old is not None else torch.zeros_like(value)
    rows, share = shares(weight, reduction, cu, normalizer)
    share = share * coef
    total = _sums(share * value, rows, reduction)
    size = _sums((share * value).abs(), rows, reduction)
    steepness = share.abs() * (through_x.abs() + through_w.abs())
    # A derivative with a root away from 0 is as exact as x is.
    steepness = steepness + share.abs() * torch.where(keep, weight * w * (1 + x.abs()), 0.0)
    return Penalty(total, size, share * (through_x + through_w), share * -through_x, steepness)


def segments(shape, cu):
    """The tokens of every sequence, as ranges among all tokens."""
    if cu is not None:
        return [range(i, j) for i, j in itertools.pairwise(cu.tolist())]
    rows, width = shape if len(shape) == 2 else (1, shape[0])
    return [range(row * width, (row + 1) * width) for row in range(rows)]


def shares(weight, reduction, cu=None, normalizer=None):
    """(sequences, the share of each token in the result)."""
    rows, flat = segments(weight.shape, cu), weight.flatten()
    length = [flat[row.start : row.stop].sum().item() for row in rows]
    tokens = sum(length) if normalizer is None else normalizer
    sequences = sum(n > 0 for n in length) if normalizer is None else normalizer
    outer = {"token-mean": tokens, "seq-mean-token-sum": sequences}
    outer["seq-mean-token-mean"] = sequences
    share = torch.full_like(flat, 1 / (outer.get(reduction, 1) or 1))
    if reduction in ("seq-mean", "seq-mean-token-mean"):
        for row, n in zip(rows, length, strict=True):
            share[row.start : row.stop] /= n or 1
    return rows, share.view(weight.shape)


def _sums(tokens, rows, reduction):
    if reduction == "none":
        return tokens
    if reduction in ("seq-sum", "seq-mean"):
        flat = tokens.flatten()
        none = torch.zeros(0, dtype=torch.float64)
        return torch.stack([flat[row.start : row.stop].sum() for row in rows]) if rows else none
    return tokens.sum()


def log_softmax(z, temperature=1.0):
    """In float64, a row's maximum never added back."""
    z = z.double()
    z = (z - z.amax(-1, keepdim=True)) / temperature
    return z - z.exp().sum(-1, keepdim=True).log()


class Divergence(NamedTuple):
    """A row's divergence and gradients, with what each of their terms comes to."""

    value: Tensor
    size: Tensor
    grad: Tensor
    grad_ref: Tensor
    steepness: Tensor
    steepness_ref: Tensor


def _expected(p, log_p, log_q):
    """KL(p || q), its terms' size, p times (log p / q - KL), and the size of that.

    A word with a finite logit is possible, however small p is in float64.
    """
    possible = log_p > -INF
    d = torch.where(possible, log_p - log_q, 0.0)
    terms = torch.where(d == INF, INF, p * d)
    kl, size = terms.sum(-1, keepdim=True), terms.abs().sum(-1, keepdim=True)
    slope = torch.where(possible, p * (d - kl), 0.0)
    # A log-ratio rounds as the largest of those that make the log-sum-exps: by 6e-8 of it in fp32,
    # where a term is allowed 2e-6.
    spread = torch.where(p > 1e-6, d.abs(), 0.0).amax(-1, keepdim=True)
    return kl, size[..., 0], slope, p * (d.abs() + size + 0.03 * spread) * rounding(log_p)


def rounding(log_p):
    """How much more than near 0 an exponential rounds at log p: docs/measured.md's promise of f."""
    return torch.where(log_p > -INF, 1 + log_p.abs() / 2, 1.0)


def divergence(z, r, direction="reverse", beta=0.5, temperature=1.0):
    """The exact divergence of each row and its gradients, none through excluded words."""
    if direction == "forward":
        found = divergence(r, z, "reverse", beta, temperature)
        return Divergence(*found[:2], *found[3:1:-1], *found[5:3:-1])
    log_p, log_q = log_softmax(z, temperature), log_softmax(r, temperature)
    p, q = log_p.exp(), log_q.exp()
    if direction == "reverse":
        kl, size, slope, steep = _expected(p, log_p, log_q)
        sizes = (slope / temperature, (q - p) / temperature, steep / temperature)
        difference = p * rounding(log_p) + q * rounding(log_q)
        return Divergence(kl[..., 0], size, *sizes, difference / temperature)
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    first, second = _expected(p, log_p, log_m), _expected(q, log_q, log_m)
    return Divergence(
        ((1 - beta) * first[0] + beta * second[0])[..., 0],
        (1 - beta) * first[1] + beta * second[1],
        (1 - beta) / temperature * first[2],
        beta / temperature * second[2],
        (1 - beta) / temperature * first[3],
        beta / temperature * second[3],
    )


def tokens(z, ids, temperature=1.0):
    """(log-probs, entropies, gradient of the first, of the second)."""
    log_p = log_softmax(z, temperature)
    p = log_p.exp()
    taken = torch.nn.functional.one_hot(ids.long(), z.shape[-1]).double()
    logprob = torch.where(taken > 0, log_p, 0.0).sum(-1)
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    surprise = torch.where(p > 0, p * (log_p + entropy[..., None]), 0.0)
    return logprob, entropy, (taken - p) / temperature, -surprise / temperature
