// exp(x), expm1(x) and expm1(x) - x, accurate to about 1.5e-7 relative in float everywhere.
//
// All three share one series, q(r) = (e^r - 1 - r) / r^2 on |r| <= 1. A formula and its derivative
// therefore cost one evaluation after inlining. At |x| = 1e-4 the textbook form exp(x) - 1 - x has
// lost every digit, and expm1(x) - x half of them. The functions have no branches, so compilers
// vectorise them.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "math/host_device.h"

namespace klfast::math {

template <typename T>
struct Constants;

// The type of a number's constants. If T is a block of numbers (device/cpu/simd.h), it is the type
// of an element.
template <typename T>
struct ScalarOf {
  using type = T;
};
template <typename T>
using Scalar = typename ScalarOf<T>::type;
template <typename T>
inline constexpr bool is_block = !std::is_same_v<Scalar<T>, T>;

template <>
struct Constants<float> {
  using Bits = int32_t;
  using Unsigned = uint32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr Bits kExponentBias = 127;
  static constexpr float kInfinity = INFINITY;
  static constexpr float kLargest = 3.402823466e38f;
  static constexpr float kLogLargest = 88.722831f;  // exp is finite up to here
  static constexpr float kRound = 12582912.0f;      // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kLog2E = 1.44269504f;
  static constexpr float kLn2High = 0.693359375f;  // 9 bits: n * kLn2High is exact
  static constexpr float kLn2Low = -2.12194440e-4f;
  static constexpr float kExpLowest = -104.0f;   // exp is 0 below
  static constexpr float kExpm1Lowest = -86.0f;  // expm1 is -1 long before
  static constexpr float kExpHighest = 89.0f;    // infinity from here
  // Minimax of q on [-1, 1] with the first coefficient fixed, relative error 4.9e-9.
  static constexpr int kTerms = 8;
  static constexpr float kSeries[kTerms] = {0.5f,
                                            0.166666669663f,
                                            0.0416667167458f,
                                            0.00833330976887f,
                                            0.00138858199459f,
                                            0.000198444321603f,
                                            2.53333219881e-5f,
                                            2.76900869497e-6f};
};

template <>
struct Constants<double> {
  using Bits = int64_t;
  using Unsigned = uint64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr Bits kExponentBias = 1023;
  static constexpr double kInfinity = INFINITY;
  static constexpr double kLargest = 1.7976931348623157e308;
  static constexpr double kLogLargest = 709.782712893384;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLog2E = 1.4426950408889634;
  static constexpr double kLn2High = 0x1.62e42feep-1;  // 32 bits: n * kLn2High is exact
  static constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr double kExpLowest = -746.0;
  static constexpr double kExpm1Lowest = -700.0;
  static constexpr double kExpHighest = 710.0;
  // Minimax of q on [-1, 1] with the first coefficient fixed, relative error 1e-20.
  static constexpr int kTerms = 16;
  static constexpr double kSeries[kTerms] = {0.5,
                                             0.16666666666666666668,
                                             0.041666666666666667069,
                                             0.0083333333333333327188,
                                             0.0013888888888888784992,
                                             0.00019841269841270523869,
                                             0.000024801587301677832945,
                                             2.7557319223668027305e-6,
                                             2.7557319186660467528e-7,
                                             2.5052108457492125763e-8,
                                             2.0876765204425626223e-9,
                                             1.6059035937541744641e-10,
                                             1.1469753095732968047e-11,
                                             7.6474673963897267435e-13,
                                             4.8414927989976931443e-14,
                                             2.8218321405309491675e-15};
};

template <typename To, typename From>
KLFAST_HOST_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  if constexpr (!is_block<From>) {
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
  } else {
    return from.template cast<To>();
  }
}

// condition ? a : b without a branch, because a branch may keep a compiler from vectorising.
template <typename Condition, typename T>
KLFAST_HOST_DEVICE T select(Condition condition, T a, T b) {
#ifdef __CUDA_ARCH__
  return condition ? a : b;
#else
  if constexpr (!std::is_arithmetic_v<Condition>) {
    return condition.select(a, b);
  } else if constexpr (is_block<T>) {
    return condition ? a : b;  // one condition for all elements
  } else {
    using Bits = typename Constants<T>::Bits;
    const Bits mask = -static_cast<Bits>(condition);
    return bit_cast<T>((bit_cast<Bits>(a) & mask) | (bit_cast<Bits>(b) & ~mask));
  }
#endif
}

template <typename T>
KLFAST_HOST_DEVICE typename Constants<T>::Bits magnitude_bits(T x) {
  using Bits = typename Constants<T>::Bits;
  using Bit = Scalar<Bits>;
  return bit_cast<Bits>(x) & static_cast<Bit>(~(Bit(1) << (8 * sizeof(Bit) - 1)));
}

