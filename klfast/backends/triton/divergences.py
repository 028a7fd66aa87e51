"""The formulas over a vocabulary in Triton: terms of an entry, results of a row, gradients.

``csrc/formulas/divergences.h`` has the same algebra and gives the reasons. The probability of a
logit x is 2^(scale x - shift), with scale = log2(e) / temperature. That costs one fused operation
and the hardware's power of two. Values per entry have the type ``ACC``, fp32 or fp64. Values per
row are in fp64. ``pair_placed`` halves the logits of two models and subtracts their row's origin.
To add a divergence, write its two functions and its row of ``DIVERGENCES``.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from klfast.backends.triton.math import clamp, constant, log1p, log_near, series, sign

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def is_excluded(x):
    """True if a logit excludes its entry. NaN does not."""
    return x == float("-inf")


@triton.jit
def origin_of(largest, inverse_temperature):
    """Half a row's greatest logit, or 0 if the greatest logit is near 0, in the logit's type."""
    # All logits within 512 nats of the greatest are then within a factor of 2 of it, so that
    # subtracting half of it from them is exact.
    far = tl.abs(largest.to(tl.float64) * inverse_temperature) > 1024
    return tl.where(far, largest * 0.5, 0.0)


@triton.jit
def pair_placed(x, y, origins):
    """Half the logits of both models, minus their origins."""
    first, second = origins
    # Halving is exact, and the difference of two logits may be twice the largest number.
    half = constant(x, 0.5, 0.5)
    return tl.fma(x, half, -first.to(x.dtype)), tl.fma(y, half, -second.to(y.dtype))


@triton.jit
def is_usable(mass):
    """True if the guess gave a usable sum of 2^s, without underflow or overflow."""
    return (mass > 1e-20) & (mass < 1e30)


@triton.jit
def is_good(mass):
    """True if the guess is also so near the greatest entry that the rounding of s is harmless."""
    return (mass > 1e-2) & (mass < 1e7)


@triton.jit
def rounded(shift, ACC: tl.constexpr):
    """(s of type ACC, f) with 2^(a - shift) = f 2^(a - s)."""
    s = shift.to(ACC)
    return s, (1 + (s.to(tl.float64) - shift) * LN2).to(ACC)


@triton.jit
def scales_of(inverse_temperature, ACC: tl.constexpr):
    """(s, s / 2, ln(2) s) with s = 2 log2(e) / temperature, rounded. Placed logits are halved."""
    scale = (2 * inverse_temperature * LOG2E).to(ACC)
    return scale, scale * 0.5, scale.to(tl.float64) * LN2


@triton.jit
def parts_of(lse, ratio, inverse, ACC: tl.constexpr):
    """(offset, offsets, rest, lost) with ratio = offset * inverse + 2 ln(2) * rest + lost.

    The offset is the large part, before the temperature. The model whose logits are farther from 0
    has it in ``offsets``, because subtracting it costs them no digit. ``lost`` is the rounding
    error of the rest.
    """
    offset = (tl.floor(ratio / inverse / 2 + 0.5) * 2).to(ACC)
    rest = ratio - offset.to(tl.float64) * inverse
    # Models that differ by a constant have no rest but the rounding of the ratio.
    rest = tl.where(tl.abs(rest) < 1e-15 * tl.abs(ratio), 0.0, rest)
    rest /= 2 * LN2
    lost = ((rest - rest.to(ACC).to(tl.float64)) * (2 * LN2)).to(ACC)
    is_second = tl.abs(lse + ratio) > tl.abs(lse)
    offsets = (tl.where(is_second, 0.0, -offset), tl.where(is_second, offset, 0.0))
    return offset, offsets, rest.to(ACC), lost


@triton.jit
def log_ratio(x, y, half, offsets, rest):
    """log(q / p) of placed logits in nats, minus the two parts of a ratio. Half of it in bits is in
    range wherever it is in nats.
    """
    first, second = offsets
    bits = tl.fma((y - second) - (x - first), half, -rest)
    return bits * constant(bits, 2 * LN2, 2 * LN2)


@triton.jit
def word_of(x, scale, largest):
    """(2^s, s 2^s) with s = scale (x - largest)."""
    s = (x - largest) * scale
    mass = tl.exp2(s)
    # 0 times -infinity would be NaN and must be 0. A NaN stays in mass.
    return mass, mass * tl.where(s < -5000, -5000.0, s)


@triton.jit
def guess_of(lse, ratio, inverse_temperature, ACC: tl.constexpr):
    """The guesses for ``pair_of``: the first model's lse, and the second's minus the first's.

    Both are rounded, and ``taken`` is the rounded ratio. The shift and the factor of the second
    model are exact for ``taken``.
    """
    scale, half, inverse = scales_of(inverse_temperature, ACC)
    shift = (lse * LOG2E).to(ACC)
    offset, offsets, rest, _ = parts_of(lse, ratio, inverse, ACC)
    taken = offset.to(tl.float64) * scale.to(tl.float64) + 2 * rest.to(tl.float64)
    # The second exponential must use the rounded ratio, as u does.
    other_shift, factor = rounded(shift.to(tl.float64) + taken, ACC)
    return scale, half, shift, other_shift, factor, offsets, rest, taken * LN2


@triton.jit
def pair_of(x, y, guess, EXCLUDES: tl.constexpr):
    """(w, w (e^u - 1 - u), w u, t, whether only q excludes the entry) of an entry's logits.

    w e^u is t times the guess's factor. If y is -inf and x is not, the sums with u are valid only
    with ``EXCLUDES``.
    """
    scale, half, shift, other_shift, factor, offsets, rest, _ = guess
    mass = tl.exp2(tl.fma(x, scale, -shift))
    other = tl.exp2(tl.fma(y, scale, -other_shift))
    u = log_ratio(x, y, half, offsets, rest)
    # Without mass only other remains in the spread. -infinity stays, as q may exclude the entry.
    u = tl.where((mass == 0) & (u != float("-inf")), 2.0, u)
    if EXCLUDES:
        u = tl.maximum(u, constant(u, -3.402823466e38, -1.7976931348623157e308))
    slope = mass * u
    excluded = is_excluded(y) & (mass == mass) & (x > float("-inf"))
    if EXCLUDES:
        slope = tl.where(excluded, 0.0, slope)
    else:
        slope = tl.where(u == float("-inf"), u, slope)
    # Near u = 0 this difference would cancel, and a series takes its place.
    far = tl.fma(other, factor, -mass) - slope
    spread = tl.where(tl.abs(u) <= 1, slope * u * series(u), far)
    return mass, spread, slope, other, excluded


@triton.jit
def held(power):
    """The power, made finite if it is -infinity, because 0 * -infinity would be NaN, not 0."""
    return tl.where(power < -5000, -5000.0, power)


@triton.jit
def moment_of(x, y, mass, other, guess, ENTROPY: tl.constexpr):
    """An entry's s 2^s under the model that ``ENTROPY`` names, from the terms of ``pair_of``."""
    scale, _, shift, other_shift, _, _, _, _ = guess
    if ENTROPY == "first":
        product = mass * held(tl.fma(x, scale, -shift))
    else:
        product = other * held(tl.fma(y, scale, -other_shift))
    return product


