// The formulas over a vocabulary: the terms of a row's sums, the row's results, and the gradient of
// each logit. Host and device, for float and double, no torch.
//
// A word is an entry of the vocabulary. p = softmax(x) and q = softmax(y), where x and y are logits
// over the temperature. u = log(q / p).
//
// The textbook sum of p (log p - log q) loses every digit if the models are nearly equal. At a KL
// of 1e-6 fp32 gives noise. Here a row is summed against a guess, with m near the greatest x and c
// near lse_y - lse_x. Let u' = y - x - c and w = e^(x - m). A row has the sums
//   W of w,    E of w u',    D of w (e^u' - 1 - u').
// Every term of D is >= 0 and comes from a series. The results are
//   A = (D + E) / W = e^(lse_y - lse_x - c) - 1,    KL(p || q) = D / W + log(1 + A) - A.
// If u' is far from 0, W + D + E would cancel. 1 + A is then the sum of e^(y - m - c), divided by
// W.
//
// A better guess has a smaller A, and D / W and A - log(1 + A) then cancel less. passes.h says when
// a row is summed again from a better guess.
//
// If logits are far from 0, the log of a sum loses its digits when the greatest logit is added to
// it. Such a row has an origin, which is subtracted from its logits. Every x below is `placed` in
// this way, and every lse is the log-sum-exp of placed logits.

#pragma once

#include <cmath>

#include "formulas/entropy.h"
#include "formulas/fit.h"
#include "formulas/list.h"
#include "formulas/passes.h"
#include "math/log_series.h"

