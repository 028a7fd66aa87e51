// Rules: after the tokens of a tile they are read again for each rule, while they are in a cache.

#pragma once

#include "rollout/cuda_far.h"

namespace klfast::rollout::cuda {

// The tokens of a lane; all of one that is not counted is 0. A rule over sequences counts those
// that the policy excludes, with an x of -infinity.
template <typename Acc, int n>
struct RuleTokens {
  Acc logprob[n];
  Acc rollout_logprob[n];
  Acc counted[n];   // the mask's weight
  unsigned rising;  // a bit where an advantage is positive

  __device__ __forceinline__ Acc x(int i) const { return logprob[i] - rollout_logprob[i]; }
};

// A lane's sums under one rule.
template <typename Acc>
struct RuleSums {
  Acc total = 0;
  Acc least = Acc(INFINITY);
  Acc greatest = Acc(-INFINITY);
  int below = 0;
  int above = 0;
  Acc bounded = 0;
  Acc bounded_squares = 0;
};

// Element i of an array, without indexing registers at run time.
template <typename Acc, int n, typename Of>
__device__ __forceinline__ Acc pick_of(int i, const Of& of) {
  Acc picked = of(0);
#pragma unroll
  for (int j = 1; j < n; ++j) picked = i == j ? of(j) : picked;
  return picked;
}

template <typename F, typename Acc, int n>
__device__ __forceinline__ void numbers_at_once(const RuleTokens<Acc, n>& tokens,
                                                Acc (&numbers)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const Acc x = tokens.x(i);
    const Pair<Acc> pair = {tokens.logprob[i], tokens.rollout_logprob[i], x};
    numbers[i] = F::template at<Range::kNear>(pair);
  }
}

// The same for long formulas, of which several at a time would take too many registers.
template <typename F, typename Acc, int n>
__device__ __forceinline__ void numbers_one_by_one(const RuleTokens<Acc, n>& tokens,
                                                   Acc (&numbers)[n]) {
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    const Acc a = pick_of<Acc, n>(i, [&](int j) { return tokens.logprob[j]; });
    const Acc b = pick_of<Acc, n>(i, [&](int j) { return tokens.rollout_logprob[j]; });
    const Acc number = F::template at<Range::kAnywhere>(Pair<Acc>{a, b, a - b});
#pragma unroll
    for (int j = 0; j < n; ++j) numbers[j] = i == j ? number : numbers[j];
  }
}

// Whether a formula is short where every |x| of a warp is 1 at most, or anywhere: then all tokens
// of a lane take it at once. Those of estimators in the table are.
template <typename F>
inline constexpr bool kIsShortNear = std::is_same_v<F, of_k3>;
template <typename F>
inline constexpr bool kIsShort = false;
template <typename Estimator>
inline constexpr bool kIsShort<of_estimator<Estimator>> = true;

template <typename Acc, int n>
__device__ __forceinline__ void numbers_of(int formula, const RuleTokens<Acc, n>& tokens,
                                           Acc (&numbers)[n]) {
  visit_row(RuleTable(), formula, [&](auto row) {
    using F = decltype(row);
    if constexpr (kIsShort<F>) return numbers_at_once<F>(tokens, numbers);
    if constexpr (kIsShortNear<F>) {
      bool is_far = false;
#pragma unroll
      for (int i = 0; i < n; ++i) is_far |= !is_near(tokens.x(i));
      if (!__any_sync(0xffffffffu, is_far)) return numbers_at_once<F>(tokens, numbers);
    }
    numbers_one_by_one<F>(tokens, numbers);
  });
}

// Adds tokens to a rule's sums of a lane. Returns a bit for each token that a rule over tokens
// rejects.
template <typename Acc, int n>
__device__ __forceinline__ unsigned add_to_rule(const Rule& rule, const RuleTokens<Acc, n>& tokens,
                                                const Acc (&numbers)[n], RuleSums<Acc>& sums) {
  const Acc low = static_cast<Acc>(rule.low), high = static_cast<Acc>(rule.high);
  const bool is_over_tokens = rule.over == Over::kToken;
  unsigned rejected = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const Acc number = numbers[i], m = tokens.counted[i], x = tokens.x(i);
    if (m == Acc(0)) continue;
    sums.total += m * number;
    sums.least = least_number(sums.least, number);
    sums.greatest = greatest_number(sums.greatest, number);
    if (!is_over_tokens) continue;
    const bool below = number<low, above = number> high;
    const bool rising = (tokens.rising >> i & 1u) != 0;
    const bool outward = !rule.outward_only || (rising ? x > Acc(0) : x < Acc(0));
    const Acc bounded = clamp(number, low, high);
    sums.below += below;
    sums.above += above;
    sums.bounded += m * bounded;
    sums.bounded_squares += m * (bounded * bounded);
    if ((below || above) && outward) rejected |= 1u << i;
  }
  return rejected;
}

// Which of the tokens from `position` of the segment on have a positive advantage: a bit each.
template <int W>
__device__ __forceinline__ unsigned load_rising(const rollout::Inputs& in, const Span& span,
                                                int position) {
  const View& view = in.advantages;
  const int64_t stride = in.has_advantage_per_token ? view.column_stride : 0;
  unsigned rising = 0;
  visit_dtype(view.dtype, [&](auto zero) {
    using From = decltype(zero);
    if constexpr (is_floating<From>) {
      using Number = std::conditional_t<std::is_same_v<From, double>, double, float>;
      const From* const from = static_cast<const From*>(view.data) + span.advantages;
#pragma unroll
      for (int i = 0; i < W; ++i) {
        if (position + i >= span.size) continue;
        if (convert<Number>(from[(position + i) * stride]) > Number(0)) rising |= 1u << i;
      }
    }
  });
  return rising;
}