@triton.jit
def entropy_of(mass, moment):
    """A row's entropy in nats, from the sums of 2^s and s 2^s."""
    entropy = tl.log(mass) - moment / mass * LN2
    return tl.where(entropy < 0, 0.0, entropy)


@triton.jit
def pair_row(sums, excluded, guess):
    """(KL, lse, shift, whether these are about right, whether they are exact) from a row's sums.

    Every divergence needs the digits of the KL, because a total variation shows the shift's error.
    """
    mass, spread, slope, other = sums
    _, _, shift, _, factor, _, _, taken = guess
    other *= factor.to(tl.float64)
    a = (spread + slope) / mass
    spread /= mass
    slope = tl.abs(slope / mass)
    total = other / mass  # 1 + a, with more digits except near a = 0
    # Far from 0 the sum of spread and slope has cancelled, and total has more digits.
    far = tl.abs(spread) + slope > 0.5
    near, near_minus_a = log1p(tl.where(far, 0.0, a))
    log_total = tl.where(far, tl.log(total), near)
    kl = spread + tl.where(far, log_total - a, near_minus_a)
    usable = is_usable(mass) & is_usable(other)
    exact = usable & is_good(mass) & (total > 0.125) & (total < 1e4)
    cancelled = tl.where(far, 1 + slope, spread + tl.abs(a) * (slope + spread))
    # 16 roundings are 2e-6 in fp32, even if all point in one direction. Without the entries that
    # only q excludes, the KL of a first read may be negative.
    exact = exact & (excluded | (cancelled <= 16 * tl.abs(kl)) | (spread == 0))
    kl = tl.where(kl < 0, 0.0, kl)
    # A NaN logit makes usable false. Any other NaN comes from two sums too large for ACC.
    kl = tl.where(usable & (excluded | (kl != kl)), float("inf"), kl)
    lse = shift.to(tl.float64) * LN2 + tl.log(mass)
    return kl, lse, taken + log_total, usable, exact


