// Evaluates groups of tokens. All passes use it, wherever they read the tokens from. Kernels that
// are compiled once per instruction set include this file. Everything here but the longer formulas
// is inlined into them.

#pragma once

#include <algorithm>

#include "device/cpu/ahead.h"
#include "device/cpu/lanes.h"
#include "formulas/token.h"
#include "penalty/cpu_sums.h"
#include "tensors/convert.h"

namespace klfast::cpu {
namespace {

// A group in the arithmetic's type. Differences are 0 where masked.
template <typename Acc>
struct Group {
  const Acc* log_ratio;       // logprobs - ref_logprobs
  const Acc* log_importance;  // logprobs - old_logprobs, or null
  const Acc* weights;         // of the mask

  KLFAST_HOST_DEVICE Group from(int64_t first) const {
    return {log_ratio + first, log_importance == nullptr ? nullptr : log_importance + first,
            weights + first};
  }
};

// The outputs of a pass, from some token on. An output that is not wanted is null.
template <typename Acc, typename Grad = Acc>
struct Outputs {
  Acc coef;
  Acc grad_scale;
  Acc* value;
  Grad* grad;
  Grad* grad_ref;

  KLFAST_HOST_DEVICE Outputs from(int64_t first) const {
    const auto at = [&](auto* output) { return output == nullptr ? nullptr : output + first; };
    return {coef, grad_scale, at(value), at(grad), at(grad_ref)};
  }
  KLFAST_HOST_DEVICE void fetch() const {
    if (value != nullptr) fetch_group(value);
    if (grad != nullptr) fetch_group(grad);
    if (grad_ref != nullptr) fetch_group(grad_ref);
  }
  KLFAST_HOST_DEVICE bool differentiates() const { return grad != nullptr || grad_ref != nullptr; }
};

// The output that a plain pass stores.
enum class Store { kNothing, kValue, kGradient };

// A 1 that the compiler does not know. The value is multiplied by it, so that this product is
// rounded before it is added, like a product with a weight. Without it a compiler contracts the
// value's own products into the sum, which gives other bits.
inline float unknown_one() {
  volatile float one = 1;
  return one;
}

// Adds a group's kept tokens to the counts of a tile's lanes. A count is one byte.
KLFAST_HOST_DEVICE void count_group(const Bool* mask, uint8_t* lanes) {
  static_assert(kTileTokens % kLanes == 0 && kTileTokens / kLanes <= 255);
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = static_cast<uint8_t>(lanes[lane] + (mask[lane].byte != 0));
  }
}

// Evaluates fp32 groups with weights of 0 and 1, and without limits and importance weights. The
// gradient is the gradient of the value itself. `sums` are the sums of a tile.
template <typename E, Store stores, Depth depth>
class Plain {
 public:
  static constexpr Depth kDepth = depth;

  KLFAST_HOST_DEVICE Plain(const Limits<float>&, LaneSums<float>& sums)
      : sums_(sums), one_(unknown_one()) {}

  template <typename Grad>
  KLFAST_HOST_DEVICE void add(bool is_near, const float* log_ratio, const Bool* mask,
                              const Outputs<float, Grad>& outputs) {
    if (is_near) {
      add_near(one_, log_ratio, mask, outputs, sums_);
    } else {
      add_far(one_, log_ratio, mask, outputs, sums_);
    }
    count_group(mask, kept_);
  }

  // Call this at the end of a tile.
  KLFAST_HOST_DEVICE void finish() {
    add_derived<depth, E>(kept_, sums_);
    std::fill(kept_, kept_ + kLanes, 0);
  }

 private:
  LaneSums<float>& sums_;
  alignas(64) uint8_t kept_[kLanes] = {};  // tokens per lane
  const float one_;

  // Adds the token of a lane, or the tokens of a block whose lanes begin there. `outputs` are their
  // outputs.
  template <Range range, typename T, typename Grad>
  static KLFAST_HOST_DEVICE void add(float one, const T& x, const T& weight, int64_t lane,
                                     const Outputs<float, Grad>& outputs, LaneSums<float>& sums) {
    const auto formula = E::template at<range>(x);
    const T value = one * formula.value;
    if constexpr (stores == Store::kValue) store_in_order(outputs.coef * value, outputs.value);
    if constexpr (stores == Store::kGradient) {
      store_in_order(outputs.grad_scale * (weight * formula.derivative), outputs.grad);
    }
    add_token<depth, E>(sums, lane, Observation<range, T>{value, one, x, 0});
  }

