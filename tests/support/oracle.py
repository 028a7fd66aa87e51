"""The truth: klfast's contract in exact arithmetic on the stored inputs, token by token.

Nothing here is shared with klfast. Formulas run in mpmath, derivatives are difference quotients of
the value at 100 digits, limits are minima and maxima, and reductions are loops.

Tolerances come with the truth. The error of a token may be the error that docs/measured.md promises
for each term of its formula. The error of a reduction may be the sum of its tokens' errors and the
rounding of the sum.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import mpmath
import torch
from mpmath import mpf
from torch import Tensor

mpmath.mp.dps = 100
STEP = mpf(10) ** -25  # of a difference quotient; its error is the square of this

CONTRACT = {
    "k1": lambda x: x,
    "abs": lambda x: abs(x),
    "k2": lambda x: x**2 / 2,
    "k3": lambda x: mpmath.exp(-x) - 1 + x,
    "k3_ref": lambda x: mpmath.exp(x) - 1 - x,
    "r_log_r": lambda x: mpmath.exp(x) * x,
}
"""f(x) of the estimators in the table of klfast.Estimator."""


def slope(function, x):
    """The derivative by its definition. At a kink it lies between the two sides."""
    return (function(x + STEP) - function(x - STEP)) / (2 * STEP)


def curvature(function, x):
    return slope(functools.partial(slope, function), x)


def unit_roundoff(dtype):
    return torch.finfo(dtype).eps / 2


def promise(x, dtype):
    """The relative error of a token at log-ratio x in docs/measured.md, scaled from fp32."""
    bound = 4e-7 if abs(x) <= 1 else (2 + abs(x)) * 1.2e-7
    return float(bound) * unit_roundoff(dtype) / unit_roundoff(torch.float32)


def textbook_error(log_ratio):
    """The cancellation error of a textbook formula in float64, and of its derivative."""
    return 4 * unit_roundoff(torch.float64) * max(1, abs(log_ratio))


class Token(NamedTuple):
    """One token's w * f(x), its derivatives, and their rounding errors in the arithmetic."""

    value: mpf
    grad: mpf
    grad_ref: mpf
    clipped: bool
    value_tolerance: mpf
    grad_tolerance: mpf


def log_ratio_bounds(estimator):
    clip = estimator.log_ratio_clip
    if clip is None:
        return -mpmath.inf, mpmath.inf
    return clip if isinstance(clip, tuple) else (-clip, clip)


def with_limits(estimator, x, weight):
    """(w * f under log_ratio_clip, then linear_tail, then kl_clip; True if kl_clip acted).

    kl_clip limits f, or w * f under clip_weighted.
    """
    f = CONTRACT[estimator.name]
    lo, hi = log_ratio_bounds(estimator)
    x = min(max(x, mpf(lo)), mpf(hi))
    near = nearest(estimator, x)
    value = f(x) if near == x else f(near) + slope(f, near) * (x - near)
    limit = mpmath.inf if estimator.kl_clip is None else mpf(estimator.kl_clip)
    before, after = (weight, 1) if estimator.clip_weighted else (1, weight)
    value *= before
    return after * min(max(value, -limit), limit), abs(value) > limit


def nearest(estimator, x):
    """The point of [-linear_tail, linear_tail] next to x."""
    tail = mpmath.inf if estimator.linear_tail is None else mpf(estimator.linear_tail)
    return min(max(x, -tail), tail)


def importance(estimator, dtype, logprob, old_logprob):
    """(w, True if it was capped or dropped as infinite)."""
    if old_logprob is None:
        return mpf(1), False
    weight = mpmath.exp(logprob - old_logprob)
    cap = mpmath.inf if estimator.importance_cap is None else mpf(estimator.importance_cap)
    if estimator.clip_weighted and min(weight, cap) > torch.finfo(dtype).max:
        return mpf(0), True
    return min(weight, cap), weight > cap


@functools.lru_cache(maxsize=200_000)
def token(estimator, dtype, logprob, ref_logprob, old_logprob=None) -> Token:
    """A kept token with mask 1. Only the tolerances depend on the dtype."""
    a, b = mpf(logprob), mpf(ref_logprob)
    old = None if old_logprob is None else mpf(old_logprob)
    x = a - b
    weight, capped = importance(estimator, dtype, a, old)
    value, kl_clipped = with_limits(estimator, x, weight)
    lo, hi = log_ratio_bounds(estimator)
    outside = not lo <= x <= hi
    k2_surrogate = estimator.gradient == "k2"
    is_constant = estimator.importance == "detached" or (
        estimator.clip_weighted and outside and not k2_surrogate
    )

    def objective(a, b):
        """The function whose gradient klfast computes."""
        w = weight if is_constant else importance(estimator, dtype, a, old)[0]
        return w * CONTRACT["k2"](a - b) if k2_surrogate else with_limits(estimator, a - b, w)[0]

    grad = slope(lambda a: objective(a, b), a)
    grad_ref = slope(lambda b: objective(a, b), b)
    if estimator.gradient == "none":
        grad = grad_ref = mpf(0)
    return Token(
        value,
        grad,
        grad_ref,
        capped or kl_clipped or outside,
        *_tolerances(estimator, dtype, x, weight, old is not None),
    )


