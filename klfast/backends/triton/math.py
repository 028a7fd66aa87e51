"""The formulas in Triton: value and derivative of every estimator, and the series they share.

``csrc/formulas/estimators.h`` and ``csrc/math`` have the same algebra and constants, and give the
reasons. Every function takes tensors of fp32 or fp64 and computes in that type. To add an
estimator, write its three functions and its row of ``ESTIMATORS``.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

_SERIES_32 = tl.constexpr(
    (
        0.5,
        0.166666669663,
        0.0416667167458,
        0.00833330976887,
        0.00138858199459,
        0.000198444321603,
        2.53333219881e-5,
        2.76900869497e-6,
    )
)
"""(e^r - 1 - r) / r^2 on |r| <= 1, relative error 4.9e-9."""

_SERIES_64 = tl.constexpr(
    (
        0.5,
        0.16666666666666666668,
        0.041666666666666667069,
        0.0083333333333333327188,
        0.0013888888888888784992,
        0.00019841269841270523869,
        0.000024801587301677832945,
        2.7557319223668027305e-6,
        2.7557319186660467528e-7,
        2.5052108457492125763e-8,
        2.0876765204425626223e-9,
        1.6059035937541744641e-10,
        1.1469753095732968047e-11,
        7.6474673963897267435e-13,
        4.8414927989976931443e-14,
        2.8218321405309491675e-15,
    )
)
"""The same to 1e-20."""

_ATANH_32 = tl.constexpr((0.333333331249, 0.200001632887, 0.142657637253, 0.118854248054))
"""(atanh(s) - s) / s^3 as a series in s^2 on s^2 <= 0.04, relative error 2e-9."""


@triton.jit
def constant(like, single: tl.constexpr, double: tl.constexpr):
    """A number in the type of ``like``; fp64 may want another one than fp32."""
    if like.dtype == tl.float64:
        number: tl.constexpr = double
    else:
        number: tl.constexpr = single
    return tl.full((), number, like.dtype)


@triton.jit
def clamp(x, low, high):
    """NaN stays NaN."""
    x = tl.where(x > high, high, x)
    return tl.where(x < low, low, x)


@triton.jit
def bits_of(x):
    """A float's bits as a signed integer."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
    return bits


