// The formulas over a vocabulary: what a word adds to a row's sums, what a row's sums come to, and
// what a word's gradient is. Host and device, for float and double, no torch.
//
// p = softmax(x), q = softmax(y), x and y logits over the temperature, u = log(q / p).
//
// Textbook sums of p (log p - log q) lose every digit as the models meet: at KL = 1e-6 fp32 gives
// noise. Here a row is summed against a guess: m near the greatest x, c near lse_y - lse_x. With
// u' = y - x - c and w = e^(x - m), and sums W of w, E of w u', D of w (e^u' - 1 - u'), where every
// term of D is >= 0 and comes from a series:
//   A = (D + E) / W = e^(lse_y - lse_x - c) - 1,    KL(p || q) = D / W + log(1 + A) - A.
// Far from 0, 1 + A is the sum of e^(y - m - c) over W, where W + D + E would cancel.
// The better the guess, the smaller A, and the less D / W and A - log(1 + A) cancel. Where they do,
// the row is summed again with what the first sums say of m and c: one more look is then exact.

#pragma once

#include <cmath>

#include "log_series.h"

namespace klfast::divergences {

using math::Range;

// A guess in the arithmetic's type; logits are multiplied by scale = 1 / temperature.
template <typename Acc>
struct Guess {
  Acc scale;
  Acc first;   // m
  Acc offset;  // what is large of c, before the temperature: subtracting it costs y no digit of u'
  Acc ratio;   // the rest of c
  Acc second;  // m + c
};

template <typename Acc>
KLFAST_HOST_DEVICE Guess<Acc> guess_of(double scale, double first, double ratio) {
  Guess<Acc> guess;
  guess.scale = static_cast<Acc>(scale);
  guess.first = static_cast<Acc>(first);
  const double own_scale = guess.scale;
  guess.offset = static_cast<Acc>(std::rint(ratio / own_scale / 4) * 4);
  guess.ratio = static_cast<Acc>(ratio - static_cast<double>(guess.offset) * own_scale);
  guess.second = static_cast<Acc>(static_cast<double>(guess.first) + ratio);
  return guess;
}

// c as the arithmetic takes it.
template <typename Acc>
KLFAST_HOST_DEVICE double ratio_of(const Guess<Acc>& guess) {
  return static_cast<double>(guess.offset) * static_cast<double>(guess.scale) +
         static_cast<double>(guess.ratio);
}

// A word of one model: e^(x - m), and that times x - m.
template <typename Acc>
struct Word {
  Acc mass;
  Acc surprise;
};

template <typename Acc>
KLFAST_HOST_DEVICE Word<Acc> word_of(Acc x, Acc scale, Acc guess) {
  const Acc s = math::fma(x, scale, -guess);
  const Acc mass = math::exp_term(s);
  // 0 times -infinity is NaN, and 0 is meant; NaN itself stays.
  return {mass, mass * math::select(s < Acc(-100), Acc(-100), s)};
}

// A word of two models.
template <typename Acc>
struct Pair {
  Acc mass;    // w
  Acc spread;  // w (e^u' - 1 - u')
  Acc slope;   // w u'
  Acc other;   // e^(y - m - c); left 0 by kNear, where it is the sum of the three above
  // 1 where q excludes what p may say: the row's KL is infinite.
  typename math::Constants<Acc>::Bits excluded;
};

template <typename Acc>
KLFAST_HOST_DEVICE Acc log_ratio(Acc x, Acc y, const Guess<Acc>& guess) {
  return math::fma((y - guess.offset) - x, guess.scale, -guess.ratio);
}

// kNear promises |u'| <= 1.
template <Range range, typename Acc>
KLFAST_HOST_DEVICE Pair<Acc> pair_of(Acc x, Acc y, const Guess<Acc>& guess) {
  using math::select;
  const Acc u = log_ratio(x, y, guess);
  const Acc mass = math::exp_term(math::fma(x, guess.scale, -guess.first));
  if constexpr (range == Range::kNear) {
    return {mass, mass * math::expm1_minus_argument<Range::kNear>(u), mass * u, 0, 0};
  }
  constexpr Acc infinity = math::Constants<Acc>::kInfinity;
  const bool near = math::is_near(u);
  const Acc near_u = select(near, u, Acc(0));
  const Acc other = math::exp_term(math::fma(y, guess.scale, -guess.second));
  // A word that neither says has u = NaN, and adds nothing. NaN in a logit reaches `mass` or
  // `other`.
  const bool nobody = (x == -infinity) & (y == -infinity);
  const bool infinite = math::magnitude(u) == infinity;
  const Acc slope = mass * select(nobody | infinite, Acc(0), u);
  const Acc far_spread = (other - mass) - slope;
  return {mass, select(near, mass * math::expm1_minus_argument<Range::kNear>(near_u), far_spread),
          slope, other, (u == -infinity) & (x > -infinity)};
}

// Sums over the words of a row.
struct PairSums {
  double mass = 0;
  double spread = 0;
  double slope = 0;
  double other = 0;
  bool excluded = false;
};

// Of all words from those of near groups, whose `other` is still to be said, and of far ones.
KLFAST_HOST_DEVICE PairSums add(const PairSums& near, const PairSums& far) {
  return {near.mass + far.mass, near.spread + far.spread, near.slope + far.slope,
          (near.mass + near.spread + near.slope) + far.other, far.excluded};
}

// What sums say of a row.
struct PairRow {
  double kl;
  double lse;    // of x
  double shift;  // lse_y - lse_x
  bool usable;   // lse and shift are about right
  bool good;     // and exact, as kl is
};

// Whether a guess served for a sum of e^(x - guess): neither lost to 0 nor held at exp's limit.
KLFAST_HOST_DEVICE bool is_usable(double mass) { return mass > 1e-2 && mass < 1e30; }

template <typename Acc>
KLFAST_HOST_DEVICE PairRow row_of(const PairSums& sums, const Guess<Acc>& guess) {
  constexpr double kCancellation = 16;  // roundings: 2e-6 in fp32 even if all point one way
  const double a = (sums.spread + sums.slope) / sums.mass;
  const double spread = sums.spread / sums.mass;
  const double total = sums.other / sums.mass;
  const double log_total = std::fabs(a) < 0.5 ? std::log1p(a) : std::log(total);
  const double kl = spread + (log_total - a);
  const double cancelled =
      spread + std::fabs(a) * (std::fabs(sums.slope) + std::fabs(sums.spread)) / sums.mass;
  PairRow row;
  row.usable = is_usable(sums.mass) && total > 1e-20 && total < 1e30;
  row.good = row.usable && total > 0.125 &&
             (cancelled <= kCancellation * kl || sums.excluded || spread == 0);
  row.kl = sums.excluded ? INFINITY : (kl < 0 ? 0 : kl);
  row.lse = static_cast<double>(guess.first) + std::log(sums.mass);
  row.shift = ratio_of(guess) + log_total;
  return row;
}

// A word's part in JSD_b = (1 - b) KL(p || m) + b KL(q || m), m = (1 - b) p + b q.
//
// For u <= 0 with v = u and weight b it is p f(v), f(v) = b g(v) - h(a), where a = b (e^v - 1),
// g(v) = v e^v - (e^v - 1) and h(a) = (1 + a) log(1 + a) - a: both >= 0 with a double root at 0.
// For u > 0 the models change roles: v = -u, weight 1 - b, and q in front. So v <= 0 always,
// nothing overflows, and log(1 + a) is that of m over the model in front.
template <typename Acc>
struct MixedWord {
  Acc value;  // to JSD
  Acc p;      // probabilities
  Acc q;
  Acc log_m_over_p;
  Acc log_q_over_m;
};

template <typename Acc>
KLFAST_HOST_DEVICE MixedWord<Acc> mixed_of(Acc x, Acc y, const Guess<Acc>& exact, Acc b) {
  using math::select;
  const Acc p = math::exp_term(math::fma(x, exact.scale, -exact.first));
  const Acc q = math::exp_term(math::fma(y, exact.scale, -exact.second));
  const Acc u = log_ratio(x, y, exact);
  const bool p_in_front = !(u > Acc(0));
  const Acc v = math::clamp(select(p_in_front, u, -u), Acc(-100), Acc(0));
  const Acc weight = select(p_in_front, b, Acc(1) - b);
  const bool near = math::is_near(v);
  const Acc near_v = select(near, v, Acc(0));
  const Acc tail = math::expm1_minus_argument<Range::kNear>(near_v);
  const Acc e = math::exp_term(v);
  const Acc em1 = select(near, near_v + tail, e - Acc(1));
  const Acc g = select(near, math::fma(near_v, em1, -tail), math::fma(v, e, -em1));
  const Acc a = weight * em1;
  const math::Log1p<Acc> log = math::log1p_nonpositive(a);
  const Acc h = math::fma(Acc(1) + a, log.minus_argument, a * a);
  const Acc front = select(p_in_front, p, q);
  // The other logarithm, of two large numbers that nearly cancel where v has been held.
  const Acc other = v - log.value;
  // A word that neither says: u is NaN, and there is no word.
  constexpr Acc infinity = math::Constants<Acc>::kInfinity;
  const bool nobody = (x == -infinity) & (y == -infinity);
  return {select(nobody, Acc(0), front * math::fma(weight, g, -h)), p, q,
          select(nobody, Acc(0), select(p_in_front, log.value, -other)),
          select(nobody, Acc(0), select(p_in_front, other, -log.value))};
}

// What a row's gradients are made of, once a row.
template <typename Acc>
struct RowGradient {
  Guess<Acc> exact;
  Acc beta;
  Acc first;
  Acc first_constant;
  Acc second;
  Acc second_constant;
};

// A row as its forward left it, and the gradients that come in, over the temperature: of its
// divergence, and of its token's log-probs under either model.
struct RowState {
  double value;
  double lse;
  double shift;
  double slope;  // of jsd: the mean under p of log(m / p)
  double grad;
  double grad_logprob;
  double grad_ref_logprob;
};

template <typename Acc>
KLFAST_HOST_DEVICE RowGradient<Acc> gradient_of(bool is_kl, double scale, double beta,
                                                const RowState& row) {
  const Guess<Acc> exact = guess_of<Acc>(scale, row.lse, row.shift);
  // What rounding takes from a log-sum-exp is a factor of every probability.
  const double p_rest = std::exp(static_cast<double>(exact.first) - row.lse);
  const double q_rest = std::exp(static_cast<double>(exact.second) - (row.lse + row.shift));
  const double g = row.grad;
  if (is_kl) {
    const double mean = g == 0 ? 0 : g * row.value;  // which may be infinite
    return {exact,
            static_cast<Acc>(beta),
            static_cast<Acc>(g * p_rest),
            static_cast<Acc>((mean + row.grad_logprob) * p_rest),
            static_cast<Acc>(g * p_rest),
            static_cast<Acc>(row.grad_ref_logprob * q_rest)};
  }
  const double other_slope = (row.value + (1 - beta) * row.slope) / beta;  // under q, of log(q / m)
  return {exact,
          static_cast<Acc>(beta),
          static_cast<Acc>((1 - beta) * g * p_rest),
          static_cast<Acc>((row.grad_logprob - (1 - beta) * g * row.slope) * p_rest),
          static_cast<Acc>(beta * g * q_rest),
          static_cast<Acc>((beta * g * other_slope + row.grad_ref_logprob) * q_rest)};
}

// Gradients of a word, without what a taken token adds: 0 where its own model excludes it.
template <typename Acc>
struct WordGradients {
  Acc first;
  Acc second;
};

template <typename Acc>
KLFAST_HOST_DEVICE WordGradients<Acc> kl_gradients(Acc x, Acc y, const RowGradient<Acc>& row) {
  using math::select;
  constexpr Acc infinity = math::Constants<Acc>::kInfinity;
  const Guess<Acc>& exact = row.exact;
  // Where no gradient comes in, an infinite ratio must not make 0 NaN.
  const Acc u = select(row.first == Acc(0), Acc(0), log_ratio(x, y, exact));
  const bool near = math::is_near(u);
  const Acc near_u = select(near, u, Acc(0));
  const Acc p = math::exp_term(math::fma(x, exact.scale, -exact.first));
  const Acc q = math::exp_term(math::fma(y, exact.scale, -exact.second));
  const Acc near_difference = p * (near_u + math::expm1_minus_argument<Range::kNear>(near_u));
  const Acc difference = select(near, near_difference, q - p);
  return {select(x == -infinity, Acc(0), -p * math::fma(row.first, u, row.first_constant)),
          math::fma(row.second, difference, -row.second_constant * q)};
}

template <typename Acc>
KLFAST_HOST_DEVICE WordGradients<Acc> jsd_gradients(Acc x, Acc y, const RowGradient<Acc>& row) {
  using math::select;
  constexpr Acc infinity = math::Constants<Acc>::kInfinity;
  const MixedWord<Acc> word = mixed_of(x, y, row.exact, row.beta);
  const Acc first = math::fma(row.first, word.log_m_over_p, row.first_constant);
  const Acc second = math::fma(row.second, word.log_q_over_m, -row.second_constant);
  return {select(x == -infinity, Acc(0), -word.p * first),
          select(y == -infinity, Acc(0), word.q * second)};
}

// Of a token's log-prob (a) and the entropy (h, with its value), both over the temperature, without
// what the taken token adds.
template <typename Acc>
KLFAST_HOST_DEVICE Acc token_gradient(Acc x, Acc scale, Acc lse, Acc a, Acc h, Acc entropy) {
  const Acc log_p = math::fma(x, scale, -lse);
  const Acc p = math::exp_term(log_p);
  const Acc gradient = -p * math::fma(h, log_p + entropy, a);
  constexpr Acc infinity = math::Constants<Acc>::kInfinity;
  return math::select(x == -infinity, Acc(0), gradient);
}

}  // namespace klfast::divergences
