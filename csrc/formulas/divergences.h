// The formulas over a vocabulary: the terms of a row's sums, the row's results, and the gradient of
// each logit. Host and device, for float and double, no torch.
//
// A word is an entry of the vocabulary. p = softmax(x), q = softmax(y), where x and y are logits
// over the temperature; u = log(q / p).
//
// Textbook sums of p (log p - log q) lose every digit as the models meet: at KL = 1e-6 fp32 gives
// noise. Here a row is summed against a guess: m near the greatest x, c near lse_y - lse_x. With
// u' = y - x - c and w = e^(x - m), and sums W of w, E of w u', D of w (e^u' - 1 - u'), where every
// term of D is >= 0 and comes from a series:
//   A = (D + E) / W = e^(lse_y - lse_x - c) - 1,    KL(p || q) = D / W + log(1 + A) - A.
// Far from 0, 1 + A is the sum of e^(y - m - c) over W, where W + D + E would cancel.
// The better the guess, the smaller A, and the less D / W and A - log(1 + A) cancel. passes.h says
// when a row is summed again from a better guess.
//
// The greatest of logits far from 0 leaves no digits for the log of their sum. Such a row has an
// origin, which is subtracted from its logits: every x below is `placed`, and every lse is that of
// placed logits.

#pragma once

#include <cmath>

#include "formulas/entropy.h"
#include "formulas/jsd_fit.h"
#include "formulas/passes.h"
#include "math/log_series.h"

