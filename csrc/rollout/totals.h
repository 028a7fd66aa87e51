// The totals of a sequence's tokens. They decide the sequence's rejection, weight and statistics.
// All are in double. No torch.

#pragma once

#include "math/combine.h"
#include "rollout/statistics.h"

namespace klfast::rollout {

// Rows of the totals. The rows of rules follow them. Sums are weighted by the mask, unless a
// comment says "number". Sums of weights are for weights per token.
enum Total {
  kLength,          // of kept tokens
  kTokens,          // number
  kNonfinite,       // number of kept tokens that are not counted
  kCounted,         // sum of the mask of counted tokens
  kExcluded,        // sum of the mask of kept tokens that the policy excludes. x is -infinity.
  kRejected,        // sum of the mask of counted tokens that a rule over tokens rejects
  kRejectedTokens,  // number of them
  kBelow,           // number
  kAbove,           // number
  kOutside,         // number
  kStatisticsSums,  // of statistics::Sums, in its order
  kSums = kStatisticsSums + statistics::Sums::kSize,
  // Extremes over counted tokens.
  kLeast = kSums,
  kLeastWeight,
  kGreatest,
  kGreatestWeight,
  kTotals
};

// Rows of a rule, in the order of klfast.stats.rollout.RuleStats. A rule over sequences needs only
// the first three.
enum RuleTotal {
  kRuleTotal,
  kRuleLeast,
  kRuleGreatest,
  kRuleBelow,  // number
  kRuleAbove,  // number
  kRuleBounded,
  kRuleBoundedSquares,
  kRuleTotals
};

KLFAST_HOST_DEVICE constexpr int rows_of_totals(int rules) { return kTotals + rules * kRuleTotals; }

// How two numbers of a row combine.
enum class How { kSum, kLeast, kGreatest };

KLFAST_HOST_DEVICE constexpr How how_of(int row) {
  if (row < kSums) return How::kSum;
  if (row < kTotals) return row < kGreatest ? How::kLeast : How::kGreatest;
  const int of_rule = (row - kTotals) % kRuleTotals;
  if (of_rule == kRuleLeast) return How::kLeast;
  return of_rule == kRuleGreatest ? How::kGreatest : How::kSum;
}

// Calls visit() with the object that combines two numbers.
template <typename Visitor>
KLFAST_HOST_DEVICE auto visit_how(How how, const Visitor& visit) {
  if (how == How::kSum) return visit(Sum());
  return how == How::kLeast ? visit(Minimum()) : visit(Maximum());
}

KLFAST_HOST_DEVICE double empty_of(How how) {
  return visit_how(how, [](auto own) KLFAST_INLINE_LAMBDA { return own.kEmpty; });
}

KLFAST_HOST_DEVICE double combine(How how, double a, double b) {
  return visit_how(how, [&](auto own) KLFAST_INLINE_LAMBDA { return own.combine(a, b); });
}

// A weight e^u under the bounds of the options. The bounds are compared with u.
struct BoundedWeight {
  double value;
  bool below, above, outside;
};

inline BoundedWeight bounded_weight(const Options& options, double u) {
  const double y = clamp(u, -kExponentLimit, kExponentLimit);
  BoundedWeight weight = {exp<Range::kAnywhere>(y), u<options.log_least, u> options.log_cap,
                          u < options.log_floor || u > options.log_cap};
  if (options.outside == Outside::kTruncate) {
    weight.value = clamp(weight.value, options.floor, options.cap);
  } else if (weight.outside) {
    weight.value = 0;
  }
  return weight;
}

// The decisions about a sequence's tokens that follow from its totals.
struct Decision {
  bool rejected;
  bool all_finite;       // every kept token is counted
  BoundedWeight weight;  // of every token with x < infinity, if weights are not per token
};

// The sum of the mask of the tokens with x < infinity, which weights and rules of sequences use. If
// it is 0, there is no number for rules to compare, and no weight.
inline double seen_length(const double* totals) { return totals[kCounted] + totals[kExcluded]; }

// The number that a rule over sequences compares with its bounds.
inline double number_of(const Rule& rule, const double* of_rule, double seen) {
  switch (rule.over) {
    case Over::kMean:
      return of_rule[kRuleTotal] / seen;
    case Over::kGreatest:
      return of_rule[kRuleGreatest];
    case Over::kLeast:
      return of_rule[kRuleLeast];
    default:
      return of_rule[kRuleTotal];
  }
}

inline Decision judge(const Options& options, const double* totals) {
  const double seen = seen_length(totals);
  const bool is_judged = seen > 0;
  Decision decision = {false, totals[kNonfinite] == 0, {1, false, false, false}};
  for (int i = 0; is_judged && i < options.rules_count; ++i) {
    const Rule& rule = options.rules[i];
    if (rule.over == Over::kToken) continue;
    const double number = number_of(rule, totals + rows_of_totals(i), seen);
    decision.rejected |= !(number >= rule.low && number <= rule.high);
  }
  if (is_judged && options.weighs_sequences()) {
    // The log of a weight is the sum of x, and its mean for "geometric" weights.
    const double length = options.weight == Weight::kSequence ? 1 : seen;
    const double log =
        totals[kExcluded] > 0 ? -INFINITY : totals[kStatisticsSums + sum_of<statistics::k1>];
    decision.weight = bounded_weight(options, log / length);
  }
  return decision;
}

constexpr int rows_of_table(int rules) { return kRolloutStatistics + rules * kRuleTotals; }

// A sequence with known totals, as the rows of statistics::RolloutTable read it.
struct Sequence {
  const double* totals;
  Decision decision;
  bool per_token;  // each token has its own weight. If false, all have the decision's weight.
  double length, tokens, counted, finite_tokens;
  double weighed;  // sum of the mask of the tokens that have a weight