  template <typename Grad>
  static KLFAST_HOST_DEVICE void add_near(float one, const float* log_ratio, const Bool* mask,
                                          const Outputs<float, Grad> outputs,
                                          LaneSums<float>& sums) {
#pragma GCC ivdep
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      add<Range::kNear>(one, log_ratio[lane], convert<float>(mask[lane]), lane, outputs.from(lane),
                        sums);
    }
  }

  // Evaluates two vectors at a time. A token beyond 1 nat makes both take the whole formula. The
  // function is not inlined, because its constants would take the registers of the loop over
  // groups.
  template <typename Grad>
  static __attribute__((noinline)) void add_far(float one, const float* log_ratio, const Bool* mask,
                                                const Outputs<float, Grad>& outputs,
                                                LaneSums<float>& sums) {
    using B = Block<float, 2>;
    for (int64_t lane = 0; lane < kLanes; lane += B::kSize) {
      const B x = load<B>(log_ratio + lane), weight = Kept<2>(mask + lane).of(1);
      const Outputs<float, Grad> to = outputs.from(lane);
      if (are_within(x, 1.0f)) {
        add<Range::kNear>(one, x, weight, lane, to, sums);
      } else {
        add<Range::kAnywhere>(one, x, weight, lane, to, sums);
      }
    }
  }
};

// The results of a group's tokens, with the fields of Token, and their importance weights.
template <typename Acc>
struct GroupResults {
  using Bits = typename math::Constants<Acc>::Bits;
  alignas(64) Acc values[kLanes];
  alignas(64) Acc derivatives[kLanes];
  alignas(64) Acc ref_derivatives[kLanes];
  alignas(64) Bits clipped[kLanes];
  alignas(64) Acc importances[kLanes];
  alignas(64) Bits limited[kLanes];
};

// The bound on |x|, and on |log w| of importance weights w, up to which no limit of an estimator
// acts. It is at most 1. It is negative if a limit may act on any token. An estimator is largest at
// an end of [-1, 1].
template <typename E, typename Acc>
Acc free_range(const Limits<Acc>& limit) {
  using std::min;
  const Acc of_x = min(min(-limit.low, limit.high), limit.tail);
  const Acc range = min(min(of_x, limit.log_cap), Acc(1));
  const Acc most_weight = limit.clip_weighted ? Acc(3) : Acc(1);  // a weight is at most e
  for (const Acc x : {Acc(-1), Acc(1)}) {
    const Acc value = E::template at<Range::kNear>(x).value;
    if (!(math::magnitude(value) * most_weight < limit.kl_clip)) return -1;
  }
  return range;
}

// Adds a group on which no limit acts to the sums, and writes its results. The bits are the same as
// from evaluate_far_group() and add_results(), for a third of the work. Derivatives are computed
// only if they are wanted.
template <typename E, Depth depth, bool weighs, bool differentiates, typename Acc>
KLFAST_HOST_DEVICE void add_near_group(const Limits<Acc>& limit, const Group<Acc>& group, Acc one,
                                       GroupResults<Acc>& results, LaneSums<Acc>& sums) {
  const bool k2_gradient = limit.k2_gradient, detached = limit.detached,
             clip_weighted = limit.clip_weighted;
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const Acc x = group.log_ratio[lane];
    const Acc weight = group.weights[lane];
    const auto formula = E::template at<Range::kNear>(x);
    const auto k2 = estimators::k2::at(x);
    const Acc df = math::select(k2_gradient, k2.derivative, formula.derivative);
    Acc value = weight * formula.value;
    if constexpr (weighs) {
      const Acc importance = math::exp<Range::kNear>(group.log_importance[lane]);
      const Acc scale = weight * importance;
      value =
          math::select(clip_weighted, weight * (importance * formula.value), scale * formula.value);
      if constexpr (differentiates) {
        const Acc both =
            math::select(k2_gradient, k2.value_plus_derivative, formula.value_plus_derivative);
        results.derivatives[lane] = scale * math::select(detached, df, both);
        results.ref_derivatives[lane] = scale * df;
      }
    } else if constexpr (differentiates) {
      results.derivatives[lane] = results.ref_derivatives[lane] = weight * df;
    }
    results.values[lane] = value;
    add_token<depth>(sums, lane, Observation<Range::kNear, Acc>{one * value, weight, x, 0});
  }
}