namespace klfast::divergences {

using math::Base;
using math::kNats;
using math::Range;

// The origins of a row under each model: half its greatest logit, or 0 where that is near 0. With
// one model `second` is 0.
struct Origins {
  double first = 0;
  double second = 0;
};

// A row has an origin from 1,024 nats on. All logits within 512 nats of the greatest then lie
// within a factor of 2 of it, so that the subtraction rounds none of them.
KLFAST_HOST_DEVICE double origin_of(double greatest, double scale) {
  constexpr double kFar = 1024;
  return std::fabs(greatest * scale) > kFar ? greatest / 2 : 0.0;
}

// The factor of a row's logits: 1/2 where it has an origin, as the difference of two logits may be
// twice the largest number. Halving is exact. Both models of a row have one factor.
KLFAST_HOST_DEVICE double unit_of(const Origins& origins) {
  return origins.first == 0 && origins.second == 0 ? 1.0 : 0.5;
}

template <typename F>
KLFAST_HOST_DEVICE F placed(F x, math::Scalar<F> unit, math::Scalar<F> origin) {
  return math::fma(x, unit, -origin);
}

// The log-prob of a word; `scale` as the sums took it, before the unit.
template <Base base = Base::kE>
KLFAST_HOST_DEVICE double log_prob(double x, double scale, double unit, double origin, double lse) {
  return (placed(x, unit, origin) * (scale / unit) - lse) * kNats<base>;
}

// A number of nats in the base's unit. Not a division, which takes a device thirty instructions.
template <Base base>
KLFAST_HOST_DEVICE double in_units(double nats) {
  constexpr double kUnits = 1 / kNats<base>;
  return nats * kUnits;
}

// 1 / temperature / unit.
KLFAST_HOST_DEVICE double scale_of(double inverse_temperature, const Origins& origins) {
  return unit_of(origins) == 1 ? inverse_temperature : 2 * inverse_temperature;
}

// What an inverse temperature becomes in the sums: in the base's unit, and rounded.
template <typename Acc, Base base = Base::kE>
KLFAST_HOST_DEVICE double rounded_scale(double inverse_temperature) {
  return static_cast<double>(static_cast<Acc>(in_units<base>(inverse_temperature)));
}

// A guess in the arithmetic's type. Placed logits are multiplied by scale = 1 / temperature / unit,
// over the nats of the base. In base 2 that one factor serves the exponentials and the log-ratios,
// so that both round it alike; the log-sum-exps, too, are in bits.
template <typename Acc, Base base = Base::kE>
struct Guess {
  Acc scale;
  Acc first;  // m
  // The large part of c, before the temperature, as an offset of the logits that lie farther from
  // 0, which costs them no digit: of y, or, negated, of x. The other offset is 0.
  Acc first_offset;
  Acc second_offset;
  Acc ratio;        // the rest of c
  Acc second;       // m + c
  Acc second_rest;  // the rounding error of `second`: both exponentials must use the same c
};

// c, as the parts of a guess add up to it.
template <typename Acc, Base base>
KLFAST_HOST_DEVICE double ratio_of(const Guess<Acc, base>& guess) {
  const Acc offset = guess.second_offset - guess.first_offset;
  return static_cast<double>(offset) * static_cast<double>(guess.scale) +
         static_cast<double>(guess.ratio);
}

// `scale` is in nats, m and c are in the base's unit.
template <typename Acc, Base base = Base::kE>
KLFAST_HOST_DEVICE Guess<Acc, base> guess_of(double scale, double first, double ratio) {
  Guess<Acc, base> guess;
  guess.scale = static_cast<Acc>(in_units<base>(scale));
  guess.first = static_cast<Acc>(first);
  const double own_scale = guess.scale;
  const double apart = ratio / own_scale;
  const double offset = std::fabs(apart) < 2 ? 0.0 : std::rint(4 * apart) / 4;
  const bool second_carries = std::fabs(first + ratio) > std::fabs(first);
  guess.first_offset = static_cast<Acc>(second_carries ? 0.0 : -offset);
  guess.second_offset = static_cast<Acc>(second_carries ? offset : 0.0);
  const double carried = static_cast<double>(guess.second_offset - guess.first_offset);
  guess.ratio = static_cast<Acc>(ratio - carried * own_scale);
  const double second = static_cast<double>(guess.first) + ratio_of(guess);
  guess.second = static_cast<Acc>(second);
  guess.second_rest = static_cast<Acc>(second - static_cast<double>(guess.second));
  return guess;
}

// A guess from the greatest logits.
template <typename Acc, Base base = Base::kE>
KLFAST_HOST_DEVICE Guess<Acc, base> guess_of_greatest(double scale, const Origins& origins,
                                                      double first, double second) {
  const double unit = unit_of(origins);
  const double own_scale = rounded_scale<Acc, base>(scale / unit);
  const double top = placed(first, unit, origins.first);
  const double other_top = placed(second, unit, origins.second);
  // The ratio of equal models is exactly 0, whether or not the compiler fuses.
  return guess_of<Acc, base>(scale / unit, top * own_scale, (other_top - top) * own_scale);
}

// The number types F of the formulas over words: Acc, or a block of Acc (device/cpu/simd.h).

// A word's terms of the sums of one model.
template <typename F>
struct Word {
  F mass;    // w = e^(x - m)
  F moment;  // w (x - m), in the base's unit
};

template <Base base, typename F, typename Acc>
KLFAST_HOST_DEVICE Word<F> word_of(F x, Acc scale, Acc guess) {
  const F s = math::fma_of_exact_product(x, scale, -guess);
  const F mass = math::exp_term<base>(s);
  // A mass of 0 must not meet -infinity, which would make NaN. NaN itself stays.
  return {mass, mass * math::at_least(s, Acc(-1000))};
}

// The same in double, of the word that a row's sums leave out (log_prob_of_left_out). `s` is in the
// base's unit.
template <Base base = Base::kE>
KLFAST_HOST_DEVICE Word<double> left_out_word_of(double s) {
  const double mass = std::exp(s * kNats<base>);
  return {mass, mass * (s < -1000 ? -1000 : s)};
}

// A word's terms of the sums of two models.
template <typename F>
struct Pair {
  F mass;    // w
  F spread;  // w (e^u' - 1 - u')
  F slope;   // w u', in nats
  F other;   // e^(y - m - c); 0 from kNear, where it is the sum of the three above
  // Not 0 where q is 0 and p is not: the row's KL is infinite.
  typename math::Constants<F>::Bits excluded;
};

template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F log_ratio(F x, F y, const Guess<Acc, base>& guess) {
  const F difference = (y - guess.second_offset) - (x - guess.first_offset);
  return math::fma_of_exact_product(difference, guess.scale, -guess.ratio);
}

// Half of it, which is exact.
template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F half_log_ratio(F x, F y, const Guess<Acc, base>& guess) {
  constexpr Acc half = Acc(0.5);
  const F difference = (y - guess.second_offset) - (x - guess.first_offset);
  return math::fma_of_exact_product(difference, half * guess.scale, -half * guess.ratio);
}

// The log-ratio in nats, also where it has more bits than Acc has numbers for.
template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F log_ratio_in_nats(F x, F y, const Guess<Acc, base>& guess) {
  if constexpr (base == Base::kE) return log_ratio(x, y, guess);
  return Acc(2 * kNats<base>) * half_log_ratio(x, y, guess);
}

// x - m and y - m - c, in the base's unit.
template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F first_exponent(F x, const Guess<Acc, base>& guess) {
  return math::fma_of_exact_product(x, guess.scale, -guess.first);
}
template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F second_exponent(F y, const Guess<Acc, base>& guess) {
  return math::fma_of_exact_product(y, guess.scale, -guess.second) - guess.second_rest;
}

// e^(x - m) and e^(y - m - c).
template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F first_term(F x, const Guess<Acc, base>& guess) {
  return math::exp_term<base>(first_exponent(x, guess));
}
template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F second_term(F y, const Guess<Acc, base>& guess) {
  return math::exp_term<base>(second_exponent(y, guess));
}

// A number of the base's units in nats.
template <Base base, typename F>
KLFAST_HOST_DEVICE F nats(F units) {
  if constexpr (base == Base::kE) return units;
  return units * math::Scalar<F>(kNats<base>);
}

// e^u - 1 - u, for |u| of at most 1 nat.
template <Base base, typename F>
KLFAST_HOST_DEVICE F near_tail(F u) {
  return u * u * math::series<base>(u);
}

// A word of which |u| is at most 1 nat.
template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE Pair<F> near_pair_of(F x, F u, const Guess<Acc, base>& guess) {
  const F mass = first_term(x, guess);
  return {mass, mass * near_tail<base>(u), mass * nats<base>(u), F(0), {}};
}

// kNear promises |u| of at most 1 nat.
template <Range range, typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE Pair<F> pair_of(F x, F y, const Guess<Acc, base>& guess) {
  using math::select;
  const F u = log_ratio(x, y, guess);
  if constexpr (range == Range::kNear) return near_pair_of(x, u, guess);
  const F mass = first_term(x, guess);
  constexpr Acc infinity = math::Constants<Acc>::kInfinity;
  const auto near = math::is_near<base>(u);
  const F near_u = select(near, u, F(0));
  const F other = second_term(y, guess);
  // A word with p = q = 0 has u = NaN, and adds nothing. A NaN logit reaches `mass` or `other`.
  const auto nobody = (x == -infinity) & (y == -infinity);
  const auto excluded = (y == -infinity) & (x > -infinity);
  constexpr Acc largest = math::Constants<Acc>::kLargest;  // 0 times that is 0
  const F held = math::clamp(log_ratio_in_nats(x, y, guess), F(-largest), F(largest));
  const F slope = mass * select(nobody | excluded, F(0), held);
  const F far_spread = (other - mass) - slope;
  return {mass, select(near, mass * near_tail<base>(near_u), far_spread), slope, other, excluded};
}

// A word's term of a moment (entropy.h): the product of these. The exponent is in the base's unit,
// and finite, as a mass of 0 must not meet -infinity.
template <typename F>
struct MomentTerm {
  F mass;
  F exponent;
};

// The moment's term of either model for a word of which |u'| is at most 1 nat. `mass` is w. The
// second's, w e^u', is a product of its own: one shared with another sum a host compiler might fuse
// into that, or not, by whether an entropy is wanted.
template <EntropyOf of, typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE MomentTerm<F> near_moment_of(F mass, F x, F u, const Guess<Acc, base>& guess) {
  const F exponent = math::finite_below(first_exponent(x, guess));
  if constexpr (of == EntropyOf::kFirst) return {mass, exponent};
  const F growth = math::fma(u, Acc(kNats<base>) + u * math::series<base>(u), Acc(1));  // e^u'
  return {mass * growth, exponent + u};
}

// The same of any word.
template <EntropyOf of, typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE MomentTerm<F> moment_of(const Pair<F>& pair, F x, F y,
                                           const Guess<Acc, base>& guess) {
  if constexpr (of == EntropyOf::kFirst) {
    return {pair.mass, math::finite_below(first_exponent(x, guess))};
  }
  return {pair.other, math::finite_below(second_exponent(y, guess))};
}

// A model's entropy from the sums of its masses and of its moment.
template <Base base>
KLFAST_HOST_DEVICE double entropy_of_sums(double mass, double moment) {
  return entropy_of(std::log(mass), moment / mass * kNats<base>);
}

// Whether an entropy has lost digits to a guess that is far from the log of the row's sum.
KLFAST_HOST_DEVICE bool entropy_cancels(double mass, double entropy) {
  return std::fabs(std::log(mass)) > 4 * (1 + entropy);
}

// The sums over the words of a row.
struct PairSums {
  double mass = 0;
  double spread = 0;
  double slope = 0;
  double other = 0;
  bool excluded = false;
};

// The sums over all words: over near groups, whose `other` is not summed yet, plus over far ones.
KLFAST_HOST_DEVICE PairSums add(const PairSums& near, const PairSums& far) {
  return {near.mass + far.mass, near.spread + far.spread, near.slope + far.slope,
          (near.mass + near.spread + near.slope) + far.other, far.excluded};
}

// The results of a row of two models. lse and shift are in the unit of the guess.
struct PairRow {
  double kl;
  double lse;    // of x
  double shift;  // lse_y - lse_x
  passes::Verdict verdict;
  Origins origins;
};

// The bounds of a mass that passes.h takes as exact: of sums that tell whether a KL cancels, and of
// masses alone. Where one word is likely, a small JSD shows all that theirs round.
template <Base base>
inline constexpr double kMostMass = base == Base::kTwo ? passes::kMostInBits : passes::kMost;
template <Base base>
inline constexpr double kMostMassAlone = base == Base::kTwo ? 65536 : passes::kMost;

// A row that has a NaN, or no finite logit.
KLFAST_HOST_DEVICE PairRow nan_row() { return {NAN, NAN, NAN, passes::Verdict::kUseless, {}}; }

template <typename Acc, Base base>
KLFAST_HOST_DEVICE PairRow row_of(const PairSums& sums, const Guess<Acc, base>& guess,
                                  const Origins& origins) {
  constexpr double kCancellation = 16;  // roundings: 2e-6 in fp32 even if all point one way
  const double inverse = 1 / sums.mass;
  const auto mean = [&](double sum) { return base == Base::kE ? sum / sums.mass : sum * inverse; };
  const double a = mean(sums.spread + sums.slope);
  const double spread = mean(sums.spread);
  const double slope = mean(std::fabs(sums.slope));
  const double total = mean(sums.other);
  const bool far = std::fabs(spread) + slope > 0.5;  // 1 + a has fewer digits than total
  const double log_total = far ? std::log(total) : std::log1p(a);
  const double kl = spread + (log_total - a);
  const double cancelled = far ? 1 + slope : spread + std::fabs(a) * (slope + spread);
  const bool cancels = !(cancelled <= kCancellation * kl || sums.excluded || spread == 0);
  PairRow row;
  row.origins = origins;
  row.verdict = passes::verdict_of(sums.mass, total, cancels, kMostMass<base>);
  row.kl = kl < 0 ? 0 : kl;
  // A NaN logit makes the sums useless. In other sums a KL of NaN comes from two of them beyond
  // Acc's range.
  const bool is_useless = row.verdict == passes::Verdict::kUseless;
  if (!is_useless && (sums.excluded || kl != kl)) row.kl = INFINITY;
  row.lse = static_cast<double>(guess.first) + in_units<base>(std::log(sums.mass));
  row.shift = ratio_of(guess) + in_units<base>(log_total);
  return row;
}

// The same from the two masses alone, without a KL: the sums of e^(x - m) and e^(y - second).
template <typename Acc, Base base>
KLFAST_HOST_DEVICE PairRow row_of_masses(double mass, double other, const Guess<Acc, base>& guess,
                                         const Origins& origins) {
  PairRow row = nan_row();
  const double total = other / mass;
  row.origins = origins;
  row.verdict = passes::verdict_of(mass, total, false, kMostMassAlone<base>);
  row.lse = static_cast<double>(guess.first) + in_units<base>(std::log(mass));
  const double apart = static_cast<double>(guess.second) - static_cast<double>(guess.first);
  row.shift = apart + in_units<base>(std::log(total));
  return row;
}

// e^x of a small x, which may be large where logits are.
template <Base base>
KLFAST_HOST_DEVICE double exp_of_rest(double x) {
  if constexpr (base == Base::kTwo) {  // one thread computes it while others wait
    if (std::fabs(x) < 1e-4) return 1 + x * (1 + x * (0.5 + x * (1.0 / 6)));
  }
  return std::exp(x);
}

// The factor of every probability that makes good the rounding of lse to a guess.
template <typename Acc, Base base>
KLFAST_HOST_DEVICE double rest_of(const Guess<Acc, base>& exact, double lse) {
  return exp_of_rest<base>(nats<base>(static_cast<double>(exact.first) - lse));
}

// The further factor of the second model's. In base 2 alone, where the ratio's rounding is coarser.
template <typename Acc, Base base>
KLFAST_HOST_DEVICE double rest_of_second(const Guess<Acc, base>& exact, double shift) {
  if constexpr (base == Base::kE) return 1;
  return exp_of_rest<base>(nats<base>(ratio_of(exact) - shift));
}

// A word's term of JSD_b = (1 - b) KL(p || m) + b KL(q || m), m = (1 - b) p + b q, b <= 1/2. For
// larger b the models change roles.
//
// With L = log(m / p) = log(1 + a), a = b (e^u - 1), and W = log(q / m) = u - L it is
// b q W - (1 - b) p L. Near u = 0 the two cancel: there it is p (b g(u) - h(a)), where
// g(u) = u e^u - (e^u - 1) and h(a) = (1 + a) log(1 + a) - a have double roots at 0.
template <typename F>
struct JsdWord {
  F value;  // the term
  F p;      // the probabilities
  F q;
  F log_m_over_p;
  F log_q_over_m;
};

// The weights b and 1 - b, each rounded by itself, so that the smaller keeps its digits.
template <typename Acc>
struct Mixture {
  Acc smaller;
  Acc larger;
  bool swaps;  // b > 1/2
};

template <typename Acc>
KLFAST_HOST_DEVICE Mixture<Acc> mixture_of(double b) {
  const bool swaps = b > 0.5;
  return {static_cast<Acc>(swaps ? 1 - b : b), static_cast<Acc>(swaps ? b : 1 - b), swaps};
}

// Without kMayBeNear the word's |u| must be more than 1 nat.
template <bool kMayBeNear = true, typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE JsdWord<F> jsd_word_of(F x, F y, const Guess<Acc, base>& exact,
                                          const Mixture<Acc>& mixture) {
  using math::select;
  constexpr Acc infinity = math::Constants<Acc>::kInfinity;
  const F p = first_term(x, exact);
  const F q = second_term(y, exact);
  const bool swaps = mixture.swaps;
  const F front = select(swaps, q, p);
  const F back = select(swaps, p, q);
  const F ratio = nats<base>(log_ratio(x, y, exact));
  // Beyond 80 nats the smaller of p and q adds nothing, and the logarithm has its limit.
  const F u = math::clamp(select(swaps, -ratio, ratio), F(-80), F(80));
  const auto near = math::is_near(kMayBeNear ? u : F(2));
  const F near_u = select(near, u, F(0));
  const F tail = math::expm1_minus_argument<Range::kNear>(near_u);
  const F em1 = select(near, near_u + tail, math::exp_term(u) - Acc(1));
  const F a = mixture.smaller * em1;
  const math::Log1p<F> log = math::log1p(a);
  const F log_m_over_front = log.value();
  const F log_back_over_m = log.subtracted_from(u);
  const F g = math::fma(near_u, em1, -tail);
  const F h = math::fma(Acc(1) + a, log.minus_argument, a * a);
  const F near_value = front * math::fma(mixture.smaller, g, -h);
  const F far_value =
      mixture.smaller * back * log_back_over_m - mixture.larger * front * log_m_over_front;
  // A word with p = q = 0 has u = NaN, and adds nothing.
  const auto nobody = (x == -infinity) & (y == -infinity);
  return {select(nobody, F(0), select(near, near_value, far_value)), p, q,
          select(nobody, F(0), select(swaps, -log_back_over_m, log_m_over_front)),
          select(nobody, F(0), select(swaps, -log_m_over_front, log_back_over_m))};
}

// The same in base 2 from the polynomials of a launch (jsd_fit.h), where the word is near. Its bits
// do not depend on whether the words beside it are near, too: jsd_fit.h's terms are all that a
// chunk of near words takes.
template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE JsdWord<F> fitted_jsd_word_of(F x, F y, const Guess<Acc, base>& exact,
                                                 const Mixture<Acc>& mixture, const JsdFit& fit) {
  using math::select;
  if constexpr (base == Base::kE) {
    return jsd_word_of(x, y, exact, mixture);
  } else {
    const JsdWord<F> far = jsd_word_of<false>(x, y, exact, mixture);
    const F ratio = log_ratio(x, y, exact);
    const auto near = math::is_near<base>(ratio);
    const F u = select(near, ratio, F(0));
    return {select(near, far.p * u * (u * polynomial(fit.value, u)), far.value), far.p, far.q,
            select(near, u * polynomial(fit.log_m_over_p, u), far.log_m_over_p),
            select(near, u * polynomial(fit.log_q_over_m, u), far.log_q_over_m)};
  }
}

// A row's JSD from its sums over a guess of the shift that is off by e, as far as that shows. `sum`
// is the sum of the terms, `slope` the mean under p of log(m / p): where all u are small,
//   sum = JSD + b (1 - b) e^2 / 2,    slope = b e - b / (1 - b) sum.
// What is left of nothing but rounding is 0.
KLFAST_HOST_DEVICE double without_offset(double sum, double slope, double b) {
  constexpr double kSmall = 1e-7;  // mean of u^2, beyond which e^2 does not show
  constexpr double kRounding = 4e-6;
  const double half_square = sum / (b * (1 - b));
  if (!(2 * half_square < kSmall)) return sum;
  const double offset = slope / b + b * half_square;
  const double rest = half_square - 0.5 * offset * offset;
  return rest > kRounding * half_square ? b * (1 - b) * rest : 0;
}

// A row's JSD: its sum, limited to [0, entropy of the weights], which rounding may have left. NaN
// stays.
KLFAST_HOST_DEVICE double jsd_of(double sum, double b) {
  const double most = -(b * std::log(b) + (1 - b) * std::log1p(-b));
  if (sum < 0) return 0;
  return sum > most ? most : sum;
}

// The constants of a row's gradients, computed once a row.
template <typename Acc, Base base = Base::kE>
struct RowGradient {
  Guess<Acc, base> exact;
  Mixture<Acc> mixture;
  Acc first;  // over KL's u in the base's unit
  Acc first_constant;
  Acc second;
  Acc second_constant;
};

// The results of a row's forward, and the incoming gradients over the temperature: of the row's
// divergence, and of its target token's log-probs and its log-sum-exps under either model.
struct RowState {
  double value;
  double lse;
  double shift;
  double slope;  // for JSD: the mean under p of log(m / p)
  Origins origins;
  double grad;
  double grad_logprob;
  double grad_ref_logprob;
  double grad_lse = 0;
  double grad_ref_lse = 0;
};

template <typename Acc, Base base>
KLFAST_HOST_DEVICE RowGradient<Acc, base> gradient_of(bool is_kl, const Guess<Acc, base>& exact,
                                                      double beta, const RowState& row) {
  const double rest = rest_of(exact, row.lse);
  const double second_rest = rest * rest_of_second(exact, row.shift);
  const double g = row.grad;
  // A log-prob falls by its word's log-sum-exp.
  const double of_lse = row.grad_logprob - row.grad_lse;
  const double of_ref_lse = row.grad_ref_logprob - row.grad_ref_lse;
  if (is_kl) {
    const double mean = g == 0 ? 0 : g * row.value;  // the value may be infinite
    return {exact,
            mixture_of<Acc>(beta),
            static_cast<Acc>(nats<base>(g * rest)),
            static_cast<Acc>((mean + of_lse) * rest),
            static_cast<Acc>(g * rest),
            static_cast<Acc>(of_ref_lse * second_rest)};
  }
  const double other_slope = (row.value + (1 - beta) * row.slope) / beta;  // under q, of log(q / m)
  return {exact,
          mixture_of<Acc>(beta),
          static_cast<Acc>((1 - beta) * g * rest),
          static_cast<Acc>((of_lse - (1 - beta) * g * row.slope) * rest),
          static_cast<Acc>(beta * g * second_rest),
          static_cast<Acc>((beta * g * other_slope + of_ref_lse) * second_rest)};
}

// The gradients of a word's logits, but for the target's own addition. A word without probability
// has gradient 0, even where its log-ratio is infinite.
template <typename F>
struct WordGradients {
  F first;
  F second;
};

// KL's, where u is finite.
template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F kl_gradient_of_first(F p, F u, const RowGradient<Acc, base>& row) {
  const F slope = math::fma(row.first, u, row.first_constant);
  if constexpr (base == Base::kE) return -p * slope;
  return math::fma(-p, slope, Acc(0));  // +0 rather than -0, as where p is 0 and not multiplied
}

// The same bits, also where u has more bits than Acc has numbers for.
template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F kl_gradient_of_first(F p, F x, F y, F u, const RowGradient<Acc, base>& row) {
  if constexpr (base == Base::kE) {
    return kl_gradient_of_first(p, u, row);
  } else {
    const F half = math::select(row.first == Acc(0), F(0), half_log_ratio(x, y, row.exact));
    return math::fma(-p, math::fma(2 * row.first, half, row.first_constant), Acc(0));
  }
}

// KL's, where |u| is at most 1 nat.
template <Base base, typename F>
KLFAST_HOST_DEVICE F near_difference(F p, F u) {  // q - p
  return p * (nats<base>(u) + near_tail<base>(u));
}
template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F kl_gradient_of_second(F difference, F q, const RowGradient<Acc, base>& row) {
  return math::fma(row.second, difference, -row.second_constant * q);
}

template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE WordGradients<F> kl_gradients(F x, F y, const RowGradient<Acc, base>& row) {
  using math::select;
  const Guess<Acc, base>& exact = row.exact;
  // An incoming gradient of 0 must not meet an infinite ratio, which would make NaN.
  const F u = select(row.first == Acc(0), F(0), log_ratio(x, y, exact));
  const auto near = math::is_near<base>(u);
  const F near_u = select(near, u, F(0));
  const F p = first_term(x, exact);
  const F q = second_term(y, exact);
  const F difference = select(near, near_difference<base>(p, near_u), q - p);
  return {select(p == F(0), F(0), kl_gradient_of_first(p, x, y, u, row)),
          kl_gradient_of_second(difference, q, row)};
}

template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE WordGradients<F> jsd_gradients(const JsdWord<F>& word, F x, F y,
                                                  const RowGradient<Acc, base>& row) {
  using math::select;
  constexpr Acc infinity = math::Constants<Acc>::kInfinity;
  const F first = math::fma(row.first, word.log_m_over_p, row.first_constant);
  const F second = math::fma(row.second, word.log_q_over_m, -row.second_constant);
  return {select(x == -infinity, F(0), -word.p * first),
          select(y == -infinity, F(0), word.q * second)};
}

// The constants of the gradient of one of two models' entropy, computed once a row. A word's is
// -e^s (slope s + constant), where s is its exponent against the exact guess.
template <typename Acc>
struct EntropyGradient {
  Acc slope;
  Acc constant;
};

// `grad` is the entropy's incoming gradient over the temperature.
template <typename Acc, Base base>
KLFAST_HOST_DEVICE EntropyGradient<Acc> entropy_gradient_of(const Guess<Acc, base>& exact,
                                                            double lse, double shift, EntropyOf of,
                                                            double entropy, double grad) {
  double lost = static_cast<double>(exact.first) - lse;  // by the guess's rounding
  if (of == EntropyOf::kSecond) lost += ratio_of(exact) - shift;
  lost = nats<base>(lost);
  const double rest = exp_of_rest<base>(lost) * grad;
  const double mean = grad == 0 ? 0 : rest * (entropy + lost);  // the entropy may be NaN
  return {static_cast<Acc>(nats<base>(rest)), static_cast<Acc>(mean)};
}

// The entropy's gradient to a word's logit, of the model whose entropy it is; 0 for a word without
// probability.
template <EntropyOf of, typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F entropy_gradient(F x, F y, const Guess<Acc, base>& exact,
                                      const EntropyGradient<Acc>& row) {
  const F s = of == EntropyOf::kFirst ? first_exponent(x, exact) : second_exponent(y, exact);
  const F p = math::exp_term<base>(s);
  const F gradient = -p * math::fma(row.slope, math::finite_below(s), row.constant);
  return math::select(p == F(0), F(0), gradient);
}

// The constants of the gradients of a row's log-prob (a) and entropy (h), computed once a row. Both
// incoming gradients are over the temperature.
template <typename Acc>
struct TokenRow {
  Acc scale;
  Acc lse;
  Acc logprob;
  Acc entropy;
  Acc mean;  // minus the mean of log p, for the rounded lse
};

// `scale`, `lse` and `entropy` are in nats, the constants in the base's unit.
template <typename Acc, Base base>
KLFAST_HOST_DEVICE TokenRow<Acc> token_row_of(double scale, double lse, double a, double h,
                                              double entropy) {
  TokenRow<Acc> row;
  row.scale = static_cast<Acc>(in_units<base>(scale));
  row.lse = static_cast<Acc>(in_units<base>(lse));
  const double lost = nats<base>(static_cast<double>(row.lse)) - lse;
  const double rest = std::exp(lost);
  row.logprob = static_cast<Acc>(a * rest);
  row.entropy = static_cast<Acc>(nats<base>(h * rest));
  row.mean = static_cast<Acc>(in_units<base>(entropy + lost));
  return row;
}

// The gradient of a word's logit, but for the target's own addition. A word without probability has
// gradient 0.
template <Base base, typename F, typename Acc>
KLFAST_HOST_DEVICE F token_gradient(F x, const TokenRow<Acc>& row) {
  const F log_p = math::fma_of_exact_product(x, row.scale, -row.lse);
  const F p = math::exp_term<base>(log_p);
  const F gradient = -p * math::fma(row.entropy, log_p + row.mean, row.logprob);
  return math::select(p == F(0), F(0), gradient);
}

// The gradient of the logit of a word whose log-prob is a result: `own` is the incoming gradient of
// this log-prob, `all` the sum over the row's less that of its log-sum-exp, `h` that of the
// entropy, all over the temperature. 1 - p is taken of log p: it keeps its digits where p is
// nearly 1.
KLFAST_HOST_DEVICE double pick_gradient(double log_p, double own, double all, double h,
                                        double entropy) {
  const double p = std::exp(log_p);
  const double of_logprobs = -own * std::expm1(log_p) - (all - own) * p;
  return p == 0 || h == 0 ? of_logprobs : of_logprobs - h * p * (log_p + entropy);
}

}  // namespace klfast::divergences