@triton.jit
def exact_of(lse, ratio, inverse_temperature, ACC: tl.constexpr):
    """The row's constants for ``probabilities``: rounded log-sum-exps, and their rounding rests."""
    scale, half, inverse = scales_of(inverse_temperature, ACC)
    shift, factor = rounded(lse * LOG2E, ACC)
    other_shift, other_factor = rounded((lse + ratio) * LOG2E, ACC)
    _, offsets, rest, lost = parts_of(lse, ratio, inverse, ACC)
    return scale, half, shift, factor, other_shift, other_factor, offsets, rest, lost


@triton.jit
def probabilities(x, y, exact):
    """(p, q, u) of an entry's logits."""
    scale, half, shift, factor, other_shift, other_factor, offsets, rest, _ = exact
    p = tl.exp2(tl.fma(x, scale, -shift)) * factor
    q = tl.exp2(tl.fma(y, scale, -other_shift)) * other_factor
    return p, q, log_ratio(x, y, half, offsets, rest)


@triton.jit
def difference_of(p, q, u):
    """The difference q - p, where u is log(q / p)."""
    return tl.where(tl.abs(u) <= 1, p * tl.fma(u * u, series(u), u), q - p)


@triton.jit
def mixture_of(weight, ACC: tl.constexpr):
    """(weight, 1 - weight, the u from which q has more of a mixture with these weights than p)."""
    return weight.to(ACC), (1 - weight).to(ACC), (-tl.log(weight)).to(ACC)


@triton.jit
def jsd_terms(x, y, exact, mixture):
    """(part in JSD, p, q, log(m / p), log(q / m)) of an entry's logits; beta <= 1/2."""
    beta, rest, turn = mixture
    p, q, u = probabilities(x, y, exact)
    # Beyond 80 nats one of p and q is 0, and the other's logarithm has reached its limit.
    u = clamp(u, -80.0, 80.0)
    near = tl.abs(u) <= 1
    near_u = tl.where(near, u, 0.0)
    tail = near_u * near_u * series(near_u)
    # The smaller logarithm is computed. The other is the rest of u.
    of_q = (u > turn) & (u > 1)
    far_u = tl.where(of_q, -u, u)
    power = tl.exp2(far_u * constant(u, LOG2E, LOG2E))
    expm1 = tl.where(near, near_u + tail, power - 1)
    a = tl.where(of_q, rest, beta) * expm1
    # 1 + a is m / p or m / q. For m / q and a small beta, 1 + a would have few digits.
    log, log_minus_a = log_near(tl.where(of_q, tl.fma(rest, power, beta), 1 + a), a)
    log_m_over_p = tl.where(of_q, u + log, log)
    log_q_over_m = tl.where(of_q, -log, u - log)
    g = tl.fma(near_u, expm1, -tail)
    h = tl.fma(1 + a, log_minus_a, a * a)
    near_value = p * tl.fma(beta, g, -h)
    far_value = beta * q * log_q_over_m - rest * p * log_m_over_p
    return tl.where(near, near_value, far_value), p, q, log_m_over_p, log_q_over_m


