// The statistics of a sequence (klfast.KLStats) as a table. A row says what a token adds, and how
// partial results combine. Kernels that are compiled once per instruction set include this file, so
// everything here is inlined into them.
//
// Host and device, no torch. To add a statistic, write its struct and add it to the table.

#pragma once

#include "formulas/estimators.h"
#include "formulas/list.h"
#include "math/combine.h"

namespace klfast {

// A token. A masked token has weight, value and log-ratio 0.
template <math::Range range, typename Acc, typename Weight = Acc>
struct Observation {
  Acc value;                                    // the estimator's value, with its weight and limits
  Weight weight;                                // the mask
  Acc log_ratio;                                // x, which lies in the range
  typename math::Constants<Acc>::Bits clipped;  // 1 if a limit acted
};

// The calls that compute a statistic: all calls, calls that return statistics, or calls of the
// latter kind that may have limits. In other calls the statistic is left at its value for no
// tokens.
enum class Depth { kAlways, kWanted, kLimited };

namespace statistics {

using math::MaximumOrNan;
using math::Range;
using math::Sum;

template <typename Acc, typename Condition>
KLFAST_HOST_DEVICE Acc count(Condition condition) {
  return math::select(condition, Acc(1), Acc(0));
}

template <typename Combination, Depth least>
struct Statistic : Combination {
  static constexpr Depth depth = least;
  // The estimator whose values this statistic sums, or void.
  using Of = void;
  // True if tokens in a range add nothing.
  template <Range>
  static constexpr bool is_empty = false;
};

#define KLFAST_TERM                                     \
  template <Range range, typename Acc, typename Weight> \
  static KLFAST_HOST_DEVICE Acc term(const Observation<range, Acc, Weight>& token)

struct kl : Statistic<Sum, Depth::kAlways> {
  static constexpr const char* name = "kl";
  KLFAST_TERM { return token.value; }
};

struct length : Statistic<Sum, Depth::kAlways> {
  static constexpr const char* name = "length";
  KLFAST_TERM { return static_cast<Acc>(token.weight); }
};

// The sum of an estimator's values, without weights of a call and limits.
template <typename Estimator>
struct of_estimator : Statistic<Sum, Depth::kWanted> {
  static constexpr const char* name = Estimator::name;
  using Of = Estimator;
  KLFAST_TERM { return token.weight * Estimator::template at<range>(token.log_ratio).value; }
};

struct max_abs_log_ratio : Statistic<MaximumOrNan, Depth::kWanted> {
  static constexpr const char* name = "max_abs_log_ratio";
  KLFAST_TERM { return math::magnitude(token.log_ratio); }
};

struct clipped : Statistic<Sum, Depth::kLimited> {
  static constexpr const char* name = "clipped";
  KLFAST_TERM { return count<Acc>(token.clipped != 0); }
};

struct nonfinite : Statistic<Sum, Depth::kWanted> {
  static constexpr const char* name = "nonfinite";
  template <Range range>
  static constexpr bool is_empty = range == Range::kNear;
  KLFAST_TERM {
    const auto greatest =
        MaximumOrNan::combine(math::magnitude(token.log_ratio), math::magnitude(token.value));
    return count<Acc>(math::magnitude_bits(greatest) >= math::magnitude_bits(Acc(INFINITY)));
  }
};

#undef KLFAST_TERM

// In the order of the fields of KLStats.
using StatisticTable = List<kl, length, of_estimator<estimators::k1>, of_estimator<estimators::k2>,
                            of_estimator<estimators::k3>, max_abs_log_ratio, clipped, nonfinite>;

}  // namespace statistics

inline constexpr int kStatistics = statistics::StatisticTable::kSize;

template <typename Row>
inline constexpr int index_of = IndexIn<Row, statistics::StatisticTable>::value;

inline constexpr int kKl = index_of<statistics::kl>;
inline constexpr int kLength = index_of<statistics::length>;

// The number of rows of a depth. The rows of every call come first.
template <Depth depth, typename... Rows>
constexpr int count_rows(List<Rows...>) {
  return (0 + ... + (Rows::depth <= depth));
}
template <Depth depth>
inline constexpr int number_of_statistics = count_rows<depth>(statistics::StatisticTable());
static_assert(number_of_statistics<Depth::kAlways> == 2 && kKl < 2 && kLength < 2);

// True if a statistic need not be summed over tokens of weight 1 under estimator E, because it is
// their number or the sum of E's own values.
template <typename Row, typename E>
inline constexpr bool is_derived = index_of<Row> == kLength || std::is_same_v<typename Row::Of, E>;

// One number per statistic.
template <typename T>
struct Statistics {
  T at[kStatistics];
};

// Calls visit(Row()) for the rows of a depth.
template <Depth depth, typename Visitor>
KLFAST_HOST_DEVICE void for_each_statistic(const Visitor& visit) {
  for_each_row(statistics::StatisticTable(), [&](auto row) KLFAST_INLINE_LAMBDA {
    if constexpr (decltype(row)::depth <= depth) visit(row);
  });
}

// The statistics of no tokens.
template <typename T>
KLFAST_HOST_DEVICE Statistics<T> empty_statistics() {
  Statistics<T> sums;
  for_each_statistic<Depth::kLimited>([&](auto row) KLFAST_INLINE_LAMBDA {
    using Row = decltype(row);
    sums.at[index_of<Row>] = T(Row::kEmpty);
  });
  return sums;
}

template <Depth depth, typename T>
KLFAST_HOST_DEVICE void combine(Statistics<T>& sums, const Statistics<T>& part) {
  for_each_statistic<depth>([&](auto row) KLFAST_INLINE_LAMBDA {
    using Row = decltype(row);
    constexpr int i = index_of<Row>;
    sums.at[i] = Row::combine(sums.at[i], part.at[i]);
  });
}

// Adds a token to its statistics. at(index) returns the sum of a row. With an estimator E, derived
// statistics are left out.
template <Depth depth, typename E = void, math::Range range, typename Acc, typename Weight,
          typename At>
KLFAST_HOST_DEVICE void add_token(const Observation<range, Acc, Weight>& token, const At& at) {
  for_each_statistic<depth>([&](auto row) KLFAST_INLINE_LAMBDA {
    using Row = decltype(row);
    constexpr bool is_left_out = !std::is_void_v<E> && is_derived<Row, E>;
    if constexpr (!is_left_out && !Row::template is_empty<range>) {
      auto&& sum = at(index_of<Row>);
      sum = Row::combine(static_cast<Acc>(sum), Row::term(token));
    }
  });
}

}  // namespace klfast
