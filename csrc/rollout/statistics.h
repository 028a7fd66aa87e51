// The statistics of rollout_correction for a sequence (klfast.RolloutStats) as a table. A row says
// what a token adds, and what a sequence's totals become. The kernel is compiled once per
// instruction set, so everything that it calls here is inlined into it.
//
// No torch. To add a statistic, write its struct and add it to the table. It is a Near if near
// tokens need a sum of their own, and a Derived if it follows from other sums of near tokens.
// Numbers of tokens and extremes are rows too, but the kernel adds them in another way.

#pragma once

#include "rollout/token_bounds.h"

namespace klfast::rollout {

// A near token: |x| <= 1, no bound on a weight acts, and its mask is 1.
template <typename T>
struct NearToken {
  T logprob;
  T x;
  T squared;  // x^2
  NearExponentials<T> e;
};

// Any counted token.
template <typename T>
struct FarToken {
  T logprob;
  T x;
  Exponentials<T> e;
  TokenWeight<T> weight;
};

// The sums over near tokens from which other statistics follow.
struct NearSums {
  double length;          // number of tokens
  double growth;          // sum of e^x - 1
  double growth_squares;  // sum of (e^x - 1)^2

  KLFAST_HOST_DEVICE double ratios() const { return length + growth; }
  KLFAST_HOST_DEVICE double chi2() const { return growth_squares + 2 * growth; }
};

namespace statistics {

// A row that is not a sum over tokens. of(sequence) computes the statistic from the totals.
struct Statistic {
  static constexpr bool is_sum = false;
  static constexpr bool has_near_sum = false;
};

// The sum of far(token) over counted tokens, weighted by the mask. of(sequence, sum) computes the
// statistic.
struct Sum : Statistic {
  static constexpr bool is_sum = true;
  template <typename Sequence>
  static double of(const Sequence&, double sum) {
    return sum;
  }
};

// A statistic for which near tokens have a sum of their own, the sum of near(token).
struct Near : Sum {
  static constexpr bool has_near_sum = true;
};

// A statistic whose part of near tokens follows from their other sums, by near(sums). Its weights
// are weights per token.
struct Derived : Sum {};

#define KLFAST_NEAR     \
  template <typename T> \
  static KLFAST_HOST_DEVICE T near(const NearToken<T>& token)
#define KLFAST_FAR      \
  template <typename T> \
  static KLFAST_HOST_DEVICE T far(const FarToken<T>& token)
#define KLFAST_DERIVED static KLFAST_HOST_DEVICE double near(const NearSums& sums)
#define KLFAST_OF              \
  template <typename Sequence> \
  static double of([[maybe_unused]] const Sequence& sequence)
#define KLFAST_OF_SUM          \
  template <typename Sequence> \
  static double of([[maybe_unused]] const Sequence& sequence, double sum)

struct length : Statistic {
  KLFAST_OF { return sequence.length; }
};

struct tokens : Statistic {
  KLFAST_OF { return sequence.tokens; }
};

struct nonfinite : Statistic {
  KLFAST_OF { return sequence.nonfinite(); }
};

struct kept : Statistic {
  KLFAST_OF {
    // The two sums may have been added in different orders. So numbers of tokens decide whether
    // none is kept.
    const bool keeps =
        !sequence.decision.rejected && sequence.lost_tokens() < sequence.finite_tokens;
    const double sum = sequence.counted - sequence.rejected();
    return keeps && sum > 0 ? sum : 0.0;
  }
};

struct rejected : Statistic {
  KLFAST_OF {
    return sequence.decision.rejected ? sequence.tokens
                                      : sequence.nonfinite() + sequence.lost_tokens();
  }
};

struct logprobs : Near {
  KLFAST_NEAR { return token.logprob; }
  KLFAST_FAR { return token.logprob; }
};

struct k1 : Near {
  KLFAST_NEAR { return token.x; }
  KLFAST_FAR { return estimators::k1::at(token.x).value; }
};

struct abs : Near {
  KLFAST_NEAR { return magnitude(token.x); }
  KLFAST_FAR { return estimators::abs::at(token.x).value; }
};

struct k2 : Near {
  KLFAST_NEAR { return token.squared; }
  KLFAST_FAR { return token.x * token.x; }
  KLFAST_OF_SUM { return 0.5 * sum; }
};

struct k3 : Near {
  KLFAST_NEAR { return token.e.k3; }
  KLFAST_FAR { return token.e.k3; }
};

struct ratio : Derived {
  KLFAST_DERIVED { return sums.ratios(); }
  KLFAST_FAR { return token.e.ratio; }
};

struct chi2 : Derived {
  KLFAST_DERIVED { return sums.chi2(); }
  KLFAST_FAR { return chi2_of(token.e.growth); }
};

struct error : Near {
  KLFAST_NEAR { return magnitude(token.x) + token.x * token.x * token.e.rest_of_error(token.x); }
  KLFAST_FAR { return token.e.error; }
};

struct min_log_ratio : Statistic {
  KLFAST_OF { return sequence.least(); }
};

struct max_log_ratio : Statistic {
  KLFAST_OF { return sequence.greatest(); }
};

struct weight : Derived {
  KLFAST_DERIVED { return sums.ratios(); }
  KLFAST_FAR { return token.weight.value; }
  KLFAST_OF_SUM {
    return sequence.per_token ? sum : sequence.weighed * sequence.decision.weight.value;
  }
};

struct weight_squares : Derived {
  KLFAST_DERIVED { return sums.length + sums.chi2(); }
  KLFAST_FAR { return token.weight.value * token.weight.value; }
  KLFAST_OF_SUM {
    const double w = sequence.decision.weight.value;
    return sequence.per_token ? sum : sequence.weighed * (w * w);
  }
};

struct weight_deviation : Derived {
  KLFAST_DERIVED { return sums.growth_squares; }
  KLFAST_FAR { return token.weight.deviation * token.weight.deviation; }
  KLFAST_OF_SUM {
    const double w = sequence.decision.weight.value;
    // A token without a weight counts as w = 0.
    return (sequence.length - sequence.weighed) +
           (sequence.per_token ? sum : sequence.weighed * ((w - 1) * (w - 1)));
  }
};

struct min_weight : Statistic {
  KLFAST_OF { return sequence.least_weight(); }
};

struct max_weight : Statistic {
  KLFAST_OF { return sequence.greatest_weight(); }
};

struct below : Statistic {
  KLFAST_OF { return sequence.below(); }
};

struct above : Statistic {
  KLFAST_OF { return sequence.above(); }
};

struct outside : Statistic {
  KLFAST_OF { return sequence.outside(); }
};

#undef KLFAST_NEAR
#undef KLFAST_FAR
#undef KLFAST_DERIVED
#undef KLFAST_OF
#undef KLFAST_OF_SUM

// In the order of RolloutStats' fields.
using RolloutTable = List<length, tokens, nonfinite, kept, rejected, logprobs, k1, abs, k2, k3,
                          ratio, chi2, error, min_log_ratio, max_log_ratio, weight, weight_squares,
                          weight_deviation, min_weight, max_weight, below, above, outside>;

template <typename Row>
using IsSum = std::bool_constant<Row::is_sum>;
template <typename Row>
using HasNearSum = std::bool_constant<Row::has_near_sum>;
template <typename Row>
using IsDerived = std::bool_constant<Row::is_sum && !Row::has_near_sum>;

using Sums = Where<IsSum, RolloutTable>;
using OfNear = Where<HasNearSum, RolloutTable>;  // near tokens have a sum
using DerivedSums = Where<IsDerived, RolloutTable>;

}  // namespace statistics

inline constexpr int kRolloutStatistics = statistics::RolloutTable::kSize;

// The position of a statistic among all sums, among the sums of near tokens, and among derived
// sums.
template <typename Row>
inline constexpr int sum_of = IndexIn<Row, statistics::Sums>::value;
template <typename Row>
inline constexpr int near_sum_of = IndexIn<Row, statistics::OfNear>::value;
template <typename Row>
inline constexpr int derived_sum_of = IndexIn<Row, statistics::DerivedSums>::value;

}  // namespace klfast::rollout