template <typename T>
KLFAST_HOST_DEVICE T magnitude(T x) {
  return bit_cast<T>(magnitude_bits(x));
}

// -1, 0 or 1. NaN stays NaN.
template <typename T>
KLFAST_HOST_DEVICE T sign(T x) {
  return select(x > T(0), T(1), select(x < T(0), T(-1), x));
}

// max(x, -1000). exp is 0 below -1000, and 0 times -infinity would be NaN.
template <typename T>
KLFAST_HOST_DEVICE T finite_below(T x) {
  return select(x < T(-1000), T(-1000), x);
}

// NaN stays NaN.
template <typename T>
KLFAST_HOST_DEVICE T clamp(T x, T lo, T hi) {
  if constexpr (is_block<T>) return x.at_least(lo).at_most(hi);
  x = select(x < lo, lo, x);
  return select(x > hi, hi, x);
}

// min(x, hi) and max(x, lo). NaN stays NaN. Each is one instruction on a host, and select() is two.
template <typename T>
KLFAST_HOST_DEVICE T at_most(T x, Scalar<T> hi) {
  if constexpr (is_block<T>)
    return x.at_most(hi);
  else
    return hi < x ? hi : x;
}
template <typename T, typename Low>
KLFAST_HOST_DEVICE T at_least(T x, Low lo) {
  if constexpr (is_block<T>)
    return x.at_least(lo);
  else
    return lo > x ? lo : x;
}

// 2^n for a normal result.
template <typename T>
KLFAST_HOST_DEVICE T power_of_two(typename Constants<T>::Bits n) {
  using C = Constants<T>;
  // The sum is unsigned, because n may have any value if the argument was NaN.
  using Unsigned = typename C::Unsigned;
  const Unsigned biased = static_cast<Unsigned>(n) + static_cast<Unsigned>(C::kExponentBias);
  return bit_cast<T>(static_cast<Unsigned>(biased << C::kMantissaBits));
}

// The base of exponentials and logarithms. In base 2, arguments are in bits, and the exponential of
// a float is one instruction on a device.
enum class Base { kE, kTwo };

// The number of nats in a unit of a base's logarithms.
template <Base base>
inline constexpr double kNats = base == Base::kTwo ? 0.69314718055994530942 : 1.0;

// The range of an argument. kNear promises |x| <= 1 and omits the range reduction. The bits of the
// result are the same.
enum class Range { kNear, kAnywhere };

// True if |x| is at most 1 nat.
template <Base base = Base::kE, typename T>
KLFAST_HOST_DEVICE auto is_near(T x) {
  constexpr auto limit = Scalar<T>(1 / kNats<base>);
#ifdef __CUDA_ARCH__
  return fabs(x) <= limit;  // the absolute value is part of the comparison
#else
  return magnitude(x) <= limit;
#endif
}

// x = n ln2 + r and tail = e^r - 1 - r. If |x| <= 1, n is 0. Otherwise |r| <= ln2 / 2.
template <typename T>
struct Reduced {
  typename Constants<T>::Bits n;
  T r;
  T tail;
};

// a * b + c, rounded once if the machine has an instruction for it. CUDA kernels are compiled
// without contraction. They fuse only here, so every copy of a formula gives the same bits. Host
// compilers contract the plain expression. GCC does so for blocks only at -O3, which unrolls them.
template <typename A, typename B, typename C>
KLFAST_HOST_DEVICE auto fma(A a, B b, C c) {
#if defined(__CUDA_ARCH__) || defined(KLFAST_EMULATE_CUDA)
  if constexpr (is_block<A>) {
    return a.times_plus(b, c);
  } else if constexpr (is_block<B>) {
    return b.times_plus(a, c);
  } else {
    return std::fma(a, b, c);
  }
#else
  return a * b + c;
#endif
}

// a * b + c. In float the product is not rounded on any instruction set. In the exponents of a row
// of logits, a large product and c cancel, and the rounding of the product would be an error of the
// result.
template <typename T>
KLFAST_HOST_DEVICE T fma_of_exact_product(T a, Scalar<T> b, Scalar<T> c) {
#if defined(__CUDA_ARCH__) || defined(KLFAST_EMULATE_CUDA) || defined(__FMA__) || \
    defined(__ARM_FEATURE_FMA)
  return fma(a, b, c);
#else
  if constexpr (sizeof(Scalar<T>) == 8) {
    return fma(a, b, c);
  } else if constexpr (std::is_same_v<T, float>) {
    return static_cast<float>(static_cast<double>(a) * static_cast<double>(b) +
                              static_cast<double>(c));
  } else {
    return a.fma_in_double(b, c);
  }
#endif
}