@triton.jit
def jsd_row(beta):
    """The weights of the slopes, and the greatest JSD, the entropy of the weights."""
    return 1 - beta, beta, -(beta * tl.log(beta) + (1 - beta) * tl.log(1 - beta))


@triton.jit
def tv_terms(x, y, exact, mixture):
    """(part in the total variation, p, q, sign of q - p, the same) of an entry's logits."""
    p, q, u = probabilities(x, y, exact)
    u -= exact[8]  # it would show in a log-ratio near 0
    return tl.abs(difference_of(p, q, u)) * constant(u, 0.5, 0.5), p, q, sign(u), sign(u)


@triton.jit
def tv_row(parameter):
    """As ``jsd_row``."""
    return parameter * 0 + 0.5, parameter * 0 + 0.5, parameter * 0 + 1


@triton.jit
def skew_terms(x, y, exact, mixture):
    """(part in KL(p || m), p, q, slopes) of an entry's logits, with m = alpha p + (1 - alpha) q.

    With L = log(m / p) the slopes are L + alpha (p / m - 1) and 1 - p / m.
    """
    alpha, rest, _ = mixture
    p, q, u = probabilities(x, y, exact)
    u = clamp(u - exact[8], -80.0, 80.0)  # as in ``tv_terms`` and ``jsd_terms``
    near = tl.abs(u) <= 1
    near_u = tl.where(near, u, 0.0)
    near_expm1 = tl.fma(near_u * near_u, series(near_u), near_u)
    power = tl.where(near, 1 + near_expm1, tl.exp2(u * constant(u, LOG2E, LOG2E)))
    growth = rest * tl.where(near, near_expm1, power - 1)
    ratio = tl.fma(rest, power, alpha)  # m / p, which is 1 + growth
    log, log_minus_growth = log_near(ratio, growth)
    share = rest * power / ratio  # of q in m
    by_q = growth / ratio
    far_value = tl.fma(rest, q - p, -p * log)
    value = tl.where(growth > 1, far_value, -p * log_minus_growth)
    near_slope = tl.fma(growth, share, log_minus_growth)
    by_p = tl.where(tl.abs(growth) <= 0.5, near_slope, tl.fma(-alpha, by_q, log))
    return value, p, q, by_p, by_q


@triton.jit
def skew_row(alpha):
    """As ``jsd_row``."""
    return alpha * 0 + 1, 1 - alpha, -tl.log(alpha)


class Divergence(NamedTuple):
    """A divergence in Triton. KL needs no more than ``pair_row``. The others read a row again."""

    is_kl: Any
    terms: Any
    """(part in the divergence, p, q, slopes) of an entry. The derivatives of the part by log(p) and
    log(q) are -w p and w' q times the slopes. An entry that both models exclude may have NaN."""
    row: Any
    """(w, w', the greatest divergence) from the parameter."""
    exchanges: Any
    """True if the models change roles for a parameter above 1/2, which is then 1 - parameter."""

    @classmethod
    def of(cls, terms: Any = None, row: Any = None, exchanges: bool = False) -> "Divergence":
        # Triton 3.6 does not make constants of a tuple's fields.
        return cls(*map(tl.constexpr, (terms is None, terms, row, exchanges)))

    @property
    def cache_key(self) -> str:
        """Triton compiles a kernel again if this or the kernel's source is new."""
        return str([getattr(field.value, "cache_key", field.value) for field in self])