namespace klfast::divergences {

using math::Base;
using math::kNats;
using math::Range;

// The origins of a row, one per model. An origin is half of the row's greatest logit, or 0 if that
// logit is near 0. With one model `second` is 0.
struct Origins {
  double first = 0;
  double second = 0;
};

// A row has an origin if its greatest logit is more than 1,024 nats from 0. All logits within 512
// nats of the greatest are then within a factor of 2 of it, so the subtraction rounds none of them.
KLFAST_HOST_DEVICE double origin_of(double greatest, double scale) {
  constexpr double kFar = 1024;
  return std::fabs(greatest * scale) > kFar ? greatest / 2 : 0.0;
}

// The factor of a row's logits. It is 1/2 if the row has an origin, because the difference of two
// logits may be twice the largest number. Halving is exact. Both models of a row have the same
// factor.
KLFAST_HOST_DEVICE double unit_of(const Origins& origins) {
  return origins.first == 0 && origins.second == 0 ? 1.0 : 0.5;
}

template <typename F>
KLFAST_HOST_DEVICE F placed(F x, math::Scalar<F> unit, math::Scalar<F> origin) {
  return math::fma(x, unit, -origin);
}

// The log-prob of a word, never above 0. `scale` is the scale of the sums, before it is divided by
// the unit. The log-sum-exp is `lse`, in the base's unit, plus `rest`, in nats. The two are
// subtracted one after the other, because their sum would be rounded. The log-prob of a confident
// token may be far smaller than this rounding error.
template <Base base = Base::kE>
KLFAST_HOST_DEVICE double log_prob(double x, double scale, double unit, double origin, double lse,
                                   double rest = 0) {
  const double found = (placed(x, unit, origin) * (scale / unit) - lse) * kNats<base> - rest;
  return found > 0 ? 0 : found;  // NaN stays NaN
}

// Converts nats to the base's unit. This is not a division, which takes thirty instructions on a
// device.
template <Base base>
KLFAST_HOST_DEVICE double in_units(double nats) {
  constexpr double kUnits = 1 / kNats<base>;
  return nats * kUnits;
}

// 1 / temperature / unit.
KLFAST_HOST_DEVICE double scale_of(double inverse_temperature, const Origins& origins) {
  return unit_of(origins) == 1 ? inverse_temperature : 2 * inverse_temperature;
}

// The inverse temperature as the sums use it. It is in the base's unit and rounded.
template <typename Acc, Base base = Base::kE>
KLFAST_HOST_DEVICE double rounded_scale(double inverse_temperature) {
  return static_cast<double>(static_cast<Acc>(in_units<base>(inverse_temperature)));
}

// A guess in the arithmetic's type. `scale`, the factor of placed logits, is 1 / (temperature *
// unit * kNats). In base 2 this one factor serves the exponentials and the log-ratios, so both
// round it alike. The log-sum-exps are in bits, too.
template <typename Acc, Base base = Base::kE>
struct Guess {
  Acc scale;
  Acc first;  // m
  // The large part of c, before the temperature. It is an offset of the logits that are farther
  // from 0, because it costs them no digit. An offset of x is negated. The other offset is 0.
  Acc first_offset;
  Acc second_offset;
  Acc ratio;        // the rest of c
  Acc second;       // m + c
  Acc second_rest;  // the rounding error of `second`, as both exponentials must use the same c
};

// c, as the sum of its parts in a guess.
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

// The number type F of the formulas over words is Acc, or a block of Acc (device/cpu/simd.h).

// A word's terms in the sums of one model.
template <typename F>
struct Word {
  F mass;    // w = e^(x - m)
  F moment;  // w (x - m), in the base's unit
};

template <Base base, typename F, typename Acc>
KLFAST_HOST_DEVICE Word<F> word_of(F x, Acc scale, Acc guess) {
  const F s = math::fma_of_exact_product(x, scale, -guess);
  const F mass = math::exp_term<base>(s);
  // -infinity is limited, because its product with a mass of 0 would be NaN. NaN itself stays.
  return {mass, mass * math::at_least(s, Acc(-1000))};
}

// The same in double, for the word that a row's sums leave out. `s` is in the base's unit.
template <Base base = Base::kE>
KLFAST_HOST_DEVICE Word<double> left_out_word_of(double s) {
  const double mass = std::exp(s * kNats<base>);
  return {mass, mass * (s < -1000 ? -1000 : s)};
}

// A word's terms in the sums of two models.
template <typename F>
struct Pair {
  F mass;    // w
  F spread;  // w (e^u' - 1 - u')
  F slope;   // w u', in nats
  F other;   // e^(y - m - c)
  // Not 0 if q is 0 and p is not. The row's KL is then infinite.
  typename math::Constants<F>::Bits excluded;
};

template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F log_ratio(F x, F y, const Guess<Acc, base>& guess) {
  const F difference = (y - guess.second_offset) - (x - guess.first_offset);
  return math::fma_of_exact_product(difference, guess.scale, -guess.ratio);
}

// Half of the log-ratio. Halving is exact.
template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F half_log_ratio(F x, F y, const Guess<Acc, base>& guess) {
  constexpr Acc half = Acc(0.5);
  const F difference = (y - guess.second_offset) - (x - guess.first_offset);
  return math::fma_of_exact_product(difference, half * guess.scale, -half * guess.ratio);
}

// The log-ratio in nats. It is right even if the log-ratio in bits is beyond Acc's range.
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

// Converts a number in the base's unit to nats.
template <Base base, typename F>
KLFAST_HOST_DEVICE F nats(F units) {
  if constexpr (base == Base::kE) return units;
  return units * math::Scalar<F>(kNats<base>);
}

// e^u - 1 - u. |u| must be at most 1 nat.
template <Base base, typename F>
KLFAST_HOST_DEVICE F near_tail(F u) {
  return u * u * math::series<base>(u);
}

// q - p. |u| must be at most 1 nat.
template <Base base, typename F>
KLFAST_HOST_DEVICE F near_difference(F p, F u) {
  return p * (nats<base>(u) + near_tail<base>(u));
}

template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE Pair<F> pair_of(F x, F y, const Guess<Acc, base>& guess) {
  using math::select;
  const F u = log_ratio(x, y, guess);
  const F mass = first_term(x, guess);
  constexpr Acc infinity = math::Constants<Acc>::kInfinity;
  const auto near = math::is_near<base>(u);
  const F near_u = select(near, u, F(0));
  const F other = second_term(y, guess);
  // A word with p = q = 0 has u = NaN, and adds nothing. A NaN logit reaches `mass` or `other`.
  const auto nobody = (x == -infinity) & (y == -infinity);
  const auto excluded = (y == -infinity) & (x > -infinity);
  constexpr Acc largest = math::Constants<Acc>::kLargest;  // 0 times this is 0
  const F held = math::clamp(log_ratio_in_nats(x, y, guess), F(-largest), F(largest));
  const F slope = mass * select(nobody | excluded, F(0), held);
  const F far_spread = (other - mass) - slope;
  return {mass, select(near, mass * near_tail<base>(near_u), far_spread), slope, other, excluded};
}

// A word's term in a moment (entropy.h) is the product of these. The exponent is in the base's
// unit. It is finite, because a mass of 0 times -infinity would be NaN.
template <typename F>
struct MomentTerm {
  F mass;
  F exponent;
};

// The term in either model's moment, for a word whose |u'| is at most 1 nat. `mass` is w. The
// second model's mass w e^u' is a product of its own. If another sum shared this product, a host
// compiler might fuse it into that sum or not, depending on whether an entropy is wanted.
template <EntropyOf of, typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE MomentTerm<F> near_moment_of(F mass, F x, F u, const Guess<Acc, base>& guess) {
  const F exponent = math::finite_below(first_exponent(x, guess));
  if constexpr (of == EntropyOf::kFirst) return {mass, exponent};
  const F growth = math::fma(u, Acc(kNats<base>) + u * math::series<base>(u), Acc(1));  // e^u'
  return {mass * growth, exponent + u};
}

// The same for any word.
template <EntropyOf of, typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE MomentTerm<F> moment_of(const Pair<F>& pair, F x, F y,
                                           const Guess<Acc, base>& guess) {
  if constexpr (of == EntropyOf::kFirst) {
    return {pair.mass, math::finite_below(first_exponent(x, guess))};
  }
  return {pair.other, math::finite_below(second_exponent(y, guess))};
}

// A model's entropy, from the sum of its masses and from its moment.
template <Base base>
KLFAST_HOST_DEVICE double entropy_of_sums(double mass, double moment) {
  return entropy_of(std::log(mass), moment / mass * kNats<base>);
}

// True if an entropy has lost digits because the guess is far from the log of the row's sum.
KLFAST_HOST_DEVICE bool entropy_cancels(double mass, double entropy) {
  return std::fabs(std::log(mass)) > 4 * (1 + entropy);
}

// A row's sums of the terms in Pair.
struct PairSums {
  double mass = 0;
  double spread = 0;
  double slope = 0;
  double other = 0;
  bool excluded = false;
};

// Adds the sums over near groups and the sums over far groups. The near sums have no `other` yet.
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

// The bounds below which passes.h takes a mass as exact. kMostMass is for sums that also say
// whether a KL cancels, and kMostMassAlone is for masses alone. If one word is likely, a small JSD
// shows every rounding of the masses.
template <Base base>
inline constexpr double kMostMass = base == Base::kTwo ? passes::kMostInBits : passes::kMost;
template <Base base>
inline constexpr double kMostMassAlone = base == Base::kTwo ? 65536 : passes::kMost;

// The results of a row that has a NaN or no finite logit.
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
  row.verdict = passes::verdict_of(sums.mass, sums.other, cancels, kMostMass<base>);
  row.kl = kl < 0 ? 0 : kl;
  // A NaN logit makes the sums useless. If the sums are not useless, a KL is NaN because two of
  // them are beyond Acc's range.
  const bool is_useless = row.verdict == passes::Verdict::kUseless;
  if (!is_useless && (sums.excluded || kl != kl)) row.kl = INFINITY;
  row.lse = static_cast<double>(guess.first) + in_units<base>(std::log(sums.mass));
  row.shift = ratio_of(guess) + in_units<base>(log_total);
  return row;
}

