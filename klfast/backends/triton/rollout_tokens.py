"""One token between sampler and trainer, in Triton: statistics of rules, weights, terms of sums.

The stable forms of ``klfast/rollout/formulas.py``. ``x = logprobs - rollout_logprobs``. Every
function computes in the type of its arguments, fp32 or fp64.
"""

import triton
import triton.language as tl

from klfast.backends.triton.math import (
    constant,
    exp,
    exponentials,
    k2_value,
    log_near,
)
from klfast.rollout.formulas import EXPONENT_LIMIT, LEAST_COMPLEMENT

_LIMIT = tl.constexpr(EXPONENT_LIMIT)
_LEAST_COMPLEMENT = tl.constexpr(LEAST_COMPLEMENT)
_NEAR = tl.constexpr(0.5)
"""The two forms of a binary divergence meet where one complement is so much above the other."""


@triton.jit
def saturated(x):
    """(ratio, ratio - 1, k3): exp(x), expm1(x), expm1(x) - x, of x as far as the limit."""
    limit = constant(x, _LIMIT, _LIMIT)
    top = tl.minimum(x, limit)
    y = tl.maximum(top, -limit)
    ratio, minus_1, k3 = exponentials(y)
    k3 += y - top  # where x < -20: exp(x) is nothing there in fp32
    if x.dtype == tl.float64:
        k3 = tl.where(top < y, (exp(top) - 1) - top, k3)
    return ratio, minus_1, k3


@triton.jit
def decay_of(x):
    """``exponentials`` of any x <= 0, where exp of less than -86 in fp32, -700 in fp64, is 0."""
    lowest = constant(x, -86.0, -700.0)
    y = tl.maximum(x, lowest)
    value, minus_1, tail = exponentials(y)
    return tl.where(x < lowest, 0.0, value), minus_1, tail + (y - x)


@triton.jit
def weight_of(
    log, ratio, ratio_minus_1, counted, low, high, least, floor, cap, OUTSIDE: tl.constexpr
):
    """(w, w - 1, below, above) of a weight with this log; w is 0 where nothing is counted.

    low and high are the logs of the bounds. Beyond them the weight is floor or cap itself, whatever
    exp has made of the log; inside no weight is beyond these.
    """
    is_under = log < low
    is_over = log > high
    if OUTSIDE == "mask":
        weight = tl.where(is_under | is_over, 0.0, ratio)
    else:
        weight = tl.minimum(tl.maximum(ratio, floor), cap)
        weight = tl.where(is_over, cap, tl.where(is_under, floor, weight))
    weight = tl.where(counted, weight, 0.0)
    off = tl.where(weight == ratio, ratio_minus_1, weight - 1)
    return weight, off, counted & (log < least), counted & is_over


@triton.jit
def two_events(a, b):
    """What both directions of a binary divergence of p = exp(a) and q = exp(b) are made of.

    (p, q, 1 - p, 1 - q, where a complement is at its least, a - b, the larger of p and q, and
    exp(-d), expm1(-d), expm1(-d) + d of d = abs(a - b)).
    """
    zero = constant(a, 0.0, 0.0)
    a, b = tl.minimum(a, zero), tl.minimum(b, zero)
    p, p_minus_1, _ = decay_of(a)
    q, q_minus_1, _ = decay_of(b)
    least = constant(a, _LEAST_COMPLEMENT, _LEAST_COMPLEMENT)
    p_is_1 = -p_minus_1 < least
    q_is_1 = -q_minus_1 < least
    rest_p = tl.where(p_is_1, least, -p_minus_1)
    rest_q = tl.where(q_is_1, least, -q_minus_1)
    x = a - b
    decay, decay_minus_1, decay_tail = decay_of(-tl.abs(x))
    top = tl.where(x > 0, p, q)
    return p, q, rest_p, rest_q, p_is_1 | q_is_1, x, top, decay, decay_minus_1, decay_tail


@triton.jit
def binary_kl(p, rest_p, rest_q, at_least, x, top, decay, decay_minus_1, decay_tail):
    """KL = p log(p/q) + (1-p) log((1-p)/(1-q)), of what ``two_events`` returns.

    It is p (expm1(-x) + x) + (1-q) f(u), with u = (q-p) / (1-q) and f(u) = (1+u) log(1+u) - u: no
    part is negative. Near u = 0 the second is (q-p) u + (1-p) (log(1+u) - u). Where a complement is
    at its least these do not add up, and both logarithms are taken as they are.
    """
    d = tl.abs(x)
    rises = x > 0
    distance = -top * decay_minus_1  # abs(p - q)
    difference = tl.where(rises, -distance, distance)  # q - p
    # Of x < 0, times q: 1 - e^-d - d e^-d.
    falling = tl.where(d <= 1, -d * decay_minus_1 - decay_tail, -decay_minus_1 - d * decay)
    of_event = top * tl.where(rises, decay_tail, falling)

    v = rest_p / rest_q
    u = tl.where(at_least, v - 1, difference / rest_q)
    log_v, log_v_minus_u = log_near(v, u)
    near = difference * u + rest_p * log_v_minus_u
    of_rest = rest_p * log_v
    others = tl.where(tl.abs(u) <= _NEAR, near, of_rest - difference)
    kl = tl.where(at_least, p * x + of_rest, of_event + others)
    return tl.where(kl > 0, kl, 0.0)


@triton.jit
def statistic(x, k3, events, FORMULAS: tl.constexpr, RULE: tl.constexpr):
    """What a rule compares, by its name in ``klfast.rollout.formulas``; events: ``two_events``.

    Of names in a tuple, position goes with tuple: Triton 3.6 passes no string alone.
    """
    if FORMULAS[RULE] == "k1":
        value = x
    elif FORMULAS[RULE] == "abs":
        value = tl.abs(x)
    elif FORMULAS[RULE] == "k2":
        value = k2_value(x)
    elif FORMULAS[RULE] == "k3":
        value = k3
    else:
        p, q, rest_p, rest_q, at_least, of_x, top, decay, decay_minus_1, tail = events
        if FORMULAS[RULE] == "binary_kl":
            value = binary_kl(q, rest_q, rest_p, at_least, -of_x, top, decay, decay_minus_1, tail)
        elif FORMULAS[RULE] == "binary_kl_reverse":
            value = binary_kl(p, rest_p, rest_q, at_least, of_x, top, decay, decay_minus_1, tail)
        else:  # binary_tv
            value = -top * decay_minus_1
    return value