@triton.jit
def power_of_two(n):
    """2^n for a normal result: fp32 of int32, fp64 of int64."""
    if n.dtype == tl.int64:
        power = ((n + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        power = ((n + 127) << 23).to(tl.float32, bitcast=True)
    return power


@triton.jit
def series(r):
    """q(r) = (e^r - 1 - r) / r^2 on |r| <= 1."""
    terms: tl.constexpr = _SERIES_64 if r.dtype == tl.float64 else _SERIES_32
    last: tl.constexpr = 15 if r.dtype == tl.float64 else 7
    q = tl.full((), terms[last], r.dtype)
    for k in tl.static_range(last):
        q = tl.fma(q, r, tl.full((), terms[last - 1 - k], r.dtype))
    return q


@triton.jit
def reduce(x, lowest):
    """``reduce_within`` of x, limited to where powers of two are normal."""
    n, r, tail = reduce_within(clamp(x, lowest, constant(x, 89.0, 710.0)))
    return n, r, tail


@triton.jit
def reduce_within(x):
    """(n, r, e^r - 1 - r) with x = n ln2 + r: n is 0 where |x| <= 1, and |r| <= ln2 / 2 beyond."""
    log2e = constant(x, 1.44269504, 1.4426950408889634)
    rounder = constant(x, 12582912.0, 6755399441055744.0)  # adding it rounds to an integer
    shifted = tl.where(tl.abs(x) <= 1, 0.0, x * log2e) + rounder
    n = bits_of(shifted) - bits_of(rounder)
    n_float = shifted - rounder
    ln2_high = constant(x, 0.693359375, 0.6931471803691238)  # few bits: n * ln2_high is exact
    ln2_low = constant(x, -2.12194440e-4, 1.9082149292705877e-10)
    r = tl.fma(-n_float, ln2_low, tl.fma(-n_float, ln2_high, x))
    return n, r, r * r * series(r)


@triton.jit
def exp(x):
    """e^x."""
    n, r, tail = reduce(x, constant(x, -104.0, -746.0))
    half = n >> 1  # two factors, so that neither overflow nor underflow comes early
    return (1 + (r + tail)) * power_of_two(half) * power_of_two(n - half)


@triton.jit
def half_expm1(x):
    """(e^x - 1) / 2, which overflows where e^x - 1 does; and e^r - 1 - r of its reduction."""
    n, r, tail = reduce(x, constant(x, -86.0, -700.0))
    half_power = power_of_two(n - 1)  # half of 2^n, which may overflow
    return tl.fma(half_power, r + tail, half_power - 0.5), tail


@triton.jit
def expm1(x):
    """e^x - 1."""
    half, _ = half_expm1(x)
    return 2 * half


@triton.jit
def expm1_minus_argument(x):
    """e^x - 1 - x, never negative, exactly 0 at 0, infinite at both infinities."""
    half, tail = half_expm1(x)
    highest = constant(x, 89.0, 710.0)
    below_infinity = tl.where(x > highest, highest, x)
    difference = tl.fma(tl.full((), 2.0, x.dtype), half, -below_infinity)
    return tl.where(tl.abs(x) <= 1, tail, difference)


@triton.jit
def atanh_series(z):
    """(atanh(s) - s) / s^3 at z = s^2 in [0, 0.04]; in fp64 by Taylor's terms."""
    if z.dtype == tl.float64:
        p = tl.full((), 1 / 23, z.dtype)
        for k in tl.static_range(10):
            p = tl.fma(p, z, tl.full((), 1 / (21 - 2 * k), z.dtype))
    else:
        p = tl.full((), _ATANH_32[3], z.dtype)
        for k in tl.static_range(3):
            p = tl.fma(p, z, tl.full((), _ATANH_32[2 - k], z.dtype))
    return p


@triton.jit
def log_near(v, a):
    """(log v, log v - a) for v > 0; a is v - 1, and better known than that where v is near 1."""
    # v / 2^n is in [3/4, 3/2), so that s^2 is at most 0.04 below.
    half_binade: tl.constexpr = 1 << (51 if a.dtype == tl.float64 else 22)
    mantissa: tl.constexpr = 52 if a.dtype == tl.float64 else 23
    bias: tl.constexpr = 1023 if a.dtype == tl.float64 else 127
    n = ((bits_of(v) + half_binade) >> mantissa) - bias
    minus_one = constant(a, -1.0, -1.0)
    # Near 1 it is taken from a, as v was rounded.
    reduced = tl.where(n == 0, a, tl.fma(v, power_of_two(-n), minus_one))
    s = reduced / (2 + reduced)
    cubic = 2 * s * (s * s) * atanh_series(s * s)
    of_power = n.to(a.dtype) * constant(a, 0.6931471805599453, 0.6931471805599453)
    value = of_power + tl.fma(constant(a, 2.0, 2.0), s, cubic)
    return value, tl.where(n == 0, tl.fma(-reduced, s, cubic), value - a)


@triton.jit
def log1p(a):
    """(log(1 + a), log(1 + a) - a) for a > -1."""
    value, minus_argument = log_near(1 + a, a)
    return value, minus_argument


@triton.jit
def sign(x):
    """-1, 0 or 1; NaN stays NaN."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def k1_value(x):
    return x


@triton.jit
def k1_derivative(x):
    return tl.full(x.shape, 1.0, x.dtype)


@triton.jit
def k1_sum(x):
    return x + 1


@triton.jit
def abs_value(x):
    return tl.abs(x)


@triton.jit
def abs_derivative(x):
    return sign(x)


@triton.jit
def abs_sum(x):
    return tl.abs(x) + sign(x)


@triton.jit
def k2_value(x):
    return 0.5 * x * x


@triton.jit
def k2_derivative(x):
    return x


@triton.jit
def k2_sum(x):
    return 0.5 * x * x + x


@triton.jit
def k3_value(x):
    return expm1_minus_argument(-x)


@triton.jit
def k3_derivative(x):
    return -expm1(-x)


@triton.jit
def k3_sum(x):
    return x


@triton.jit
def k3_ref_value(x):
    return expm1_minus_argument(x)


@triton.jit
def k3_ref_derivative(x):
    return expm1(x)


@triton.jit
def k3_ref_sum(x):
    return expm1_minus_argument(x) + expm1(x)


@triton.jit
def finite_below(x):
    """x, but -1000 below it, where exp is 0: times -infinity that would be NaN."""
    return tl.where(x < -1000, -1000.0, x)


@triton.jit
def r_log_r_value(x):
    return exp(x) * finite_below(x)


@triton.jit
def r_log_r_derivative(x):
    return exp(x) * (1 + finite_below(x))


@triton.jit
def r_log_r_sum(x):
    return exp(x) * (1 + finite_below(x) + finite_below(x))


class Formula(NamedTuple):
    """f(x), f'(x) and f(x) + f'(x) of an estimator, as jitted functions.

    The sum is what the gradient of w f(x) holds when the weight w is differentiated too: k3's is
    exactly x, where adding the two would cancel e^-x against itself.
    """

    value: Any
    derivative: Any
    value_plus_derivative: Any


ESTIMATORS = {
    "k1": Formula(k1_value, k1_derivative, k1_sum),
    "abs": Formula(abs_value, abs_derivative, abs_sum),
    "k2": Formula(k2_value, k2_derivative, k2_sum),
    "k3": Formula(k3_value, k3_derivative, k3_sum),
    "k3_ref": Formula(k3_ref_value, k3_ref_derivative, k3_ref_sum),
    "r_log_r": Formula(r_log_r_value, r_log_r_derivative, r_log_r_sum),
}
"""Names of ``klfast.types.names.ESTIMATORS``, in its order."""

LOG_LARGEST = {"fp32": 88.722831, "fp64": 709.782712893384}  # by dtype: exp is finite up to here
