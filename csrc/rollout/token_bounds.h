// The bounds on the weight of one token. No torch.

#pragma once

#include <algorithm>
#include <cmath>

#include "formulas/rollout.h"
#include "rollout/call.h"

namespace klfast::rollout {

// The bounds on a token's weight, in the type of the arithmetic. They are infinite if weights are
// not per token.
template <typename Acc>
struct TokenBounds {
  Acc log_floor = -INFINITY, log_cap = INFINITY, log_least = -INFINITY;
  Acc floor = 0, cap = INFINITY;
  bool masks = false;  // Outside::kMask
  Acc near = 1;        // no bound acts if |x| <= near; negative if one always may

  explicit TokenBounds(const Options& options) {
    if (options.weight != Weight::kToken) return;
    log_floor = static_cast<Acc>(options.log_floor);
    log_cap = static_cast<Acc>(options.log_cap);
    log_least = static_cast<Acc>(options.log_least);
    masks = options.outside == Outside::kMask;
    floor = masks ? Acc(0) : static_cast<Acc>(options.floor);
    cap = masks ? Acc(INFINITY) : static_cast<Acc>(options.cap);
    // Slightly smaller, so that rounding cannot make a bound act on the e^x of a near token.
    near = std::min(near, Acc(1 - 1e-6) * std::min({-log_floor, log_cap, -log_least}));
  }
};

// The weight of a counted token.
template <typename Acc>
struct TokenWeight {
  Acc value;
  Acc deviation;  // value - 1
  // 0 or 1, as wide as the other fields. With bools GCC vectorises no loop over tokens.
  typename Constants<Acc>::Bits below, above, outside;
};

template <typename Acc>
KLFAST_HOST_DEVICE TokenWeight<Acc> token_weight(const TokenBounds<Acc>& bounds, Acc x,
                                                 const Exponentials<Acc>& e) {
  TokenWeight<Acc> weight;
  weight.below = x < bounds.log_least;
  weight.above = x > bounds.log_cap;
  weight.outside = (x < bounds.log_floor) | weight.above;
  const Acc bounded = clamp(e.ratio, bounds.floor, bounds.cap);
  weight.value = select(bounds.masks & (weight.outside != 0), Acc(0), bounded);
  weight.deviation = select(weight.value == e.ratio, e.growth, weight.value - Acc(1));
  return weight;
}

}  // namespace klfast::rollout
