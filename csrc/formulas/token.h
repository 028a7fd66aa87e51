// The value and derivatives of one token under any klfast.Estimator, host and device. Kernels that
// are compiled once per instruction set include this file, so everything here is inlined into them.

#pragma once

#include <cmath>

#include "formulas/estimators.h"
#include "penalty/call.h"

namespace klfast {
namespace {

using math::Range;

template <typename Acc>
struct Limits {
  Acc low, high, tail, kl_clip, cap, log_cap;
  bool k2_gradient, detached, clip_weighted;
};

template <typename To, typename From>
KLFAST_HOST_DEVICE Limits<To> limits_as(const Limits<From>& limit) {
  return {static_cast<To>(limit.low),  static_cast<To>(limit.high),
          static_cast<To>(limit.tail), static_cast<To>(limit.kl_clip),
          static_cast<To>(limit.cap),  static_cast<To>(limit.log_cap),
          limit.k2_gradient,           limit.detached,
          limit.clip_weighted};
}

template <typename Acc>
Limits<Acc> limits_of(const EstimatorOptions& options) {
  return {static_cast<Acc>(options.log_ratio_low),
          static_cast<Acc>(options.log_ratio_high),
          static_cast<Acc>(options.linear_tail),
          static_cast<Acc>(options.kl_clip),
          static_cast<Acc>(options.importance_cap),
          static_cast<Acc>(std::log(options.importance_cap)),
          options.gradient == Gradient::kK2,
          options.importance == ImportanceGradient::kDetached,
          options.clip_weighted};
}

// The results of a token: its weighted value, and the derivatives of that value with respect to
// logprobs and to -ref_logprobs.
template <typename Acc>
struct Token {
  Acc value;
  Acc derivative;
  Acc ref_derivative;
  // 0 or 1, as wide as the other fields. With a bool, GCC keeps tokens in memory and vectorises
  // nothing.
  typename math::Constants<Acc>::Bits clipped;
};

// The importance weight w = exp(logprobs - old_logprobs).
template <typename Acc>
struct Importance {
  Acc weight = 1;
  typename math::Constants<Acc>::Bits limited =
      0;  // 1 if a limit acted on it, which makes it a constant
};

// min(w, cap). With clip_weighted, a weight that is NaN or infinite in the call's arithmetic
// becomes 0. Call is the type of this arithmetic: Acc, or float for a token that is computed again
// in fp64.
template <typename Call, typename Acc>
KLFAST_HOST_DEVICE Importance<Acc> importance_of(const Limits<Acc>& limit, Acc log_importance) {
  const bool capped = log_importance > limit.log_cap;
  const Acc log_weight = math::select(capped, limit.log_cap, log_importance);
  const bool dropped =
      limit.clip_weighted & !(log_weight <= Acc(math::Constants<Call>::kLogLargest));
  const Acc weight = math::select(capped, limit.cap, math::exp<Range::kAnywhere>(log_importance));
  return {math::select(dropped, Acc(0), weight), capped | dropped};
}

// The results of a token under all options of an Estimator. `weighs` is true if there are old
// log-probs.
//
// kl_clip acts on f, or on w f with clip_weighted. If it clips the value, no gradient passes
// through x. With clip_weighted, neither kl_clip nor log_ratio_clip then passes a gradient through
// w.
template <typename E, typename Acc>
KLFAST_HOST_DEVICE Token<Acc> evaluate_token(const Limits<Acc>& limit, bool weighs, bool keep,
                                             Acc weight, Acc x, const Importance<Acc>& importance) {
  using math::select;
  const estimators::Formula<Acc> k2 = estimators::k2::at(x);
  const bool clips_x = (limit.low > -Acc(INFINITY)) | (limit.high < Acc(INFINITY));
  const bool clips_f = limit.kl_clip < Acc(INFINITY);
  const bool differentiable = weighs & !limit.detached;
  const bool weight_limited = importance.limited != 0;

  // A clip lets NaN pass, as torch.clamp does.
  const bool outside = (x < limit.low) | (x > limit.high);
  const bool inside = (!clips_x) | ((x >= limit.low) & (x <= limit.high));
  const Acc clipped_x = select(keep, math::clamp(x, limit.low, limit.high), Acc(0));
  const Acc near_x = math::clamp(clipped_x, -limit.tail, limit.tail);
  const bool in_tail = (clipped_x < -limit.tail) | (clipped_x > limit.tail);
  const estimators::Formula<Acc> formula = E::at(near_x);
  const Acc slope = formula.derivative;
  // Adds -0, which changes nothing. Adding 0 would turn a value of -0 into 0.
  const Acc f = formula.value + select(in_tail, (clipped_x - near_x) * slope, Acc(-0.0));
  // The value on which kl_clip acts, and the factors that are applied after the clip.
  const Acc unclipped = select(limit.clip_weighted, importance.weight, Acc(1)) * f;
  const Acc scale = weight * importance.weight;
  const Acc scale_of_clipped = select(limit.clip_weighted, weight, scale);
  const bool large = math::magnitude(unclipped) > limit.kl_clip;
  const bool small = (!clips_f) | (math::magnitude(unclipped) <= limit.kl_clip);
  const Acc clipped = math::clamp(unclipped, -limit.kl_clip, limit.kl_clip);

  // Derivatives of the value divided by w: through x alone, and through x and the importance
  // weight.
  const bool alive = inside & small;
  const Acc df = select(limit.k2_gradient, k2.derivative, select(alive, slope, Acc(0)));
  const Acc through_weight = select(limit.clip_weighted, select(alive, f, Acc(0)), clipped);
  const Acc limited = select(alive & !in_tail, formula.value_plus_derivative, through_weight + df);
  const Acc through_both = select(limit.k2_gradient, k2.value_plus_derivative, limited);
  const Acc derivative = select(differentiable & !weight_limited, through_both, df);
  return {scale_of_clipped * clipped, scale * derivative, scale * df,
          keep & (outside | large | weight_limited)};
}

template <typename E, typename Call, typename Acc>
KLFAST_HOST_DEVICE Token<Acc> evaluate_token(const Limits<Acc>& limit, bool weighs, bool keep,
                                             Acc weight, Acc x, Acc log_importance) {
  const Importance<Acc> importance =
      weighs ? importance_of<Call>(limit, log_importance) : Importance<Acc>{};
  return evaluate_token<E>(limit, weighs, keep, weight, x, importance);
}

// True if the importance weight or the formula may leave fp32's range although their product does
// not.
template <typename Acc>
KLFAST_HOST_DEVICE bool is_extreme(Acc x) {
  return math::magnitude(x) > Acc(80);
}

}  // namespace
}  // namespace klfast
