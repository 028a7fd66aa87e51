"""Sums of sampler and trainer in Triton: what a token adds, and how partial results combine.

A tile has an accumulator for each of ``PARTS`` and, for each rule, of ``RULE_PARTS``, in the dtype
of arithmetic, and its counts in fields of few bits. ``how_of`` says which a launch needs. Of the
segments' partial results in fp64 ``rows`` makes the fields of ``klfast.RolloutStats``.
"""

import triton
import triton.language as tl

from klfast.backends.triton.math import clamp, k2_value
from klfast.backends.triton.rollout_tokens import saturated, weight_of
from klfast.backends.triton.statistics import tree_sum

PARTS = {
    "counted": "sum",
    "lost": "sum",
    "kept": "sum",
    "logprobs": "sum",
    "k1": "sum",
    "abs": "sum",
    "k2": "sum",
    "k3": "sum",
    "ratio": "sum",
    "chi2": "sum",
    "error": "sum",
    "least": "least",
    "greatest": "greatest",
    "weight": "sum",
    "weight_squares": "sum",
    "weight_deviation": "sum",
    "least_weight": "least",
    "greatest_weight": "greatest",
}
"""How parts combine. counted, lost and kept are sums of the mask: over counted tokens, over tokens
whose x is not finite, over tokens that pass the rules over tokens."""
RULE_PARTS = {
    "total": "sum",
    "bounded": "sum",
    "bounded_squares": "sum",
    "least": "least",
    "greatest": "greatest",
}
"""The same of a rule over tokens; one over sequences has its total alone, which ``OVER`` says."""
COUNTS = ("tokens", "nonfinite", "rejected", "below", "above")
"""Counts of tokens: kept, of no finite x, that rules over tokens reject, of weights beyond bounds;
``RULE_COUNTS`` of each rule follow."""
RULE_COUNTS = ("below", "above")

_MASK_PARTS = ("counted", "lost", "kept")
_WEIGHT_PARTS = tuple(name for name in PARTS if "weight" in name)
_TOTALS = {"seq-sum": "sum", "seq-mean": "sum", "seq-max": "greatest", "seq-min": "least"}

FEW = tl.constexpr(len(_MASK_PARTS))
ALL = tl.constexpr(len(PARTS))
K1 = tl.constexpr(list(PARTS).index("k1"))
PER_RULE = tl.constexpr(len(RULE_PARTS))
FIELD = tl.constexpr(4)
"""Bits of a count in a tile's accumulator: a lane has a token of each of 8 tiles, at most."""
FULL_FIELD = tl.constexpr(15)
COUNTS_OF_CALL = tl.constexpr(len(COUNTS))
RULES_FROM = tl.constexpr(len(PARTS) + len(COUNTS))
"""Rows of partial results: parts and counts of the call, then those of each rule."""
ROWS_OF_RULE = tl.constexpr(len(RULE_PARTS) + len(RULE_COUNTS))


def how_of(*, statistics: bool, fractions: bool, filtered: bool, weighs: bool) -> tuple[str, ...]:
    """How each of ``PARTS`` combines, or "absent".

    Args:
        statistics: whether the launch wants more than its rules.
        fractions: whether the mask may hold other numbers than 0 and 1; else counts say its sums.
        filtered: whether rules over tokens reject.
        weighs: whether each token has a weight of its own.
    """
    absent = set() if statistics else set(PARTS) - set(_MASK_PARTS)
    if not weighs:
        absent |= set(_WEIGHT_PARTS)
    if not fractions:
        absent |= set(_MASK_PARTS)
    if not (statistics and filtered):
        absent.add("kept")
    return tuple("absent" if name in absent else how for name, how in PARTS.items())


def how_of_counts(*, statistics: bool, filtered: bool, weighs: bool) -> tuple[str, ...]:
    """How each of ``COUNTS`` combines, or "absent"; the arguments are those of ``how_of``."""
    absent = set() if statistics and filtered else {"rejected"}
    if not (statistics and weighs):
        absent |= {"below", "above"}
    return tuple("absent" if name in absent else "sum" for name in COUNTS)


def how_of_rule(over: str) -> tuple[str, ...]:
    """How each of ``RULE_PARTS`` and ``RULE_COUNTS`` of a rule combines, or "absent"."""
    if over == "token":
        return (*RULE_PARTS.values(), *["sum"] * len(RULE_COUNTS))
    return (_TOTALS[over], *["absent"] * (len(RULE_PARTS) + len(RULE_COUNTS) - 1))