// The same without a KL, from the two masses alone. `mass` is the sum of e^(x - m), and `other` is
// the sum of e^(y - second).
template <typename Acc, Base base>
KLFAST_HOST_DEVICE PairRow row_of_masses(double mass, double other, const Guess<Acc, base>& guess,
                                         const Origins& origins) {
  PairRow row = nan_row();
  const double total = other / mass;
  row.origins = origins;
  row.verdict = passes::verdict_of(mass, other, false, kMostMassAlone<base>);
  row.lse = static_cast<double>(guess.first) + in_units<base>(std::log(mass));
  const double apart = static_cast<double>(guess.second) - static_cast<double>(guess.first);
  row.shift = apart + in_units<base>(std::log(total));
  return row;
}

// e^x for an x that is small, unless the logits are large.
template <Base base>
KLFAST_HOST_DEVICE double exp_of_rest(double x) {
  if constexpr (base == Base::kTwo) {  // one thread computes it while others wait
    if (std::fabs(x) < 1e-4) return 1 + x * (1 + x * (0.5 + x * (1.0 / 6)));
  }
  return std::exp(x);
}

// A factor of every probability. It corrects the rounding of lse to a guess.
template <typename Acc, Base base>
KLFAST_HOST_DEVICE double rest_of(const Guess<Acc, base>& exact, double lse) {
  return exp_of_rest<base>(nats<base>(static_cast<double>(exact.first) - lse));
}

