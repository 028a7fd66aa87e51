"""The statistics of a sequence in Triton: what a token adds, and how partial results combine.

The table of ``csrc/formulas/statistics.h``. To add a statistic, add its row of ``COMBINATIONS`` and
its term to ``terms``, in the place that it has in ``klfast.KLStats``.
"""

import triton
import triton.language as tl

from klfast.backends.triton.math import bits_of, constant, k1_value, k2_value, k3_value
from klfast.stats.kl import KLStats

COMBINATIONS = {
    "kl": "sum",
    "length": "sum",
    "k1": "sum",
    "k2": "sum",
    "k3": "sum",
    "max_abs_log_ratio": "greatest",
    "clipped": "count",
    "nonfinite": "count",
}
"""By field of ``KLStats``. "greatest" is of numbers that are not negative, "count" of 0 and 1."""

HOW = tl.constexpr(tuple(COMBINATIONS[field] for field in KLStats._fields))
EMPTY = tl.constexpr(tuple({"sum": 0.0, "greatest": 0.0, "count": 0.0}[how] for how in HOW.value))
"""The statistics of no tokens."""
KL = tl.constexpr(KLStats._fields.index("kl"))
LENGTH = tl.constexpr(KLStats._fields.index("length"))
ALWAYS = tl.constexpr(2)  # the statistics that every call computes: the first two, kl and length
ALL = tl.constexpr(len(KLStats._fields))


@triton.jit
def terms(value, weight, x, limited, COUNT: tl.constexpr):
    """The terms of a token in the first ``COUNT`` statistics.

    value is the estimator with its weight and limits, weight the mask's, x the log-ratio; all are 0
    where masked. limited is where a limit acted.
    """
    added = (value, weight)
    if COUNT > ALWAYS:
        # As integers NaN is above infinity, so that a maximum keeps it. Floats would drop it.
        magnitude = bits_of(tl.abs(x))
        infinity = bits_of(constant(x, float("inf"), float("inf")))
        added = added + (
            weight * k1_value(x),
            weight * k2_value(x),
            weight * k3_value(x),
            magnitude,
            limited.to(tl.int32),
            (tl.maximum(magnitude, bits_of(tl.abs(value))) >= infinity).to(tl.int32),
        )
    return added


@triton.jit
def empty(COUNT: tl.constexpr, SIZE: tl.constexpr, ACC: tl.constexpr):
    """The first ``COUNT`` statistics [SIZE] of no tokens: numbers, and bits for "greatest"."""
    sums = ()
    for i in tl.static_range(COUNT):
        none = tl.full((SIZE,), EMPTY[i], ACC)
        if HOW[i] == "greatest":
            none = bits_of(none)
        if HOW[i] == "count":
            none = none.to(tl.int32)
        sums = sums + (none,)
    return sums


@triton.jit
def add(sums, parts, COUNT: tl.constexpr):
    """Sums and parts of ``empty``'s types, combined."""
    combined = ()
    for i in tl.static_range(COUNT):
        if HOW[i] == "greatest":
            combined = combined + (tl.maximum(sums[i], parts[i]),)
        else:
            combined = combined + (sums[i] + parts[i],)
    return combined


@triton.jit
def tree_sum(x, SIZE: tl.constexpr):
    """[SIZE] -> scalar: adds neighbours, then neighbouring sums, and so on. Past 32 in fp64."""
    for level in tl.static_range(1, 13):
        if (SIZE >> level) > 0:
            if level == 6:
                x = x.to(tl.float64)
            x = tl.sum(tl.reshape(x, (SIZE >> level, 2)), axis=1)
    return tl.sum(x, axis=0).to(tl.float64)


@triton.jit
def as_one(sums, ROW: tl.constexpr, SIZE: tl.constexpr, ACC: tl.constexpr):
    """Statistic ``ROW`` of [SIZE] as one double."""
    if HOW[ROW] == "sum":
        one = tree_sum(sums[ROW], SIZE)
    elif HOW[ROW] == "count":
        one = tl.sum(sums[ROW], axis=0).to(tl.float64)
    else:
        # A conversion may give NaN a sign, by which it would be the smallest.
        one = tl.abs(tl.max(sums[ROW], axis=0).to(ACC, bitcast=True).to(tl.float64))
    return one


@triton.jit
def greater(a, b):
    """The larger of doubles that are -1 or not negative, by their bits: NaN is above all."""
    largest = tl.maximum(a.to(tl.int64, bitcast=True), b.to(tl.int64, bitcast=True))
    return largest.to(tl.float64, bitcast=True)


@triton.jit
def combine(a, b, ROW: tl.constexpr):
    """Statistic ``ROW`` of two parts, in doubles."""
    if HOW[ROW] == "greatest":
        both = greater(a, b)
    else:
        both = a + b
    return both