// Computes the results of any group. In fp32, a token with an importance weight and an extreme
// ratio is computed again in fp64. The token alone decides this. The function is not inlined,
// because its constants would take the registers of the loop over groups.
template <typename E, typename Acc>
__attribute__((noinline)) void evaluate_far_group(const Limits<Acc>& limit, const Group<Acc>& group,
                                                  GroupResults<Acc>& results) {
  const Acc *log_ratio = group.log_ratio, *log_importances = group.log_importance,
            *weights = group.weights;
  const bool weighs = log_importances != nullptr;
  typename math::Constants<Acc>::Bits extreme = 0;
  if (weighs) {
#pragma GCC ivdep
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const Importance<Acc> importance = importance_of<Acc>(limit, log_importances[lane]);
      results.importances[lane] = importance.weight;
      results.limited[lane] = importance.limited;
      extreme |= is_extreme(log_ratio[lane]) | is_extreme(log_importances[lane]);
    }
  }
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const Acc weight = weights[lane];
    const Importance<Acc> importance = {results.importances[lane], results.limited[lane]};
    const Token<Acc> token =
        evaluate_token<E>(limit, weighs, weight != Acc(0), weight, log_ratio[lane], importance);
    results.values[lane] = token.value;
    results.derivatives[lane] = token.derivative;
    results.ref_derivatives[lane] = token.ref_derivative;
    results.clipped[lane] = token.clipped;
  }
  if constexpr (std::is_same_v<Acc, float>) {
    for (int64_t lane = 0; extreme && lane < kLanes; ++lane) {
      const Acc x = log_ratio[lane];
      if (!is_extreme(x) && !is_extreme(log_importances[lane])) continue;
      const Token<double> token =
          evaluate_token<E, Acc, double>(limits_as<double>(limit), weighs, weights[lane] != Acc(0),
                                         weights[lane], x, log_importances[lane]);
      results.values[lane] = static_cast<Acc>(token.value);
      results.derivatives[lane] = static_cast<Acc>(token.derivative);
      results.ref_derivatives[lane] = static_cast<Acc>(token.ref_derivative);
      results.clipped[lane] = static_cast<typename math::Constants<Acc>::Bits>(token.clipped);
    }
  }
}

// Adds a group's results to its sums.
template <Depth depth, typename Acc>
KLFAST_HOST_DEVICE void add_results(const Group<Acc>& group, const GroupResults<Acc>& results,
                                    LaneSums<Acc>& sums) {
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    add_token<depth>(
        sums, lane,
        Observation<Range::kAnywhere, Acc>{results.values[lane], group.weights[lane],
                                           group.log_ratio[lane], results.clipped[lane]});
  }
}

// to = factor * from, for an output that is wanted.
template <typename Acc, typename To>
KLFAST_HOST_DEVICE void store_group(Acc factor, const Acc* from, To* to) {
  if (to == nullptr) return;
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) to[lane] = convert<To>(factor * from[lane]);
}

// Evaluates groups with any options, and with gradients for both log-probs.
template <typename E, Depth depth, typename Acc>
class Any {
 public:
  static constexpr Depth kDepth = depth;

  KLFAST_HOST_DEVICE Any(const Limits<Acc>& limits, LaneSums<Acc>& sums)
      : sums_(sums),
        limits_(limits),
        range_(free_range<E>(limits)),
        one_(static_cast<Acc>(unknown_one())) {
    std::fill(results_.importances, results_.importances + kLanes, Acc(1));
    std::fill(results_.limited, results_.limited + kLanes, 0);
  }

  template <typename Grad>
  KLFAST_HOST_DEVICE void add(const Group<Acc>& group, const Outputs<Acc, Grad>& outputs) {
    const bool weighs = group.log_importance != nullptr;
    if (are_within(group.log_ratio, range_) &&
        (!weighs || are_within(group.log_importance, range_))) {
      add_near(group, weighs, outputs.differentiates());
    } else {
      evaluate_far_group<E>(limits_, group, results_);
      add_results<depth>(group, results_, sums_);
    }
    store_group(outputs.coef, results_.values, outputs.value);
    store_group(outputs.grad_scale, results_.derivatives, outputs.grad);
    store_group(-outputs.grad_scale, results_.ref_derivatives, outputs.grad_ref);
  }

  KLFAST_HOST_DEVICE void finish() {}

 private:
  LaneSums<Acc>& sums_;
  GroupResults<Acc> results_;
  const Limits<Acc> limits_;
  const Acc range_;
  const Acc one_;

  KLFAST_HOST_DEVICE void add_near(const Group<Acc>& group, bool weighs, bool differentiates) {
    const auto add = [&](auto weighs_too, auto differentiates_too) KLFAST_INLINE_LAMBDA {
      add_near_group<E, depth, weighs_too(), differentiates_too()>(limits_, group, one_, results_,
                                                                   sums_);
    };
    constexpr std::true_type kYes;
    constexpr std::false_type kNo;
    if (weighs) {
      differentiates ? add(kYes, kYes) : add(kYes, kNo);
    } else {
      differentiates ? add(kNo, kYes) : add(kNo, kNo);
    }
  }
};

}  // namespace
}  // namespace klfast::cpu