// A second factor of the second model's probabilities. It corrects the rounding of the ratio. Only
// base 2 needs it, because the rounding is coarser there.
template <typename Acc, Base base>
KLFAST_HOST_DEVICE double rest_of_second(const Guess<Acc, base>& exact, double shift) {
  if constexpr (base == Base::kE) return 1;
  return exp_of_rest<base>(nats<base>(ratio_of(exact) - shift));
}

// The divergences other than a KL are sums of d(p, q), which is homogeneous of degree 1, as every
// f-divergence is. They need a second pass, which starts from the exact lse and shift of the first.
// With the slopes dd/dp = -weight_first of_first and dd/dq = weight_second of_second, a word has
// the terms of PairWord. One sum besides the value serves both gradients, because by Euler's
// theorem
//   D = weight_second (the mean under q of of_second) - weight_first (the mean under p of
//   of_first).
template <typename F>
struct PairWord {
  F value;  // the term
  F p;
  F q;
  F of_first;
  F of_second;
};

// The weights of two models in their mixture m. Each is rounded by itself, so the smaller one keeps
// its digits.
template <typename Acc>
struct Mixture {
  Acc smaller;
  Acc larger;
  bool swaps;  // the second model has the larger weight
  // The part of the shift that the guess lost by rounding, in the base's unit. It shows in
  // log-ratios near 0.
  Acc rest;
};

template <typename Acc>
KLFAST_HOST_DEVICE Mixture<Acc> mixture_of(double first, double second, double rest = 0) {
  const bool swaps = second > first;
  return {static_cast<Acc>(swaps ? first : second), static_cast<Acc>(swaps ? second : first), swaps,
          static_cast<Acc>(rest)};
}

