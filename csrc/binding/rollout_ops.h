// The binding of rollout_correction to torch. Only the CPU has kernels for it.

#pragma once

#include "binding/cpu.h"
#include "rollout/cpu.h"
#include "rollout/totals.h"

namespace klfast::binding {

// Decodes klfast.args.rollout.RolloutChoices, RolloutNumbers, RuleChoices and RuleBounds.
inline rollout::Options rollout_options_of(const std::vector<int64_t>& choices,
                                           const std::vector<double>& numbers,
                                           const std::vector<int64_t>& rules,
                                           const std::vector<double>& bounds) {
  check_size(choices, RolloutChoice::kCount, "choices");
  check_size(numbers, RolloutNumber::kCount, "numbers");
  const size_t count = bounds.size() / RuleBound::kCount;
  // A ratio is a statistic without a row of the table.
  static_assert(rollout::kMostRules == (rollout::RuleTable::kSize + 1) * rollout::kOvers);
  KLFAST_CHECK(count <= rollout::kMostRules, "there must be at most ", rollout::kMostRules,
               " rules");
  check_size(bounds, count * RuleBound::kCount, "bounds");
  check_size(rules, count * RuleChoice::kCount, "rules");
  rollout::Options options;
  options.weight =
      choice_of<rollout::Weight>(choices[RolloutChoice::kWeight], rollout::kWeights, "weight");
  options.outside =
      choice_of<rollout::Outside>(choices[RolloutChoice::kOutside], rollout::kOutsides, "outside");
  options.log_floor = limit_of(numbers[RolloutNumber::kLogFloor]);
  options.log_cap = limit_of(numbers[RolloutNumber::kLogCap]);
  options.log_least = limit_of(numbers[RolloutNumber::kLogLeast]);
  options.floor = numbers[RolloutNumber::kFloor];
  options.cap = limit_of(numbers[RolloutNumber::kCap]);
  options.rules_count = static_cast<int>(count);
  for (size_t i = 0; i < count; ++i) {
    const int64_t* const own = &rules[i * RuleChoice::kCount];
    const double* const bound = &bounds[i * RuleBound::kCount];
    rollout::Rule& rule = options.rules[i];
    rule.formula = choice_of<int>(own[RuleChoice::kFormula], rollout::RuleTable::kSize, "formula");
    rule.over = choice_of<rollout::Over>(own[RuleChoice::kOver], rollout::kOvers, "over");
    rule.outward_only = choice_of<bool>(own[RuleChoice::kOutwardOnly], 2, "outward_only");
    rule.low = limit_of(bound[RuleBound::kLow]);
    rule.high = limit_of(bound[RuleBound::kHigh]);
  }
  return options;
}

// Reads advantages, which are given per token or per sequence.
inline void read_advantages(const OptionalTensor& advantages, const Tensor& logprobs,
                            rollout::Inputs& in) {
  const rollout::Options& options = in.options;
  const bool wanted = std::any_of(options.rules, options.rules + options.rules_count,
                                  [](const rollout::Rule& rule) { return rule.outward_only; });
  KLFAST_CHECK(wanted == advantages.has_value(),
               "advantages must go with a rule that is outward_only");
  if (!advantages.has_value()) return;
  const bool per_token = have_one_shape(*advantages, logprobs);
  in.has_advantage_per_token = per_token;
  const Device device = device_of(logprobs);
  in.advantages = per_token ? view_of(*advantages, device, "advantages")
                            : row_of(*advantages, in.batch.sequences, device, "advantages");
  KLFAST_CHECK(holds_floats(in.advantages.dtype), "advantages must be floating");
}

inline std::tuple<Tensor, Tensor, Tensor> rollout_correction(
    Tensor logprobs, Tensor rollout_logprobs, OptionalTensor mask, OptionalTensor cu_seqlens,
    OptionalTensor advantages, std::vector<int64_t> choices, std::vector<double> numbers,
    std::vector<int64_t> rules, std::vector<double> bounds) {
  rollout::Call call;
  rollout::Inputs& in = call.in;
  const Device device = device_of(logprobs);
  in.options = rollout_options_of(choices, numbers, rules, bounds);
  in.batch = batch_of(logprobs, cu_seqlens);
  in.logprobs = view_of(logprobs, device, "logprobs");
  in.rollout_logprobs = view_like(OptionalTensor(rollout_logprobs), logprobs, "rollout_logprobs");
  in.mask = view_like(mask, logprobs, "mask");
  read_advantages(advantages, logprobs, in);
  KLFAST_CHECK(holds_floats(in.logprobs.dtype) && holds_floats(in.rollout_logprobs.dtype),
               "log-probs must be floating");
  in.is_double =
      in.logprobs.dtype == DType::kFloat64 || in.rollout_logprobs.dtype == DType::kFloat64;

  const ScalarType acc = in.is_double ? ScalarType::Double : ScalarType::Float;
  const std::vector<int64_t> sizes(logprobs.sizes().begin(), logprobs.sizes().end());
  const bool weighs = in.options.weight != rollout::Weight::kNone;
  OptionalTensor weights;
  if (weighs) weights = empty(sizes, acc, device);
  Tensor kept = empty(sizes, mask.has_value() ? mask->scalar_type() : ScalarType::Bool, device);
  Tensor table =
      empty({rollout::rows_of_table(in.options.rules_count), in.batch.sequences}, acc, device);
  call.out.weights = output_of(weights);
  call.out.mask = output_of(kept);
  call.out.table = table.mutable_data_ptr();
  if (in.batch.sequences > 0 || in.batch.tokens > 0) {
    cpu::rollout_correction(call, threads());
  }
  return {or_empty(weights, table), kept, table};
}

}  // namespace klfast::binding