@triton.jit
def terms(
    mask,
    counted,
    passed,
    a,
    x,
    weight,
    off,
    ratio,
    ratio_minus_1,
    k3,
    STATISTICS: tl.constexpr,
    FRACTIONS: tl.constexpr,
):
    """The terms of a token in ``PARTS``: those of the mask alone without ``STATISTICS``.

    a and x are 0 where the token is not counted. weight is the token's, off is weight - 1.
    """
    share = tl.where(counted, mask, 0.0)
    added = (share, tl.where(counted, 0.0, mask), tl.where(passed, mask, 0.0))
    if STATISTICS:
        error = tl.where(x >= 0, ratio_minus_1, -ratio_minus_1 / ratio)
        chi2 = ratio_minus_1 * (ratio_minus_1 + 2)
        of_ratio = tl.where(counted, ratio, 0.0)
        deviation = tl.where(counted, off * off, 0.0)
        added = added + (
            of_mask(share, a, FRACTIONS),
            of_mask(share, x, FRACTIONS),
            of_mask(share, tl.abs(x), FRACTIONS),
            of_mask(share, k2_value(x), FRACTIONS),
            of_mask(share, k3, FRACTIONS),
            of_mask(share, of_ratio, FRACTIONS),
            of_mask(share, chi2, FRACTIONS),
            of_mask(share, error, FRACTIONS),
            tl.where(counted, x, float("inf")),
            tl.where(counted, x, float("-inf")),
            of_mask(share, weight, FRACTIONS),
            of_mask(share, weight * weight, FRACTIONS),
            of_mask(share, deviation, FRACTIONS),
            tl.where(counted, weight, float("inf")),
            weight,  # which is not negative, and 0 where not counted
        )
    else:
        for _ in tl.static_range(ALL - FEW):
            added = added + (share,)
    return added


@triton.jit
def of_mask(share, value, FRACTIONS: tl.constexpr):
    """Value, which is 0 where not counted, times the mask."""
    term = value
    if FRACTIONS:
        term = share * value
    return term


@triton.jit
def rule_terms(
    mask, counted, value, bounded, OVER: tl.constexpr, RULE: tl.constexpr, FRACTIONS: tl.constexpr
):
    """The terms of a token in ``RULE_PARTS`` of a rule; value is 0 where it is not counted."""
    share = tl.where(counted, mask, 0.0)
    total = of_mask(share, value, FRACTIONS)
    bounded = tl.where(counted, bounded, 0.0)
    least = tl.where(counted, value, float("inf"))
    greatest = tl.where(counted, value, float("-inf"))
    if OVER[RULE] == "seq-max":
        total = greatest
    if OVER[RULE] == "seq-min":
        total = least
    bounded_squares = of_mask(share, bounded * bounded, FRACTIONS)
    return (total, of_mask(share, bounded, FRACTIONS), bounded_squares, least, greatest)


@triton.jit
def neutral(HOW: tl.constexpr, ROW: tl.constexpr):
    """What changes nothing."""
    number = 0.0
    if HOW[ROW] == "least":
        number = float("inf")
    if HOW[ROW] == "greatest":
        number = float("-inf")
    return number


@triton.jit
def empty(HOW: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr, ACC: tl.constexpr):
    """The first ``COUNT`` rows [SIZE] of no tokens."""
    sums = ()
    for i in tl.static_range(COUNT):
        sums = sums + (tl.zeros((SIZE,), ACC) + neutral(HOW, i),)
    return sums


@triton.jit
def combine(a, b, HOW: tl.constexpr, ROW: tl.constexpr):
    """Two parts as one."""
    if HOW[ROW] == "least":
        both = tl.minimum(a, b)
    elif HOW[ROW] == "greatest":
        both = tl.maximum(a, b)
    else:
        both = a + b
    return both


@triton.jit
def add(sums, parts, HOW: tl.constexpr, COUNT: tl.constexpr):
    """Sums and parts, combined; what is absent stays as it is."""
    combined = ()
    for i in tl.static_range(COUNT):
        if HOW[i] == "absent":
            combined = combined + (sums[i],)
        else:
            combined = combined + (combine(sums[i], parts[i], HOW, i),)
    return combined


