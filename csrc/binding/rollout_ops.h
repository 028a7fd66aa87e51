// The binding of rollout_correction to torch, as penalty_ops.h is for the penalty. A device brings
//   static void run(const rollout::Call&, const Device&)

#pragma once

#include "binding/penalty_ops.h"
#include "rollout/totals.h"

namespace klfast::binding {

// klfast.rollout.call.RolloutChoices, RolloutNumbers, RuleChoices and RuleBounds, decoded.
inline rollout::Options rollout_options_of(const std::vector<int64_t>& choices,
                                           const std::vector<double>& numbers,
                                           const std::vector<int64_t>& rules,
                                           const std::vector<double>& bounds) {
  KLFAST_CHECK(choices.size() == 2, "choices must hold 2 integers");
  KLFAST_CHECK(numbers.size() == 5, "numbers must hold 5 numbers");
  const int64_t count = static_cast<int64_t>(bounds.size() / 2);
  KLFAST_CHECK(count <= rollout::kMostRules, "there must be at most ", rollout::kMostRules,
               " rules");
  KLFAST_CHECK(bounds.size() % 2 == 0 && rules.size() == 3 * static_cast<size_t>(count),
               "rules and bounds must hold 3 integers and 2 numbers a rule");
  rollout::Options options;
  options.weight = choice_of<rollout::Weight>(choices[0], 4, "weight");
  options.outside = choice_of<rollout::Outside>(choices[1], 2, "outside");
  options.log_floor = limit_of(numbers[0]);
  options.log_cap = limit_of(numbers[1]);
  options.log_least = limit_of(numbers[2]);
  options.floor = numbers[3];
  options.cap = limit_of(numbers[4]);
  options.rules_count = static_cast<int>(count);
  for (int64_t i = 0; i < count; ++i) {
    rollout::Rule& rule = options.rules[i];
    rule.formula = choice_of<int>(rules[3 * i], rollout::RuleTable::kSize, "formula");
    rule.over = choice_of<rollout::Over>(rules[3 * i + 1], 5, "over");
    rule.outward_only = choice_of<bool>(rules[3 * i + 2], 2, "outward_only");
    rule.low = limit_of(bounds[2 * i]);
    rule.high = limit_of(bounds[2 * i + 1]);
  }
  return options;
}

// Advantages per token or per sequence.
template <typename Tensor>
void read_advantages(const std::optional<Tensor>& advantages, const Tensor& logprobs,
                     rollout::Inputs& in) {
  const rollout::Options& options = in.options;
  const bool wanted = std::any_of(options.rules, options.rules + options.rules_count,
                                  [](const rollout::Rule& rule) { return rule.outward_only; });
  KLFAST_CHECK(wanted == advantages.has_value(),
               "advantages must go with a rule that is outward_only");
  if (!advantages.has_value()) return;
  bool per_token = advantages->dim() == logprobs.dim();
  for (int64_t i = 0; per_token && i < logprobs.dim(); ++i) {
    per_token = advantages->size(i) == logprobs.size(i);
  }
  in.has_advantage_per_token = per_token;
  const Device device = device_of(logprobs);
  in.advantages = per_token ? view_of(*advantages, device, "advantages")
                            : row_of(*advantages, in.batch.sequences, device, "advantages");
  KLFAST_CHECK(is_floating(in.advantages.dtype), "advantages must be floating");
}

template <typename On, typename Tensor>
std::tuple<Tensor, Tensor, Tensor> rollout_correction(
    Tensor logprobs, Tensor rollout_logprobs, std::optional<Tensor> mask,
    std::optional<Tensor> cu_seqlens, std::optional<Tensor> advantages,
    std::vector<int64_t> choices, std::vector<double> numbers, std::vector<int64_t> rules,
    std::vector<double> bounds) {
  rollout::Call call;
  rollout::Inputs& in = call.in;
  const Device device = device_of(logprobs);
  in.options = rollout_options_of(choices, numbers, rules, bounds);
  in.batch = batch_of(logprobs, cu_seqlens);
  in.logprobs = view_of(logprobs, device, "logprobs");
  in.rollout_logprobs =
      view_like(std::optional<Tensor>(rollout_logprobs), logprobs, "rollout_logprobs");
  in.mask = view_like(mask, logprobs, "mask");
  read_advantages(advantages, logprobs, in);
  KLFAST_CHECK(is_floating(in.logprobs.dtype) && is_floating(in.rollout_logprobs.dtype),
               "log-probs must be floating");
  in.is_double =
      in.logprobs.dtype == DType::kFloat64 || in.rollout_logprobs.dtype == DType::kFloat64;

  const ScalarType acc = in.is_double ? ScalarType::Double : ScalarType::Float;
  const std::vector<int64_t> sizes(logprobs.sizes().begin(), logprobs.sizes().end());
  const bool weighs = in.options.weight != rollout::Weight::kNone;
  Tensor weights = weighs ? empty<Tensor>(sizes, acc, device) : unwanted<Tensor>(acc, device);
  Tensor kept =
      empty<Tensor>(sizes, mask.has_value() ? mask->scalar_type() : ScalarType::Bool, device);
  Tensor table = empty<Tensor>({rollout::rows_of_table(in.options.rules_count), in.batch.sequences},
                               acc, device);
  call.out.weights = output_of(weights, weighs);
  call.out.mask = output_of(kept, true);
  call.out.table = table.mutable_data_ptr();
  if (in.batch.sequences > 0 || in.batch.tokens > 0) On::run(call, device);
  return {weights, kept, table};
}

template <typename On, typename Library>
void implement_rollout(Library& library) {
  library.impl("rollout_correction", TORCH_BOX((&rollout_correction<On, StableTensor>)));
}

}  // namespace klfast::binding
