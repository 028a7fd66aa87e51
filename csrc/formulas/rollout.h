// The formulas of rollout_correction for one token. They lose no digits near x = logprobs -
// rollout_logprobs = 0. klfast/formulas/rollout.py has the textbook formulas.
//
// For float and double, no torch. To add a statistic of a rejection criterion, write its struct and
// add it to the table at the end.

#pragma once

#include "formulas/estimators.h"
#include "formulas/list.h"
#include "math/log_series.h"

namespace klfast::rollout {

using namespace klfast::math;

inline constexpr double kExponentLimit = 20;      // nats, limits the argument of exponentials
inline constexpr double kLeastComplement = 1e-8;  // the least 1 - p of a binary divergence

// A token whose log-probs are both finite. For any other token all fields are 0, with one
// exception: a criterion over sequences may see a token that the policy excludes. Then logprob and
// x are -infinity.
template <typename T>
struct Pair {
  T logprob;
  T rollout_logprob;
  T x;
};

// The exponentials of an x with |x| <= 1.
template <typename T>
struct NearExponentials {
  T growth;               // e^x - 1
  T k3;                   // e^x - 1 - x
  SeriesParts<T> series;  // (e^x - 1 - x) / x^2

  // (e^|x| - 1 - |x|) / x^2.
  KLFAST_HOST_DEVICE T rest_of_error(T x) const { return series.at(magnitude(x)); }
};

// Of |x| <= 1. They stand here, because their forms suit the statistics' sums.
template <typename T>
KLFAST_HOST_DEVICE NearExponentials<T> near_exponentials_of(T x) {
  const SeriesParts<T> series = series_parts(x);
  const T of_x = series.at(x);
  // k3 is computed again for e^x - 1. If both shared one product, compilers would contract it into
  // the following sum in one kernel and not in another.
  return {fma(x * x, of_x, x), x * (x * of_x), series};
}

// The exponentials of a token's x, limited to 20 nats.
template <typename T>
struct Exponentials {
  T ratio;   // e^x
  T growth;  // e^x - 1
  T k3;      // e^x - 1 - x, where x has only an upper limit
  T error;   // e^|x| - 1
};

// e^x - 1 - x, where x has only an upper limit.
template <typename T>
KLFAST_HOST_DEVICE T k3_of(T x) {
  return estimators::k3_ref::at(at_most(x, T(kExponentLimit))).value;
}

// One range reduction and one series serve e^x and e^-x.
template <typename T>
KLFAST_HOST_DEVICE Exponentials<T> exponentials_of(T x) {
  using C = Constants<T>;
  const T limit = T(kExponentLimit);
  const T y = clamp(x, -limit, limit);
  // y = n ln2 + r, with n = 0 if |y| <= 1.
  const bool near = is_near(y);
  const T shifted = select(near, T(0), y * C::kLog2E) + C::kRound;
  const auto n = bit_cast<typename C::Bits>(shifted) - bit_cast<typename C::Bits>(T(C::kRound));
  const T n_float = shifted - C::kRound;
  const T r = fma(-n_float, T(C::kLn2Low), y - n_float * C::kLn2High);
  const NearExponentials<T> e = near_exponentials_of(r);
  const T power = power_of_two<T>(n), inverse = power_of_two<T>(-n);
  const T growth = fma(power, e.growth, power - T(1));
  const T shrinkage = r * r * e.series.at(-r) - r;  // e^-r - 1
  const T error = select(y < T(0), fma(inverse, shrinkage, inverse - T(1)), growth);
  T k3 = select(near, e.k3, growth - at_most(x, limit));
  // Below -limit, e^x is lost beside 1 in fp32, but not in fp64.
  if constexpr (std::is_same_v<T, double>) k3 = select(x < -limit, k3_of(x), k3);
  return {power * (T(1) + e.growth), growth, k3, error};
}

// e^2x - 1.
template <typename T>
KLFAST_HOST_DEVICE T chi2_of(T growth) {
  return growth * (growth + T(2));
}

// 1 - e^log_p, the probability of any other token, but at least kLeastComplement.
template <typename T>
KLFAST_HOST_DEVICE T complement(T log_p) {
  const T rest = -expm1<Range::kAnywhere>(log_p);
  return select(rest < T(kLeastComplement), T(kLeastComplement), rest);
}

// |e^log_p - e^log_q| for log-probs <= 0.
template <typename T>
KLFAST_HOST_DEVICE T binary_tv(T log_p, T log_q) {
  const T larger = select(log_p > log_q, log_p, log_q);
  return exp<Range::kAnywhere>(larger) * -expm1<Range::kAnywhere>(-magnitude(log_p - log_q));
}

// p log(p / q) + (1 - p) log((1 - p) / (1 - q)) for log-probs <= 0. It is never negative. One
// log-prob may be -infinity. With u = (q - p) / (1 - q), the same divergence is
//   p (e^-x - 1 + x) + (q - p) u + (1 - p) (log(1 + u) - u).
// None of these terms is much larger than the divergence.
template <typename T>
KLFAST_HOST_DEVICE T binary_kl(T log_p, T log_q) {
  const T x = finite_below(log_p - log_q), p = exp<Range::kAnywhere>(log_p);
  const T rest_p = complement(log_p), rest_q = complement(log_q);
  const T least = select(rest_p < rest_q, rest_p, rest_q);
  const bool limited = least <= T(kLeastComplement);  // by complement()
  const T tv = binary_tv(log_p, log_q);
  const T gap = select(limited, rest_p - rest_q, select(x > T(0), -tv, tv));  // q - p
  const T u = gap / rest_q;
  const bool is_close = magnitude(u) <= T(0.5);
  const T near_u = select(is_close, u, T(0)), near_x = select(x < T(-1), T(0), x);
  // The first term plus q - p. It is used if a complement is limited or e^-x is large. Nothing
  // cancels there.
  const T apart = p * x + gap;
  const T near_first = p * expm1_minus_argument<Range::kAnywhere>(-near_x);
  const T first = select(x < T(-1), apart, select(limited, apart, near_first));
  const T close = first + gap * near_u + rest_p * log1p(near_u).minus_argument;
  const T far = p * x + rest_p * log(rest_p / rest_q);
  const T kl = select(x < T(INFINITY), select(is_close, close, far), T(INFINITY));
  return select(kl > T(0), kl, T(0));
}

// Statistics of rejection criteria.
#define KLFAST_STATISTIC \
  template <typename T>  \
  static KLFAST_HOST_DEVICE T at(const Pair<T>& token)

// An estimator of x.
template <typename Estimator>
struct of_estimator {
  KLFAST_STATISTIC { return Estimator::at(token.x).value; }
};

struct of_k3 {
  KLFAST_STATISTIC { return k3_of(token.x); }
};

struct of_binary_kl {
  KLFAST_STATISTIC {
    return binary_kl(at_most(token.rollout_logprob, T(0)), at_most(token.logprob, T(0)));
  }
};

struct of_binary_kl_reverse {
  KLFAST_STATISTIC {
    return binary_kl(at_most(token.logprob, T(0)), at_most(token.rollout_logprob, T(0)));
  }
};

struct of_binary_tv {
  KLFAST_STATISTIC {
    return binary_tv(at_most(token.logprob, T(0)), at_most(token.rollout_logprob, T(0)));
  }
};

struct of_difference {
  KLFAST_STATISTIC {
    const T tv = of_binary_tv::at(token);
    return select(token.x < T(0), -tv, tv);
  }
};

#undef KLFAST_STATISTIC

// In the order of klfast.formulas.rollout.TOKEN_STATISTICS.
using RuleTable =
    List<of_estimator<estimators::k1>, of_estimator<estimators::abs>, of_estimator<estimators::k2>,
         of_k3, of_binary_kl, of_binary_kl_reverse, of_binary_tv, of_difference>;

}  // namespace klfast::rollout
