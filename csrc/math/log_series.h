// log(1 + a) for a > -1 without cancellation near 0, for float and double, host and device.
//
// Let s = a / (2 + a). Nothing cancels in these forms:
//   log(1 + a) = 2 atanh(s) = 2 s + 2 s^3 P(s^2),
//   log(1 + a) - a = -a s + 2 s^3 P(s^2).
// A power of two first brings 1 + a to [0.75, 1.5).

#pragma once

#include "math/exp_series.h"

namespace klfast::math {

// P for s^2 in [0, 0.04]. For float it is minimax with a relative error of 2e-9, and for double a
// Taylor series.
template <int k, typename T>
KLFAST_HOST_DEVICE T atanh_taylor(T p, T z) {
  p = fma(p, z, 1.0 / (2 * k + 3));
  if constexpr (k > 0) return atanh_taylor<k - 1>(p, z);
  return p;
}
template <typename T>
KLFAST_HOST_DEVICE T atanh_series(T z) {
  if constexpr (sizeof(Scalar<T>) == 8) {
    return atanh_taylor<10>(T(0), z);
  } else {
    const T high = fma(fma(0.118854248054f, z, 0.142657637253f), z, 0.200001632887f);
    return fma(high, z, 0.333333331249f);
  }
}

// a / b for b in [1.75, 2.5).
template <typename T>
KLFAST_HOST_DEVICE T divide(T a, T b) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(b));
    const float quotient = a * reciprocal;
    return fma(fma(-quotient, b, a), reciprocal, quotient);
  }
#endif
  return a / b;
}

template <typename T>
struct Log1p {
  T power;  // log(1 + a) = power ln 2 + rest
  T rest;
  T minus_argument;  // log(1 + a) - a

  KLFAST_HOST_DEVICE T value() const { return fma(power, T(0.6931471805599453), rest); }
  // u - log(1 + a). The two may be nearly equal.
  KLFAST_HOST_DEVICE T subtracted_from(T u) const {
    using C = Constants<T>;
    return fma(-power, T(C::kLn2Low), fma(-power, T(C::kLn2High), u)) - rest;
  }
};

template <typename T>
KLFAST_HOST_DEVICE Log1p<T> log1p(T a) {
  using C = Constants<T>;
  using Bits = typename C::Bits;
  // 1 + a = 2^n (1 + reduced). 1 + reduced is in [0.75, 1.5), so n = 0 near a = 0.
  const T sum = T(1) + a;
  const auto quarter = Scalar<Bits>(1) << (C::kMantissaBits - 1);
  const Bits n = ((bit_cast<Bits>(sum) + quarter) >> C::kMantissaBits) - C::kExponentBias;
  const T power = power_of_two<T>(-n);
  const T reduced = select(n == 0, a, fma(sum, power, T(-1)));
  const T s = divide(reduced, T(2) + reduced);
  const T cubic = T(2) * s * (s * s) * atanh_series(s * s);
  Log1p<T> log = {static_cast<T>(n), fma(T(2), s, cubic), T(0)};
  log.minus_argument = select(n == 0, fma(-reduced, s, cubic), log.value() - a);
  return log;
}

// log(v) for a normal v > 0.
template <typename T>
KLFAST_HOST_DEVICE T log(T v) {
  using C = Constants<T>;
  using Bits = typename C::Bits;
  // v = 2^n (1 + a), with 1 + a in [0.75, 1.5).
  const auto quarter = Scalar<Bits>(1) << (C::kMantissaBits - 1);
  const Bits n = ((bit_cast<Bits>(v) + quarter) >> C::kMantissaBits) - C::kExponentBias;
  const T a = v * power_of_two<T>(-n) - T(1);
  return fma(static_cast<T>(n), T(0.6931471805599453), log1p(a).rest);
}

}  // namespace klfast::math