@triton.jit
def as_one(parts, HOW: tl.constexpr, ROW: tl.constexpr, SIZE: tl.constexpr):
    """Part ``ROW`` of [SIZE] as one double."""
    if HOW[ROW] == "least":
        one = tl.min(parts[ROW], axis=0).to(tl.float64)
    elif HOW[ROW] == "greatest":
        one = tl.max(parts[ROW], axis=0).to(tl.float64)
    else:
        one = tree_sum(parts[ROW], SIZE)
    return one


@triton.jit
def mask_sums(parts, counts, FRACTIONS: tl.constexpr):
    """(Sum of the mask, over counted tokens, over those of no finite x; number of counted ones)."""
    tokens, nonfinite = counts[0], counts[1]
    number = tokens - nonfinite
    if FRACTIONS:
        counted, lost = parts[0], parts[1]
    else:
        counted, lost = number, nonfinite
    return counted + lost, counted, lost, number


@triton.jit
def extreme(value, is_there):
    """A least or greatest of a sequence: 0, and never -0, where it has no number."""
    return tl.where(is_there, value + 0.0, 0.0)


@triton.jit
def rows(
    parts,
    counts,
    passes,
    log,
    low,
    high,
    least,
    floor,
    cap,
    OUTSIDE: tl.constexpr,
    WEIGHS: tl.constexpr,
    FILTERED: tl.constexpr,
    FRACTIONS: tl.constexpr,
):
    """(the fields of ``RolloutStats`` but the rules, the weight of every counted token).

    Of sequences, in fp64. passes: no rule over sequences rejects it. log is that of the weight of
    all its tokens, where these have one weight; WEIGHS says that each has its own.
    """
    length, counted, lost, number = mask_sums(parts, counts, FRACTIONS)
    is_there = number > 0
    (
        _,
        _,
        kept,
        logprobs,
        k1,
        abs_x,
        k2,
        k3,
        ratio,
        chi2,
        error,
        least_x,
        greatest_x,
        weight,
        weight_squares,
        weight_deviation,
        least_weight,
        greatest_weight,
    ) = parts
    tokens, nonfinite, rejected, below, above = counts
    if not FILTERED:
        rejected, kept = nonfinite, counted
    elif not FRACTIONS:
        kept = tokens - rejected
    of_all = weight
    if not WEIGHS:
        ratio_of_all, minus_1, _ = saturated(log)
        of_all, off, is_below, is_above = weight_of(
            log, ratio_of_all, minus_1, is_there, low, high, least, floor, cap, OUTSIDE
        )
        weight = counted * of_all
        weight_squares = counted * (of_all * of_all)
        weight_deviation = counted * (off * off)
        least_weight = of_all
        greatest_weight = of_all
        below = tl.where(is_below, number, 0.0)
        above = tl.where(is_above, number, 0.0)
    outside = above + tl.where(low > float("-inf"), below, 0.0)
    fields = (
        length,
        tokens,
        nonfinite,
        tl.where(passes, kept, 0.0),
        tl.where(passes, rejected, tokens),
        logprobs,
        k1,
        abs_x,
        k2,
        k3,
        ratio,
        chi2,
        error,
        extreme(least_x, is_there),
        extreme(greatest_x, is_there),
        weight,
        weight_squares,
        weight_deviation + lost,
        extreme(least_weight, is_there),
        extreme(greatest_weight, is_there),
        below,
        above,
        outside,
    )
    return fields, of_all


@triton.jit
def rule_rows(parts, low, high, length, number, OVER: tl.constexpr, RULE: tl.constexpr):
    """(the fields of ``RuleStats``, where the rule keeps the sequence), of sequences in fp64."""
    is_there = number > 0
    total, bounded, bounded_squares, least, greatest, below, above = parts
    passes = is_there | (is_there == 0)
    if OVER[RULE] == "token":
        least, greatest = extreme(least, is_there), extreme(greatest, is_there)
    else:
        if OVER[RULE] == "seq-mean":
            total = total / tl.where(length > 0, length, 1.0)
        total = extreme(total, is_there)
        least, greatest = total, total
        is_below = is_there & (total < low)
        is_above = is_there & (total > high)
        passes = (is_below | is_above) == 0
        below, above = tl.where(is_below, 1.0, 0.0), tl.where(is_above, 1.0, 0.0)
        bounded = tl.where(is_there, clamp(total, low, high), 0.0)
        bounded_squares = bounded * bounded
    return (total, least, greatest, below, above, bounded, bounded_squares), passes
