// Terms of a sum over a vocabulary as powers of the base that costs least: 2 for float on a device,
// whose instruction it is, and e for double.

#pragma once

#include "math/exp_series.h"

namespace klfast::math {

// base^x. A nat is kPerNat powers.
template <typename T>
struct Power;

template <>
struct Power<float> {
  static constexpr double kLogOfBase = 0.6931471805599453;
  static constexpr double kPerNat = 1.4426950408889634;

  // 0 where x < -126; relative error 1.2e-7 on a device.
  static KLFAST_HOST_DEVICE float of(float x) {
#ifdef __CUDA_ARCH__
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return x < -126.0f ? 0.0f : std::exp2(x);
#endif
  }
};

template <>
struct Power<double> {
  static constexpr double kLogOfBase = 1;
  static constexpr double kPerNat = 1;

  static KLFAST_HOST_DEVICE double of(double x) { return exp_term(x); }
};

}  // namespace klfast::math