def _tolerances(estimator, dtype, x, weight, weighs):
    """The promised error of every term of a token's value and gradient. Terms may cancel."""
    f, u = CONTRACT[estimator.name], unit_roundoff(dtype)
    lo, hi = log_ratio_bounds(estimator)
    clipped = min(max(x, mpf(lo)), mpf(hi))
    near = nearest(estimator, clipped)
    relative = promise(near, dtype) + 4 * u  # 4 u for mask, coef and limits in this dtype
    if weighs and weight > 0:
        relative += promise(max(1, abs(mpmath.log(weight))), dtype)
    value = abs(f(near))
    if near != clipped:
        value += abs(slope(f, near)) * (abs(clipped) + abs(near))
    # A derivative has no relative bound near a root other than 0, because x itself is rounded.
    derivative = abs(slope(f, near)) + abs(near * curvature(f, near))
    if estimator.gradient == "k2":
        derivative, through_weight = abs(x), x**2 / 2
    else:
        through_weight = value
    if weighs and estimator.importance == "differentiable":
        derivative += through_weight
    textbook = 0
    if dtype == torch.float64:
        textbook = weight * textbook_error(x)
    kink = 10 * STEP * weight  # where both sides of a difference quotient grow
    return relative * weight * value + textbook, relative * weight * derivative + textbook + kink


class Truth(NamedTuple):
    """The results of a call in float64, each with the allowed error of a backend."""

    result: Tensor
    grad: Tensor
    grad_ref: Tensor
    stats: dict[str, Tensor]
    result_tolerance: Tensor
    grad_tolerance: Tensor
    stats_tolerance: dict[str, Tensor]


def arithmetic_dtype(*inputs):
    doubles = [t is not None and t.dtype == torch.float64 for t in inputs]
    return torch.float64 if any(doubles) else torch.float32


def sequences_of(shape, cu_seqlens):
    """The indices of every sequence's tokens, among all tokens."""
    if cu_seqlens is not None:
        edges = cu_seqlens.tolist()
        return [range(start, end) for start, end in itertools.pairwise(edges)]
    rows, width = shape if len(shape) == 2 else (1, shape[0])
    return [range(row * width, (row + 1) * width) for row in range(rows)]


def kl_penalty(
    logprobs,
    ref_logprobs,
    mask=None,
    *,
    estimator,
    reduction="none",
    cu_seqlens=None,
    old_logprobs=None,
    weights=None,
    normalizer=None,
    coef=1.0,
    grad_out=None,
) -> Truth:
    """The results of klfast.kl_penalty, and the gradients for ``grad_out`` (ones by default).

    ``weights`` is as for klfast.kl_penalty: in no length and no statistic.
    """
    dtype = arithmetic_dtype(logprobs, ref_logprobs, old_logprobs)
    shape, count = logprobs.shape, logprobs.numel()
    columns = [t.double().flatten().tolist() for t in (logprobs, ref_logprobs)]
    if old_logprobs is not None:
        columns.append(old_logprobs.double().flatten().tolist())
    weight = [1.0] * count if mask is None else mask.double().flatten().tolist()
    kept = {t: token(estimator, dtype, *(c[t] for c in columns)) for t in range(count) if weight[t]}

    sequences = sequences_of(shape, cu_seqlens)
    lengths = [math.fsum(weight[t] for t in sequence) for sequence in sequences]
    factors = [1.0] * count if weights is None else _of_tokens(weights, shape, sequences)
    share = [0.0] * count  # of a token's value in the result
    position = [0] * count  # in the flat result
    for s, sequence in enumerate(sequences):
        for t in sequence:
            divisor = _denominator(reduction, lengths, s, normalizer)
            share[t] = float(coef) * weight[t] * factors[t] / divisor if weight[t] else 0.0
            position[t] = {"none": t, "seq-sum": s, "seq-mean": s}.get(reduction, 0)

    sizes = {"none": list(shape), "seq-sum": [len(sequences)], "seq-mean": [len(sequences)]}
    terms = [[] for _ in range(math.prod(sizes.get(reduction, [])))]
    for t, truth in kept.items():
        exact, allowed = share[t] * truth.value, abs(share[t]) * truth.value_tolerance
        terms[position[t]].append((exact, allowed))
    upstream = [1.0] * len(terms) if grad_out is None else grad_out.double().flatten().tolist()
    factor = {t: share[t] * upstream[position[t]] for t in kept}

    def per_token(values):
        return _tensor([values.get(t, 0) for t in range(count)]).reshape(shape)

    result, tolerance = _sums(terms, dtype)
    stats, stats_tolerance = _stats(kept, columns, weight, sequences, lengths, dtype)
    return Truth(
        result.reshape(sizes.get(reduction, [])),
        per_token({t: factor[t] * truth.grad for t, truth in kept.items()}),
        per_token({t: factor[t] * truth.grad_ref for t, truth in kept.items()}),
        stats,
        tolerance.reshape(result.reshape(sizes.get(reduction, [])).shape),
        per_token({t: abs(factor[t]) * truth.grad_tolerance for t, truth in kept.items()}),
        stats_tolerance,
    )


