// The formulas: value f(x) and derivative f'(x) of every estimator, x = logprobs - ref_logprobs.
//
// Host and device, for float and double, no torch. To add an estimator, add its line to the table.

#pragma once

#include "exp_series.h"

// name, f(x), f'(x). T is the arithmetic's type, range says where x may lie.
#define KLFAST_ESTIMATORS(ESTIMATOR)                                 \
  ESTIMATOR(k1, x, T(1))                                             \
  ESTIMATOR(abs, magnitude(x), sign(x))                              \
  ESTIMATOR(k2, T(0.5) * x * x, x)                                   \
  ESTIMATOR(k3, expm1_minus_argument<range>(-x), -expm1<range>(-x))  \
  ESTIMATOR(k3_ref, expm1_minus_argument<range>(x), expm1<range>(x)) \
  ESTIMATOR(r_log_r, exp<range>(x) * x, exp<range>(x) * (T(1) + x))

namespace klfast::estimators {

using namespace klfast::math;

#define KLFAST_DEFINE_ESTIMATOR(NAME, VALUE, DERIVATIVE)           \
  struct NAME {                                                    \
    static constexpr const char* name = #NAME;                     \
    template <Range range = Range::kAnywhere, typename T>          \
    static KLFAST_HOST_DEVICE T value([[maybe_unused]] T x) {      \
      return VALUE;                                                \
    }                                                              \
    template <Range range = Range::kAnywhere, typename T>          \
    static KLFAST_HOST_DEVICE T derivative([[maybe_unused]] T x) { \
      return DERIVATIVE;                                           \
    }                                                              \
  };
KLFAST_ESTIMATORS(KLFAST_DEFINE_ESTIMATOR)
#undef KLFAST_DEFINE_ESTIMATOR

#define KLFAST_NAME_OF(NAME, VALUE, DERIVATIVE) NAME::name,
inline constexpr const char* kNames[] = {KLFAST_ESTIMATORS(KLFAST_NAME_OF)};
#undef KLFAST_NAME_OF

}  // namespace klfast::estimators