// The series of a base. On a device, base 2 serves only sums over a vocabulary, and one term less
// is enough for them. The relative error is then 9e-8, of which 3e-10 is in the first coefficient.
template <Base base, typename T>
struct SeriesOf : Constants<T> {};
#if defined(__CUDACC__) || defined(KLFAST_EMULATE_CUDA)
template <>
struct SeriesOf<Base::kTwo, float> {
  static constexpr int kTerms = 7;
  static constexpr double kSeries[kTerms] = {0.5,
                                             0.1666669347938452,
                                             0.0416665599615253,
                                             0.008331017067311602,
                                             0.001389079133096488,
                                             0.00020319303366182865,
                                             2.497999387080688e-5};
};
#endif

// The coefficient of r^k in q(r), times nats^(k + 2) for an r in units of the base. It is a
// compile-time constant, because device code cannot index a constexpr array of the host.
template <Base base, int n>
inline constexpr double kPowerOfNats = kNats<base> * kPowerOfNats<base, n - 1>;
template <Base base>
inline constexpr double kPowerOfNats<base, 0> = 1;
template <Base base, int k, typename T>
inline constexpr T kCoefficient =
    static_cast<T>(static_cast<double>(SeriesOf<base, T>::kSeries[k]) * kPowerOfNats<base, k + 2>);

// q * r^(k + 1) + the series' terms from k down.
template <Base base, int k, typename T>
KLFAST_HOST_DEVICE T horner(T q, T r) {
  q = fma(q, r, kCoefficient<base, k, Scalar<T>>);
  if constexpr (k > 0) return horner<base, k - 1>(q, r);
  return q;
}

// (e^x - 1 - x) / r^2, where x is r in nats.
template <Base base = Base::kE, typename T>
KLFAST_HOST_DEVICE T series(T r) {
  constexpr int last = SeriesOf<base, Scalar<T>>::kTerms - 1;
  return horner<base, last - 1>(T(kCoefficient<base, last, Scalar<T>>), r);
}

// The series' terms of r^k, r^(k + 2), ..., as a polynomial of z = r^2.
template <int k, typename T>
KLFAST_HOST_DEVICE T every_second_term(T z) {
  if constexpr (k + 2 >= Constants<T>::kTerms)
    return kCoefficient<Base::kE, k, Scalar<T>>;
  else
    return fma(every_second_term<k + 2>(z), z, kCoefficient<Base::kE, k, Scalar<T>>);
}

// The even and the odd terms of series(r). They give the series of r and of -r for little more than
// the cost of one.
template <typename T>
struct SeriesParts {
  T even, odd;

  KLFAST_HOST_DEVICE T at(T r) const { return fma(odd, r, even); }
};

template <typename T>
KLFAST_HOST_DEVICE SeriesParts<T> series_parts(T r) {
  return {every_second_term<0>(r * r), every_second_term<1>(r * r)};
}

template <Range range, typename T>
KLFAST_HOST_DEVICE Reduced<T> reduce(T x, [[maybe_unused]] T lowest) {
  using C = Constants<T>;
  using Bits = typename C::Bits;
  if constexpr (range == Range::kNear) {
    return {0, x, x * x * series(x)};
  } else {
    x = clamp(x, lowest, T(C::kExpHighest));
    const T shifted = select(is_near(x), T(0), x * C::kLog2E) + C::kRound;
    const Bits n = bit_cast<Bits>(shifted) - bit_cast<Bits>(T(C::kRound));
    const T n_float = shifted - C::kRound;
    const T r = fma(-n_float, T(C::kLn2Low), x - n_float * C::kLn2High);
    return {n, r, r * r * series(r)};
  }
}

template <Range range, typename T>
KLFAST_HOST_DEVICE T exp(T x) {
  using C = Constants<T>;
  const Reduced<T> e = reduce<range>(x, T(C::kExpLowest));
  const T near = T(1) + (e.r + e.tail);
  if constexpr (range == Range::kNear) return near;
  // 2^n is two factors, so that it does not overflow or underflow before the result does.
  const auto half = e.n >> 1;
  return near * power_of_two<T>(half) * power_of_two<T>(e.n - half);
}

// 2^n e^r for floats, |r| <= ln2 / 2 and a normal result. e^r = 1 + r + r^2 q(r), where q is
// minimax with a relative error of 3e-9.
template <typename T>
KLFAST_HOST_DEVICE T reduced_term(T r, typename Constants<T>::Bits n) {
  constexpr float q[] = {0.500000009569f, 0.166665183039f, 0.041666204166f, 0.00836895370837f,
                         0.00139506003022f};
  const T tail = r * r * fma(fma(fma(fma(q[4], r, q[3]), r, q[2]), r, q[1]), r, q[0]);
  return (1.0f + (r + tail)) * power_of_two<T>(n);
}