def _of_tokens(weights, shape, sequences):
    """A weight for each token."""
    numbers = weights.double().flatten().tolist()
    if weights.shape == shape:
        return numbers
    return [numbers[s] for s, sequence in enumerate(sequences) for _ in sequence]


def _denominator(reduction, lengths, s, normalizer):
    normalizer = None if normalizer is None else float(normalizer)
    own = lengths[s] or 1
    sequences = sum(length > 0 for length in lengths) or 1
    tokens = math.fsum(lengths) or 1
    return {
        "none": 1,
        "seq-sum": 1,
        "seq-mean": own,
        "token-sum": 1,
        "token-mean": normalizer or tokens,
        "seq-mean-token-sum": normalizer or sequences,
        "seq-mean-token-mean": own * (normalizer or sequences),
    }[reduction]


def _stats(kept, columns, weight, sequences, lengths, dtype):
    """KLStats, field by field, with tolerances."""
    log_ratio = {t: mpf(columns[0][t]) - mpf(columns[1][t]) for t in kept}
    terms = {
        "kl": lambda t: (weight[t] * kept[t].value, weight[t] * kept[t].value_tolerance),
        "length": lambda t: (mpf(weight[t]), unit_roundoff(dtype) * weight[t]),
    }
    for name in ("k1", "k2", "k3"):
        terms[name] = functools.partial(_weighted_formula, name, log_ratio, weight, dtype)
    stats, tolerance = {}, {}
    for name, term in terms.items():
        per_sequence = [[term(t) for t in sequence if t in kept] for sequence in sequences]
        stats[name], tolerance[name] = _sums(per_sequence, dtype)
    ratios = [[abs(log_ratio[t]) for t in sequence if t in kept] for sequence in sequences]
    stats["max_abs_log_ratio"] = _tensor([max(r, default=0) for r in ratios])
    tolerance["max_abs_log_ratio"] = unit_roundoff(dtype) * stats["max_abs_log_ratio"]
    greatest = torch.finfo(dtype).max
    counts = {
        "clipped": lambda token: token.clipped,
        "nonfinite": lambda token: abs(token.value) > greatest,  # no input here is infinite
    }
    for count, of in counts.items():
        per_sequence = [sum(of(kept[t]) for t in sequence if t in kept) for sequence in sequences]
        stats[count] = _tensor(per_sequence)
        tolerance[count] = torch.zeros(len(sequences), dtype=torch.float64)
    return stats, tolerance


def _weighted_formula(name, log_ratio, weight, dtype, t):
    value = weight[t] * CONTRACT[name](log_ratio[t])
    tolerance = (promise(log_ratio[t], dtype) + 2 * unit_roundoff(dtype)) * abs(value)
    if dtype == torch.float64:
        tolerance += weight[t] * textbook_error(log_ratio[t])
    return value, tolerance


def _sums(terms, dtype):
    """Sums of lists of (term, tolerance), each list's own.

    Adding n numbers one by one rounds n - 1 times, and klfast never adds more than 16 in the
    arithmetic's dtype before it goes on in double.
    """
    u = unit_roundoff(dtype)
    sums = [sum(exact for exact, _ in row) for row in terms]
    tolerances = [
        sum(allowed + min(len(row), 16) * u * abs(exact) for exact, allowed in row) for row in terms
    ]
    return _tensor(sums), _tensor(tolerances)


def _tensor(numbers):
    return torch.tensor([float(number) for number in numbers], dtype=torch.float64)


def assert_within(actual, expected, tolerance, what):
    """|actual - expected| <= tolerance plus two roundings to actual's dtype.

    The number that is rounded may be greater than ``expected``, by the tolerance. A bf16 gradient
    of a scalar is rounded twice: when the forward writes it and when the backward scales it. If
    the truth is beyond the dtype's range, infinity of its sign is right. Numbers
    below the range of fp32 arithmetic may vanish.
    """
    info = torch.finfo(actual.dtype)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    got = actual.detach().double()
    underflow = info.smallest_normal * info.eps + 1e3 * torch.finfo(torch.float32).tiny
    allowed = tolerance + info.eps * (expected.abs() + tolerance) + underflow
    wrong = ~((got - expected).abs() <= allowed)
    overflow = (expected.abs() * (1 + info.eps) + tolerance > info.max) & (got.abs() == torch.inf)
    wrong &= ~(overflow & (got.sign() == expected.sign()))
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}{list(at)}: got {got[at].item()!r}, truth {expected[at].item()!r}, "
            f"allowed {allowed[at].item():.3g}, off by {(got - expected)[at].item():.3g}; "
            f"{int(wrong.sum())} of {wrong.numel()} are wrong"
        )
