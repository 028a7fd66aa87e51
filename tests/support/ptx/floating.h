// Floating point as a device has it, beside what the host's types do.

#pragma once

#include <cmath>
#include <type_traits>

#include "types.h"

namespace ptx {

constexpr f32 kLeastNormal = 1.17549435e-38f;
constexpr f64 kLeastNormal64 = 2.2250738585072014e-308;

// A device makes one NaN, whatever NaNs it is given.
inline f32 canonical(f32 x) { return x != x ? bits_as<f32>(u32{0x7fffffff}) : x; }
inline f64 canonical(f64 x) { return x != x ? bits_as<f64>(u64{0x7ff8000000000000}) : x; }

inline f32 flush(f32 x) { return std::fabs(x) < kLeastNormal ? std::copysign(0.0f, x) : x; }
inline f64 flush(f64 x) { return std::fabs(x) < kLeastNormal64 ? std::copysign(0.0, x) : x; }

// With .ftz, subnormal operands and results are zeros.
template <bool kFlush, typename T>
inline T flush_if(T x) {
  return kFlush ? flush(x) : x;
}

// The number where one operand is NaN; -0 is less than 0.
template <typename T>
inline T least(T a, T b) {
  const T less = (a < b || (a == b && std::signbit(a))) ? a : b;
  return canonical(a != a ? b : b != b ? a : less);
}
template <typename T>
inline T greatest(T a, T b) {
  const T more = (a > b || (a == b && !std::signbit(a))) ? a : b;
  return canonical(a != a ? b : b != b ? a : more);
}
// NaN where one operand is: min.NaN, max.NaN.
template <typename T>
inline T least_or_nan(T a, T b) {
  return a != a || b != b ? canonical(a + b) : least(a, b);
}
template <typename T>
inline T greatest_or_nan(T a, T b) {
  return a != a || b != b ? canonical(a + b) : greatest(a, b);
}

// bfloat16 and half, to the nearest with ties to even.
inline f32 of_bf16(u16 bits) { return bits_as<f32>(static_cast<u32>(bits) << 16); }
inline u16 to_bf16(f32 x) {
  if (x != x) return 0x7fff;
  const u32 bits = bits_as<u32>(x);
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline f32 of_f16(u16 bits) {
  const u32 sign = static_cast<u32>(bits & 0x8000) << 16;
  const u32 exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) {
    return fraction != 0 ? canonical(NAN) : bits_as<f32>(sign | 0x7f800000);
  }
  if (exponent == 0) {  // subnormal: exact in fp32
    const f32 magnitude = static_cast<f32>(fraction) * 5.9604644775390625e-8f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return bits_as<f32>(sign | (exponent + 112) << 23 | fraction << 13);
}
inline u16 to_f16(f32 x) {
  if (x != x) return 0x7fff;
  const u32 bits = bits_as<u32>(x);
  const u32 sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x477ff000) return static_cast<u16>(sign | 0x7c00);  // from 65,520 on
  if (magnitude < 0x38800000) {  // below 2^-14: added to 0.5, the sum's last bits are the fraction
    const f32 sum = bits_as<f32>(magnitude) + 0.5f;
    return static_cast<u16>(sign | (bits_as<u32>(sum) - bits_as<u32>(0.5f)));
  }
  const u32 rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<u16>(sign | ((rounded - 0x38000000) >> 13));
}

struct BFloat16 {
  static f32 load(u16 bits) { return of_bf16(bits); }
  static u16 store(f32 x) { return to_bf16(x); }
};
struct Half {
  static f32 load(u16 bits) { return of_f16(bits); }
  static u16 store(f32 x) { return to_f16(x); }
};

// A function of one number, for both numbers of a word (.bf16x2, .f16x2, .f32x2).
template <auto F>
struct OfPairs;
template <typename One, typename... Others, One (*F)(Others...)>
struct OfPairs<F> {
  using Bits = std::conditional_t<sizeof(One) == 2, u16, u32>;
  using Word = std::conditional_t<sizeof(One) == 2, u32, u64>;
  template <typename>
  using WordOf = Word;

  static Word run(WordOf<Others>... words) {
    constexpr int kHalf = 8 * sizeof(One);
    const One low = F(bits_as<One>(static_cast<Bits>(words))...);
    const One high = F(bits_as<One>(static_cast<Bits>(words >> kHalf))...);
    return static_cast<Word>(bits_as<Bits>(high)) << kHalf | bits_as<Bits>(low);
  }
};
template <auto F>
inline constexpr auto of_pairs = &OfPairs<F>::run;

}  // namespace ptx