// True if a type has fraction() and times_power_of_two() (device/cpu/simd.h).
template <typename T>
inline constexpr bool splits_exponents = false;

// 2^r for |r| <= 1/2, or for 0 <= r <= 1 if the type splits exponents. The polynomials are minimax
// with a relative error of 3e-9.
template <typename T>
KLFAST_HOST_DEVICE T exp2_series(T r) {
  constexpr bool is_above_0 = splits_exponents<T>;
  constexpr float c[] = {
      is_above_0 ? 0.69314706f : 0.693147182f,     is_above_0 ? 0.24022931f : 0.240226477f,
      is_above_0 ? 0.055485282f : 0.0555035993f,   is_above_0 ? 0.0096754515f : 0.00961850584f,
      is_above_0 ? 0.0012467847f : 0.00133908063f, is_above_0 ? 0.00021612915f : 0.000153264642f};
  const T high = fma(fma(fma(c[5], r, c[4]), r, c[3]), r, c[2]);
  return fma(fma(fma(high, r, c[1]), r, c[0]), r, 1.0f);
}

// e^x or 2^x as a term of a sum over a vocabulary. In float it takes half of the instructions of
// exp(). It is exactly 0 if it would be below e^-87, because the sum is 1 or more. On a host it is
// at most e^88 in base e, and in base 2 at most 2^126 or infinite beyond 2^127. The relative error
// is 1.5e-7, and 1e-7 (1 + |x|) in base e on a device.
template <Base base = Base::kE, typename T>
KLFAST_HOST_DEVICE T exp_term(T x) {
  using C = Constants<float>;
  if constexpr (sizeof(Scalar<T>) == 8) {
    return exp<Range::kAnywhere>(base == Base::kTwo ? x * kNats<base> : x);
  } else {
#ifdef __CUDA_ARCH__
    if constexpr (is_block<T>) {
      return x.each([](float element) { return exp_term<base>(element); });
    } else {
      float result;
      const float bits = base == Base::kTwo ? x : x * C::kLog2E;
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(bits));
      return result;
    }
#else
    using Bits = typename Constants<T>::Bits;
    using Unsigned = typename Constants<T>::Unsigned;
    if constexpr (base == Base::kTwo && splits_exponents<T>) {
      return exp2_series(x.fraction()).times_power_of_two(x);
    } else if constexpr (base == Base::kTwo) {
      // The lowest bits of `shifted` are the biased exponent of 2^n. At -127 they are 0, and 2^n
      // becomes 0.
      constexpr float round = C::kRound + static_cast<float>(C::kExponentBias);
      const T held = at_least(at_most(x, 126.0f), -127.0f);
      const T shifted = held + round;
      const T power = bit_cast<T>(static_cast<Unsigned>(bit_cast<Unsigned>(shifted) << 23));
      return exp2_series(held - (shifted - round)) * power;
    } else {
      const T held = at_most(x, 88.0f);  // below -87 the result is 0
      const T shifted = fma(held, C::kLog2E, C::kRound);
      // The difference is unsigned, because n may have any value below -87.
      const auto n =
          static_cast<Bits>(bit_cast<Unsigned>(shifted) - bit_cast<Unsigned>(T(C::kRound)));
      const T n_float = shifted - C::kRound;
      const T r = fma(-n_float, C::kLn2Low, fma(-n_float, C::kLn2High, held));
      return select(x < T(-87.0f), T(0), reduced_term(r, n));
    }
#endif
  }
}

// e^x - 1 and e^x - 1 - x. One reduction serves both. The second is never negative. It is exactly 0
// at 0, and infinite at both infinities.
template <typename T>
struct Expm1 {
  T value;
  T minus_argument;
};

template <Range range, typename T>
KLFAST_HOST_DEVICE Expm1<T> expm1_of(T x) {
  using C = Constants<T>;
  const Reduced<T> e = reduce<range>(x, T(C::kExpm1Lowest));
  const T near = e.r + e.tail;
  if constexpr (range == Range::kNear) {
    return {near, e.tail};
  } else {
    const T half_power = power_of_two<T>(e.n - 1);  // half of 2^n, because 2^n may overflow
    // For n = 0 this equals `near`, except that half of a subnormal number is rounded.
    const T far = T(2) * (half_power * near + (half_power - T(0.5)));
    const T below_infinity = at_most(x, C::kExpHighest);
    const auto is_small = is_near(x);
    const T value = select(is_small, near, far);
    return {value, select(is_small, e.tail, value - below_infinity)};
  }
}

template <Range range, typename T>
KLFAST_HOST_DEVICE T expm1(T x) {
  return expm1_of<range>(x).value;
}

template <Range range, typename T>
KLFAST_HOST_DEVICE T expm1_minus_argument(T x) {
  return expm1_of<range>(x).minus_argument;
}

}  // namespace klfast::math
