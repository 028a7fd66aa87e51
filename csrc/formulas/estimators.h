// The estimators: value f(x) and derivative f'(x), x = logprobs - ref_logprobs.
//
// Host and device, for float and double, no torch. To add an estimator, write its struct and add it
// to the table at the end.

#pragma once

#include "formulas/list.h"
#include "math/exp_series.h"

namespace klfast::estimators {

using namespace klfast::math;

template <typename T>
struct Formula {
  T value;       // f(x)
  T derivative;  // f'(x)
  // f(x) + f'(x), a factor of the gradient of w f(x) if the weight w = exp(logprobs - old_logprobs)
  // is differentiated too. For k3 it is exactly x. The sum of k3's value and derivative would lose
  // digits, because their e^-x cancel.
  T value_plus_derivative;
};

// `range` says where x may lie. After inlining, fields that a caller does not use cost nothing.
#define KLFAST_FORMULA                                  \
  template <Range range = Range::kAnywhere, typename T> \
  static KLFAST_HOST_DEVICE Formula<T> at([[maybe_unused]] T x)

struct k1 {
  static constexpr const char* name = "k1";
  KLFAST_FORMULA { return {x, T(1), x + T(1)}; }
};

struct abs {
  static constexpr const char* name = "abs";
  KLFAST_FORMULA { return {magnitude(x), sign(x), magnitude(x) + sign(x)}; }
};

struct k2 {
  static constexpr const char* name = "k2";
  KLFAST_FORMULA {
    // The product equals value + x. With a sum, host compilers contract it in one kernel and not in
    // another.
    return {T(0.5) * x * x, x, x * (T(1) + T(0.5) * x)};
  }
};

struct k3 {
  static constexpr const char* name = "k3";
  KLFAST_FORMULA {
    const Expm1<T> e = expm1_of<range>(-x);
    const T near_slope = x - e.minus_argument;
    if constexpr (range == Range::kNear)
      return {e.minus_argument, near_slope, x};
    else
      return {e.minus_argument, select(is_near(x), near_slope, -e.value), x};
  }
};

struct k3_ref {
  static constexpr const char* name = "k3_ref";
  KLFAST_FORMULA {
    const Expm1<T> e = expm1_of<range>(x);
    return {e.minus_argument, e.value, e.minus_argument + e.value};
  }
};

struct r_log_r {
  static constexpr const char* name = "r_log_r";
  KLFAST_FORMULA {
    const T ratio = exp<range>(x), log_ratio = finite_below(x);
    return {ratio * log_ratio, ratio * (T(1) + log_ratio), ratio * (T(1) + log_ratio + log_ratio)};
  }
};

#undef KLFAST_FORMULA

// In the order of klfast.formulas.estimators.FORMULAS.
using EstimatorTable = List<k1, abs, k2, k3, k3_ref, r_log_r>;

}  // namespace klfast::estimators
