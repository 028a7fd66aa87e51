// The formulas of the estimators: value f(x) and derivative f'(x), x = logprobs - ref_logprobs.
//
// Host and device, for float and double, no torch. To add an estimator, add its line to the table.

#pragma once

#include "math/exp_series.h"

// name, f(x), f'(x), f(x) + f'(x). T is the arithmetic's type, range says where x may lie.
//
// The sum is a factor of the gradient of w f(x) if the weight w = exp(logprobs - old_logprobs) is
// differentiated too. k3's sum is exactly x, where f(x) + f'(x) would cancel e^-x against itself.
#define KLFAST_ESTIMATORS(ESTIMATOR)                                                            \
  ESTIMATOR(k1, x, T(1), x + T(1))                                                              \
  ESTIMATOR(abs, magnitude(x), sign(x), magnitude(x) + sign(x))                                 \
  ESTIMATOR(k2, T(0.5) * x * x, x, T(0.5) * x * x + x)                                          \
  ESTIMATOR(k3, expm1_minus_argument<range>(-x), -expm1<range>(-x), x)                          \
  ESTIMATOR(k3_ref, expm1_minus_argument<range>(x), expm1<range>(x),                            \
            expm1_minus_argument<range>(x) + expm1<range>(x))                                   \
  ESTIMATOR(r_log_r, exp<range>(x) * finite_below(x), exp<range>(x) * (T(1) + finite_below(x)), \
            exp<range>(x) * (T(1) + finite_below(x) + finite_below(x)))

namespace klfast::estimators {

using namespace klfast::math;

#define KLFAST_DEFINE_FORMULA(NAME, FORMULA)               \
  template <Range range = Range::kAnywhere, typename T>    \
  static KLFAST_HOST_DEVICE T NAME([[maybe_unused]] T x) { \
    return FORMULA;                                        \
  }

#define KLFAST_DEFINE_ESTIMATOR(NAME, VALUE, DERIVATIVE, SUM) \
  struct NAME {                                               \
    static constexpr const char* name = #NAME;                \
    KLFAST_DEFINE_FORMULA(value, VALUE)                       \
    KLFAST_DEFINE_FORMULA(derivative, DERIVATIVE)             \
    KLFAST_DEFINE_FORMULA(value_plus_derivative, SUM)         \
  };
KLFAST_ESTIMATORS(KLFAST_DEFINE_ESTIMATOR)
#undef KLFAST_DEFINE_FORMULA
#undef KLFAST_DEFINE_ESTIMATOR

// index_of_k1 and so on, in the order of the table.
#define KLFAST_INDEX_OF(NAME, ...) index_of_##NAME,
enum Index { KLFAST_ESTIMATORS(KLFAST_INDEX_OF) };
#undef KLFAST_INDEX_OF

#define KLFAST_NAME_OF(NAME, ...) NAME::name,
inline constexpr const char* kNames[] = {KLFAST_ESTIMATORS(KLFAST_NAME_OF)};
#undef KLFAST_NAME_OF

}  // namespace klfast::estimators