template <typename T, bool kBools, int W, typename Acc = typename Source<T>::Acc>
__device__ __forceinline__ RuleTokens<Acc, W> load_tokens(const rollout::Inputs& in,
                                                          const Span& span, const Place& at,
                                                          const Rule& rule) {
  const auto a = fetch<T, W>(in.logprobs, span.logprobs, span.size, at);
  const auto b = fetch<T, W>(in.rollout_logprobs, span.rollout_logprobs, span.size, at);
  Chunk<Acc, W> weights;
  View mask = in.mask;
  mask.dtype = mask_dtype<kBools>(mask.dtype);
  load_weights(mask, span.mask, span.size, at, weights);
  RuleTokens<Acc, W> tokens;
  tokens.rising = 0;
#pragma unroll
  for (int i = 0; i < W; ++i) {
    const Acc logprob = convert<Acc>(a.element[i]);
    const Acc rollout_logprob = convert<Acc>(b.element[i]);
    const Acc x = logprob - rollout_logprob, m = weights.element[i];
    const bool is_excluded = rule.over != Over::kToken && x == -Acc(INFINITY);
    const bool is_counted = m != Acc(0) && (magnitude(x) < Acc(INFINITY) || is_excluded);
    tokens.logprob[i] = is_counted ? logprob : Acc(0);
    tokens.rollout_logprob[i] = is_counted ? rollout_logprob : Acc(0);
    tokens.counted[i] = is_counted ? m : Acc(0);
  }
  return tokens;
}

// Adds the sums of a warp's lanes to a rule's rows.
template <typename Acc>
__device__ __forceinline__ void add_lanes_to(const Rule& rule, const RuleSums<Acc>& sums,
                                             double* rows) {
  const int lane = threadIdx.x % kWarp;
  double own = add_lanes(sums.total);  // of this lane's row
  const Acc least = combine_lanes<Minimum>(sums.least);
  const Acc greatest = combine_lanes<Maximum>(sums.greatest);
  own = lane == kRuleLeast ? least : own;
  own = lane == kRuleGreatest ? greatest : own;
  int count = 3;
  if (rule.over == Over::kToken) {
    constexpr int kField = 16;  // bits of a number
    static_assert(8 * sizeof(unsigned) * kWarp < 1 << kField, "a lane has a bit for each token");
    const int counts = add_lanes(sums.below | sums.above << kField);
    const Acc bounded = add_lanes(sums.bounded);
    const Acc bounded_squares = add_lanes(sums.bounded_squares);
    own = lane == kRuleBelow ? counts & ((1 << kField) - 1) : own;
    own = lane == kRuleAbove ? counts >> kField : own;
    own = lane == kRuleBounded ? bounded : own;
    own = lane == kRuleBoundedSquares ? bounded_squares : own;
    count = kRuleTotals;
  }
  if (lane < count) rows[lane] = combine(how_of(kTotals + lane), rows[lane], own);
}

// Zeroes the masks of rejected tokens of a tile, a bit each, and adds them to the rows of a warp.
template <typename T, bool kBools, typename Acc>
__device__ __forceinline__ void reject(const Task<Acc>& task, const Span& span, int first,
                                       unsigned rejected, double* rows) {
  const View& mask = task.call.in.mask;
  const int number = add_lanes(__popc(rejected));
  if (number == 0) return;
  Acc sum = 0;
#pragma unroll 1
  for (unsigned bits = rejected; bits != 0; bits &= bits - 1) {
    const int position = position_of<T>(first, bits);
    sum += read_mask<Acc, kBools>(mask, span.mask + position * mask.column_stride);
    store_zero<kBools>(task.call.out.mask, span.index + position);
  }
  sum = add_lanes(sum);
  if (threadIdx.x % kWarp == 0) {
    rows[kWarpRejected] += sum;
    rows[kWarpRejectedTokens] += number;
  }
}

// Adds the tokens [first, end) of a tile under all rules to the rows of a warp, and rejects some.
template <typename T, bool kBools, typename Acc>
__device__ __forceinline__ void run_rules(const Task<Acc>& task, const Span& segment, int first,
                                          int end, double* rows) {
  constexpr int W = kWidth<T>;
  const rollout::Inputs& in = task.call.in;
  unsigned rejected = 0;
#pragma unroll 1
  for (int i = 0; i < in.options.rules_count; ++i) {
    const Rule& rule = in.options.rules[i];
    RuleSums<Acc> sums;
    visit_chunks<W>(
        segment, first, end, [&](const Span& span, const Place& at) KLFAST_INLINE_LAMBDA {
          RuleTokens<Acc, W> tokens = load_tokens<T, kBools, W>(in, span, at, rule);
          if (rule.outward_only) {
            tokens.rising = load_rising<W>(in, span, at.position);
          }
          Acc numbers[W];
          numbers_of(rule.formula, tokens, numbers);
          rejected |= add_to_rule(rule, tokens, numbers, sums) << first_bit(at.end - kWarp * W);
        });
    add_lanes_to(rule, sums, rows + kWarpRules + i * kRuleTotals);
  }
  reject<T, kBools>(task, segment, first, rejected, rows);
}

}  // namespace klfast::rollout::cuda