// A word's term in JSD_b = (1 - b) KL(p || m) + b KL(q || m), where m = (1 - b) p + b q. b is at
// most 1/2. For a larger b the models change roles.
//
// Let a = b (e^u - 1), L = log(m / p) = log(1 + a) and W = log(q / m) = u - L. The term is
//   b q W - (1 - b) p L.
// Near u = 0 its two parts cancel. It is then computed as
//   p (b g(u) - h(a)).
// The functions g(u) = u e^u - (e^u - 1) and h(a) = (1 + a) log(1 + a) - a have double roots at 0.
//
// If kMayBeNear is false, the word's |u| must be more than 1 nat. of_first is L, of_second is W.
template <bool kMayBeNear = true, typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE PairWord<F> jsd_word_of(F x, F y, const Guess<Acc, base>& exact,
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

// Corrects a row's JSD for a guess of the shift that is off by e. `sum` is the sum of the terms,
// and `slope` is the mean under p of log(m / p). If all u are small,
//   sum = JSD + b (1 - b) e^2 / 2,    slope = b e - b / (1 - b) sum.
// If they are not small, e does not show in the sum. A result that is only rounding becomes 0.
KLFAST_HOST_DEVICE double without_offset(double sum, double slope, double b) {
  constexpr double kSmall = 1e-7;  // the mean of u^2 beyond which e^2 does not show
  constexpr double kRounding = 4e-6;
  const double half_square = sum / (b * (1 - b));
  if (!(2 * half_square < kSmall)) return sum;
  const double offset = slope / b + b * half_square;
  const double rest = half_square - 0.5 * offset * offset;
  return rest > kRounding * half_square ? b * (1 - b) * rest : 0;
}

// A row's JSD. It is the sum, limited to [0, entropy of the weights], because rounding may exceed
// these bounds. NaN stays NaN.
KLFAST_HOST_DEVICE double jsd_of(double sum, double b) {
  const double most = -(b * std::log(b) + (1 - b) * std::log1p(-b));
  if (sum < 0) return 0;
  return sum > most ? most : sum;
}

// ------------------------------------------------------------ the table of divergences
//
// A row has
//   name                 as in klfast.formulas.divergences.DIVERGENCES
//   kPolicyIsFirst       whether the first model is always the policy, whose entropy may be wanted
//   kHasRest             whether the shift must have a KL's digits. Log-ratios are then corrected
//   by
//                        Mixture::rest
// and a row but Kl has
//   weight_of_first, weight_of_second   of the slopes in PairWord
//   mixture, fit         constants of a row of logits, and of a launch
//   word_of              PairWord from logits. If kMayBeNear is false, |u| is more than 1 nat
//   near_value, near_slope, near_first, near_second
//                        value, p of_first, of_first and of_second from p and u in bits, near
//   value_of             a row's value from its sums

// KL(p || q). It needs no second pass: row_of() has its value, and kl_gradients() its gradients.
struct Kl {
  static constexpr const char* name = "kl";
  static constexpr bool kIsKl = true;
  static constexpr bool kPolicyIsFirst = false;
  static constexpr bool kHasRest = true;
};

// The near terms of a divergence whose near terms are polynomials.
struct Fitted {
  static constexpr bool kIsKl = false;

  template <typename F>
  KLFAST_HOST_DEVICE static F near_value(F p, F u, const Fit& fit) {
    return p * u * (u * polynomial(fit.value, u));
  }
  template <typename F>
  KLFAST_HOST_DEVICE static F near_slope(F p, F u, const Fit& fit) {
    return p * u * polynomial(fit.of_first, u);
  }
  template <typename F>
  KLFAST_HOST_DEVICE static F near_first(F u, const Fit& fit) {
    return u * polynomial(fit.of_first, u);
  }
  template <typename F>
  KLFAST_HOST_DEVICE static F near_second(F u, const Fit& fit) {
    return u * polynomial(fit.of_second, u);
  }
};

// (1 - b) KL(p || m) + b KL(q || m) with m = (1 - b) p + b q. The parameter is b.
struct Jsd : Fitted {
  static constexpr const char* name = "jsd";
  static constexpr bool kPolicyIsFirst = true;
  static constexpr bool kHasRest = false;  // without_offset() corrects the sum

  KLFAST_HOST_DEVICE static double weight_of_first(double b) { return 1 - b; }
  KLFAST_HOST_DEVICE static double weight_of_second(double b) { return b; }
  static Fit fit(double b) { return jsd_fit(b); }
  template <typename Acc>
  KLFAST_HOST_DEVICE static Mixture<Acc> mixture(double b, double) {
    return mixture_of<Acc>(1 - b, b);
  }
  template <bool kMayBeNear, typename F, typename Acc, Base base>
  KLFAST_HOST_DEVICE static PairWord<F> word_of(F x, F y, const Guess<Acc, base>& exact,
                                                const Mixture<Acc>& mixture) {
    return jsd_word_of<kMayBeNear>(x, y, exact, mixture);
  }
  template <Base base>
  KLFAST_HOST_DEVICE static double value_of(double sum, double slope, double b) {
    return jsd_of(base == Base::kTwo ? without_offset(sum, slope, b) : sum, b);
  }
};

// The total variation, 1/2 sum |p - q|. It has no parameter. Its slopes are 1/2 sign(p - q) and
// 1/2 sign(q - p), so of_first and of_second are both sign(u).
struct Tv {
  static constexpr const char* name = "tv";
  static constexpr bool kIsKl = false;
  static constexpr bool kPolicyIsFirst = true;
  static constexpr bool kHasRest = true;

  KLFAST_HOST_DEVICE static double weight_of_first(double) { return 0.5; }
  KLFAST_HOST_DEVICE static double weight_of_second(double) { return 0.5; }
  static Fit fit(double) { return {}; }
  template <typename Acc>
  KLFAST_HOST_DEVICE static Mixture<Acc> mixture(double, double rest) {
    return mixture_of<Acc>(0.5, 0.5, rest);
  }
  template <bool kMayBeNear, typename F, typename Acc, Base base>
  KLFAST_HOST_DEVICE static PairWord<F> word_of(F x, F y, const Guess<Acc, base>& exact,
                                                const Mixture<Acc>& mixture) {
    using math::select;
    const F p = first_term(x, exact);
    const F q = second_term(y, exact);
    const F u = log_ratio(x, y, exact) - mixture.rest;
    const auto near = math::is_near<base>(u);
    const F difference =
        select(near, near_difference<base>(p, select(near, u, F(0))), q - p);  // q - p
    const F sign = near_first(u, {});
    return {Acc(0.5) * math::magnitude(difference), p, q, sign, sign};
  }
  template <typename F>
  KLFAST_HOST_DEVICE static F near_value(F p, F u, const Fit&) {
    return math::Scalar<F>(0.5) * math::magnitude(near_difference<Base::kTwo>(p, u));
  }
  template <typename F>
  KLFAST_HOST_DEVICE static F near_slope(F p, F u, const Fit& fit) {
    return p * near_first(u, fit);
  }
  // NaN, the log-ratio of a word with p = q = 0, counts as 0.
  template <typename F>
  KLFAST_HOST_DEVICE static F near_first(F u, const Fit&) {
    using math::select;
    return select(u > F(0), F(1), select(u < F(0), F(-1), F(0)));
  }
  template <typename F>
  KLFAST_HOST_DEVICE static F near_second(F u, const Fit& fit) {
    return near_first(u, fit);
  }
  template <Base>
  KLFAST_HOST_DEVICE static double value_of(double sum, double, double) {
    return sum > 1 ? 1 : sum;  // NaN stays NaN
  }
};

// KL(p || m) with m = a p + (1 - a) q. The parameter is a, at least kLeastSkew.
//
// Let L = log(m / p) and k = p / m - 1 = e^-L - 1. The term is p (e^L - 1 - L), and the slopes are
//   of_first = L + a k,    of_second = -k,    with the weights 1 and 1 - a.
struct Skew : Fitted {
  static constexpr const char* name = "skew";
  static constexpr bool kPolicyIsFirst = false;
  static constexpr bool kHasRest = true;

  KLFAST_HOST_DEVICE static double weight_of_first(double) { return 1; }
  KLFAST_HOST_DEVICE static double weight_of_second(double a) { return 1 - a; }
  static Fit fit(double a) { return skew_fit(a); }
  template <typename Acc>
  KLFAST_HOST_DEVICE static Mixture<Acc> mixture(double a, double rest) {
    return mixture_of<Acc>(a, 1 - a, rest);
  }
  template <bool kMayBeNear, typename F, typename Acc, Base base>
  KLFAST_HOST_DEVICE static PairWord<F> word_of(F x, F y, const Guess<Acc, base>& exact,
                                                const Mixture<Acc>& mixture) {
    using math::select;
    const PairWord<F> word = jsd_word_of<kMayBeNear>(x, y, exact, mixture);  // the same m
    const F log = word.of_first;
    const auto near = math::is_near(log);
    const F near_log = select(near, log, F(0));
    const F tail = math::expm1_minus_argument<Range::kNear>(near_log);
    const F opposite = math::expm1_minus_argument<Range::kNear>(-near_log);
    const Acc a = mixture.swaps ? mixture.smaller : mixture.larger;
    const Acc b = mixture.swaps ? mixture.larger : mixture.smaller;
    const F k = select(near, opposite - near_log, math::exp_term(-log) - Acc(1));
    const F far_value = b * (word.q - word.p) - word.p * log;
    return {select(near, word.p * tail, far_value), word.p, word.q, math::fma(k, a, log), -k};
  }
  template <Base>
  KLFAST_HOST_DEVICE static double value_of(double sum, double, double a) {
    const double most = -std::log(a);
    return sum > most ? most : sum;
  }
};

// The rows of klfast.formulas.divergences.DIVERGENCES, in their order.
using DivergenceTable = List<Kl, Jsd, Tv, Skew>;

// The least a of a skewed KL. With a smaller one the clamp in jsd_word_of would show.
inline constexpr double kLeastSkew = 1e-30;

// A word's log-ratio as the near terms of a divergence take it.
template <typename Divergence, typename F, typename Acc>
KLFAST_HOST_DEVICE F without_rest(F u, const Mixture<Acc>& mixture) {
  if constexpr (Divergence::kHasRest) return u - mixture.rest;
  return u;
}

// A word's terms. In base 2 near words use the polynomials of a launch (fit.h). A chunk of only
// near words uses the same polynomials. So a word's bits do not depend on whether its neighbours
// are near.
template <typename Divergence, typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE PairWord<F> fitted_word_of(F x, F y, const Guess<Acc, base>& exact,
                                              const Mixture<Acc>& mixture, const Fit& fit) {
  using math::select;
  if constexpr (base == Base::kE) {
    return Divergence::template word_of<true>(x, y, exact, mixture);
  } else {
    const PairWord<F> far = Divergence::template word_of<false>(x, y, exact, mixture);
    const F ratio = log_ratio(x, y, exact);
    const auto near = math::is_near<base>(ratio);
    const F u = without_rest<Divergence>(select(near, ratio, F(0)), mixture);
    return {select(near, Divergence::near_value(far.p, u, fit), far.value), far.p, far.q,
            select(near, Divergence::near_first(u, fit), far.of_first),
            select(near, Divergence::near_second(u, fit), far.of_second)};
  }
}

// The constants of a row's gradients. They are computed once per row.
template <typename Acc, Base base = Base::kE>
struct RowGradient {
  Guess<Acc, base> exact;
  Mixture<Acc> mixture;  // not for a KL
  Acc first;             // for a KL, the factor of u in the base's unit
  Acc first_constant;
  Acc second;
  Acc second_constant;
};

// The results of a row's forward, and the incoming gradients over the temperature. `grad` is the
// gradient of the divergence. The others are the gradients of the target token's log-prob and of
// the log-sum-exp, under each model.
struct RowState {
  double value;
  double lse;
  double shift;
  double slope;  // not for a KL: the mean under p of of_first
  Origins origins;
  double grad;
  double grad_logprob;
  double grad_ref_logprob;
  double grad_lse = 0;
  double grad_ref_lse = 0;
};

// `parameter` is the divergence's, as in its row of DivergenceTable.
template <typename Divergence, typename Acc, Base base>
KLFAST_HOST_DEVICE RowGradient<Acc, base> gradient_of(const Guess<Acc, base>& exact,
                                                      double parameter, const RowState& row) {
  const double rest = rest_of(exact, row.lse);
  const double second_rest = rest * rest_of_second(exact, row.shift);
  const double g = row.grad;
  // A log-prob is a logit minus the log-sum-exp.
  const double of_lse = row.grad_logprob - row.grad_lse;
  const double of_ref_lse = row.grad_ref_logprob - row.grad_ref_lse;
  if constexpr (Divergence::kIsKl) {
    const double mean = g == 0 ? 0 : g * row.value;  // the value may be infinite
    return {exact,
            {},
            static_cast<Acc>(nats<base>(g * rest)),
            static_cast<Acc>((mean + of_lse) * rest),
            static_cast<Acc>(g * rest),
            static_cast<Acc>(of_ref_lse * second_rest)};
  } else {
    const double first = Divergence::weight_of_first(parameter);
    const double second = Divergence::weight_of_second(parameter);
    const double other_slope = (row.value + first * row.slope) / second;  // the mean under q
    return {exact,
            Divergence::template mixture<Acc>(parameter, row.shift - ratio_of(exact)),
            static_cast<Acc>(first * g * rest),
            static_cast<Acc>((of_lse - first * g * row.slope) * rest),
            static_cast<Acc>(second * g * second_rest),
            static_cast<Acc>((second * g * other_slope + of_ref_lse) * second_rest)};
  }
}

// The gradients of a word's logits, without the term that only the target's logit has. A word
// without probability has gradient 0, even if its log-ratio is infinite.
template <typename F>
struct WordGradients {
  F first;
  F second;
};

// The gradient of a KL for the first model's logit. u must be finite.
template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F kl_gradient_of_first(F p, F u, const RowGradient<Acc, base>& row) {
  const F slope = math::fma(row.first, u, row.first_constant);
  if constexpr (base == Base::kE) return -p * slope;
  return math::fma(-p, slope, Acc(0));  // +0, not -0, as select() gives for a p of 0
}

// The same bits, and also right if u in bits is beyond Acc's range.
template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F kl_gradient_of_first(F p, F x, F y, F u, const RowGradient<Acc, base>& row) {
  if constexpr (base == Base::kE) {
    return kl_gradient_of_first(p, u, row);
  } else {
    const F half = math::select(row.first == Acc(0), F(0), half_log_ratio(x, y, row.exact));
    return math::fma(-p, math::fma(2 * row.first, half, row.first_constant), Acc(0));
  }
}

// The gradient of a KL for the second model's logit. `difference` is q - p.
template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F kl_gradient_of_second(F difference, F q, const RowGradient<Acc, base>& row) {
  return math::fma(row.second, difference, -row.second_constant * q);
}

template <typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE WordGradients<F> kl_gradients(F x, F y, const RowGradient<Acc, base>& row) {
  using math::select;
  const Guess<Acc, base>& exact = row.exact;
  // u is 0 if the incoming gradient is 0, because 0 times an infinite ratio would be NaN.
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
KLFAST_HOST_DEVICE WordGradients<F> pair_gradients(const PairWord<F>& word, F x, F y,
                                                   const RowGradient<Acc, base>& row) {
  using math::select;
  constexpr Acc infinity = math::Constants<Acc>::kInfinity;
  const F first = math::fma(row.first, word.of_first, row.first_constant);
  const F second = math::fma(row.second, word.of_second, -row.second_constant);
  return {select(x == -infinity, F(0), -word.p * first),
          select(y == -infinity, F(0), word.q * second)};
}

// The gradients of any word's logits.
template <typename Divergence, typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE WordGradients<F> gradients_of(F x, F y, const RowGradient<Acc, base>& row,
                                                 const Fit& fit) {
  if constexpr (Divergence::kIsKl) {
    return kl_gradients(x, y, row);
  } else {
    return pair_gradients(fitted_word_of<Divergence>(x, y, row.exact, row.mixture, fit), x, y, row);
  }
}

// The gradient of the logit of model 0 or 1, for a word whose |u| is at most 1 nat. In base e only
// a KL has such words.
template <typename Divergence, typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F near_gradient(F x, F y, F u, int model, const RowGradient<Acc, base>& row,
                                   const Fit& fit) {
  if constexpr (Divergence::kIsKl) {
    const F p = first_term(x, row.exact);
    if (model == 0) return kl_gradient_of_first(p, u, row);
    return kl_gradient_of_second(near_difference<base>(p, u), second_term(y, row.exact), row);
  } else {
    u = without_rest<Divergence>(u, row.mixture);
    if (model == 0) {
      return -first_term(x, row.exact) *
             math::fma(row.first, Divergence::near_first(u, fit), row.first_constant);
    }
    return second_term(y, row.exact) *
           math::fma(row.second, Divergence::near_second(u, fit), -row.second_constant);
  }
}

// The constants of the gradient of one model's entropy. They are computed once per row.
// The gradient for a word's logit is -e^s (slope s + constant), where s is the word's exponent
// against the exact guess.
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
  double lost = static_cast<double>(exact.first) - lse;  // by rounding the guess
  if (of == EntropyOf::kSecond) lost += ratio_of(exact) - shift;
  lost = nats<base>(lost);
  const double rest = exp_of_rest<base>(lost) * grad;
  const double mean = grad == 0 ? 0 : rest * (entropy + lost);  // the entropy may be NaN
  return {static_cast<Acc>(nats<base>(rest)), static_cast<Acc>(mean)};
}

// The gradient of a model's entropy for a logit of this model. It is 0 for a word without
// probability.
template <EntropyOf of, typename F, typename Acc, Base base>
KLFAST_HOST_DEVICE F entropy_gradient(F x, F y, const Guess<Acc, base>& exact,
                                      const EntropyGradient<Acc>& row) {
  const F s = of == EntropyOf::kFirst ? first_exponent(x, exact) : second_exponent(y, exact);
  const F p = math::exp_term<base>(s);
  const F gradient = -p * math::fma(row.slope, math::finite_below(s), row.constant);
  return math::select(p == F(0), F(0), gradient);
}

// The constants of the gradients of a row's log-prob and entropy. They are computed once per row.
// The incoming gradients are a for the log-prob and h for the entropy, both over the temperature.
template <typename Acc>
struct TokenRow {
  Acc scale;
  Acc lse;
  Acc logprob;
  Acc entropy;
  Acc mean;  // minus the mean of log p, for the rounded lse
};

// `scale`, `lse` and `entropy` are in nats. The constants are in the base's unit.
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

// The gradient of a word's logit, without the term that only the target's logit has. A word without
// probability has gradient 0.
template <Base base, typename F, typename Acc>
KLFAST_HOST_DEVICE F token_gradient(F x, const TokenRow<Acc>& row) {
  const F log_p = math::fma_of_exact_product(x, row.scale, -row.lse);
  const F p = math::exp_term<base>(log_p);
  const F gradient = -p * math::fma(row.entropy, log_p + row.mean, row.logprob);
  return math::select(p == F(0), F(0), gradient);
}

// The gradient of the logit of a word whose log-prob is a result. `own` is the incoming gradient of
// this log-prob. `all` is the sum of the gradients of the row's log-probs, minus the gradient of
// its log-sum-exp. `h` is the gradient of the entropy. All are over the temperature. 1 - p is
// computed from log p, so it keeps its digits if p is nearly 1.
KLFAST_HOST_DEVICE double pick_gradient(double log_p, double own, double all, double h,
                                        double entropy) {
  const double p = std::exp(log_p);
  const double of_logprobs = -own * std::expm1(log_p) - (all - own) * p;
  return p == 0 || h == 0 ? of_logprobs : of_logprobs - h * p * (log_p + entropy);
}

}  // namespace klfast::divergences