DIVERGENCES = {
    "kl": Divergence.of(),
    "jsd": Divergence.of(jsd_terms, jsd_row, exchanges=True),
    "tv": Divergence.of(tv_terms, tv_row),
    "skew": Divergence.of(skew_terms, skew_row),
}
"""Names of ``klfast.formulas.divergences.DIVERGENCES``."""


@triton.jit
def times(grad, value):
    """The product, or 0 if grad is 0, because the value may be infinite."""
    return tl.where(grad == 0, 0.0, grad * value)


@triton.jit
def gradient_row(
    value, slope, grad, of_lse, of_ref_lse, parameter, DIVERGENCE: tl.constexpr, ACC: tl.constexpr
):
    """For each model, a slope's factor, and the amount that its mean and the token subtract.

    ``grad`` is the incoming gradient of the divergence, and ``of_lse`` and ``of_ref_lse`` are those
    of the negative log-sum-exps, divided by the temperature.
    """
    if DIVERGENCE.is_kl:
        first_grad = grad
        first_mean = times(grad, value) + of_lse
        second_grad = grad
        second_mean = of_ref_lse
    else:
        first, second, _ = DIVERGENCE.row(parameter)
        first_grad = first * grad
        first_mean = of_lse - first * times(grad, slope)
        second_grad = second * grad
        # The mean under q of its slope follows from the other sums.
        second_mean = times(grad, value + first * slope) + of_ref_lse
    return first_grad.to(ACC), first_mean.to(ACC), second_grad.to(ACC), second_mean.to(ACC)


@triton.jit
def kl_gradients(x, y, exact, row):
    """``gradients_of`` for KL."""
    grad, mean, _, other = row
    p, q, u = probabilities(x, y, exact)
    # With an incoming gradient of 0, an infinite ratio must not give NaN.
    u = tl.where(grad == 0, 0.0, u)
    difference = difference_of(p, q, u)
    # An entry of probability 0 has no gradient, even if the other factor is infinite.
    by_x = tl.where(p == 0, 0.0, -p * tl.fma(grad, u, mean))
    return by_x, tl.fma(grad, difference, -other * q)


@triton.jit
def entropy_row(exact, lse, ratio, grad, value, ENTROPY: tl.constexpr, ACC: tl.constexpr):
    """The row for ``entropy_gradient``. The incoming gradient is divided by the temperature."""
    _, _, shift, factor, other_shift, other_factor, _, _, _ = exact
    if ENTROPY == "second":
        lse += ratio
        shift = other_shift
        factor = other_factor
    lost = shift.to(tl.float64) * LN2 - lse  # by rounding
    constant = tl.where(grad == 0, 0.0, grad * (value + lost))
    return shift, factor, (grad * LN2).to(ACC), constant.to(ACC)


@triton.jit
def entropy_gradient(logit, exact, row):
    """The entropy's gradient by an entry's logit, under the model that has the entropy."""
    shift, factor, slope, constant = row
    power = tl.fma(logit, exact[0], -shift)
    p = tl.exp2(power) * factor
    # An entry of probability 0 has no gradient, and its power may be -infinity.
    return tl.where(p == 0, 0.0, -p * tl.fma(power, slope, constant))


@triton.jit
def gradients_of(x, y, exact, mixture, row, DIVERGENCE: tl.constexpr):
    """The gradients of an entry by x and by y, without the terms of a sampled token.

    ``row`` comes from ``gradient_row``.
    """
    if DIVERGENCE.is_kl:
        by_x, by_y = kl_gradients(x, y, exact, row)
    else:
        first_grad, first_mean, second_grad, second_mean = row
        _, p, q, first_slope, second_slope = DIVERGENCE.terms(x, y, exact, mixture)
        # All others look excluded beside a logit of infinity. The means are then NaN, else finite.
        no_x, no_y = first_mean - first_mean, second_mean - second_mean
        by_x = tl.where(is_excluded(x), no_x, -p * tl.fma(first_grad, first_slope, first_mean))
        by_y = q * tl.fma(second_grad, second_slope, -second_mean)
        by_y = tl.where(is_excluded(y), no_y, by_y)
    return by_x, by_y