  Sequence(const Options& options, const double* of_sequence, const Decision& decided)
      : totals(of_sequence),
        decision(decided),
        per_token(options.weight == Weight::kToken),
        length(totals[kLength]),
        tokens(totals[kTokens]),
        counted(totals[kCounted]),
        finite_tokens(tokens - totals[kNonfinite]),
        weighed(options.weighs_sequences() ? seen_length(totals) : counted) {}

  double nonfinite() const { return totals[kNonfinite]; }
  double rejected() const { return totals[kRejected]; }
  double lost_tokens() const { return totals[kRejectedTokens]; }
  double least() const { return extreme(totals[kLeast]); }
  double greatest() const { return extreme(totals[kGreatest]); }
  double least_weight() const { return extreme_weight(kLeastWeight); }
  double greatest_weight() const { return extreme_weight(kGreatestWeight); }
  double below() const { return number(kBelow, decision.weight.below); }
  double above() const { return number(kAbove, decision.weight.above); }
  double outside() const { return number(kOutside, decision.weight.outside); }

  double extreme(double value) const { return finite_tokens > 0 ? value : 0.0; }

 private:
  double extreme_weight(Total row) const {
    return extreme(per_token ? totals[row] : decision.weight.value);
  }
  double number(Total row, bool of_all) const {
    return per_token ? totals[row] : of_all ? finite_tokens : 0.0;
  }
};

// Stores the statistics of a sequence by store(row, value), in the order of RolloutStats.table().
template <typename Store>
void store_statistics(const Options& options, const double* totals, const Decision& decision,
                      const Store& store) {
  const Sequence sequence(options, totals, decision);
  int row = 0;
  for_each_row(statistics::RolloutTable(), [&](auto statistic) {
    using Row = decltype(statistic);
    if constexpr (Row::is_sum) {
      store(row++, Row::of(sequence, totals[kStatisticsSums + sum_of<Row>]));
    } else {
      store(row++, Row::of(sequence));
    }
  });
  const double seen = seen_length(totals);
  const bool is_judged = seen > 0;
  for (int i = 0; i < options.rules_count; ++i) {
    const Rule& rule = options.rules[i];
    const double* const of_rule = totals + rows_of_totals(i);
    if (rule.over == Over::kToken) {
      for (int j = 0; j < kRuleTotals; ++j) {
        const bool is_extreme = j == kRuleLeast || j == kRuleGreatest;
        store(row++, is_extreme ? sequence.extreme(of_rule[j]) : of_rule[j]);
      }
      continue;
    }
    const double number = is_judged ? number_of(rule, of_rule, seen) : 0.0;
    const double bounded = is_judged ? clamp(number, rule.low, rule.high) : 0.0;
    for (int j = 0; j < 3; ++j) store(row++, number);
    store(row++, is_judged && number < rule.low ? 1.0 : 0.0);
    store(row++, is_judged && number > rule.high ? 1.0 : 0.0);
    store(row++, bounded);
    store(row++, bounded * bounded);
  }
}

}  // namespace klfast::rollout
