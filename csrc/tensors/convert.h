// Conversion of elements of any dtype to and from the type of the arithmetic, host and device.
// Kernels that are compiled once per instruction set include this file, so everything here is
// inlined into them.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "math/exp_series.h"
#include "tensors/view.h"

namespace klfast {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Bool {
  uint8_t byte;
};

// The dtypes that log-probs and results may have.
template <typename T>
inline constexpr bool is_floating =
    std::is_floating_point_v<T> || std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>;

// As in torch, any byte of a Bool but 0 is true. Types of 16 bits are converted by way of float.
template <typename To, typename From>
KLFAST_HOST_DEVICE To convert(From from) {
  if constexpr (std::is_same_v<From, Bool>) {
    return from.byte != 0 ? To(1) : To(0);
  } else if constexpr (std::is_convertible_v<From, To>) {
    return static_cast<To>(from);
  } else {
    return convert<To>(convert<float>(from));
  }
}

template <>
KLFAST_HOST_DEVICE float convert<float>(BFloat16 from) {
  return math::bit_cast<float>(static_cast<uint32_t>(from.bits) << 16);
}

template <>
KLFAST_HOST_DEVICE float convert<float>(Float16 from) {
#ifdef __CUDA_ARCH__
  float converted;
  asm("cvt.f32.f16 %0, %1;" : "=f"(converted) : "h"(from.bits));
  return converted;
#elif defined(__aarch64__)
  // One instruction, which every aarch64 processor has, replaces four.
  __fp16 half;
  std::memcpy(&half, &from.bits, sizeof(half));
  return half;
#else
  const uint32_t magnitude = from.bits & 0x7fffu;
  const uint32_t sign = (from.bits & 0x8000u) << 16;
  // A multiplication moves the exponent from bias 15 to 127. It is right for subnormals too.
  const float finite = math::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return math::bit_cast<float>(math::bit_cast<uint32_t>(finite) | special | sign);
#endif
}

// Rounds to nearest, ties to even. NaN stays NaN.
template <>
KLFAST_HOST_DEVICE BFloat16 convert<BFloat16>(float from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  BFloat16 converted;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(converted.bits) : "f"(from));
  return converted;
#else
  const uint32_t bits = math::bit_cast<uint32_t>(from);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(from != from ? 0x7fc0u : rounded)};
#endif
}

template <>
KLFAST_HOST_DEVICE Float16 convert<Float16>(float from) {
#ifdef __CUDA_ARCH__
  Float16 converted;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(converted.bits) : "f"(from));
  return converted;
#else
  const uint32_t bits = math::bit_cast<uint32_t>(from);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results are rounded by integer arithmetic. Subnormal results are rounded by adding a
  // half: the last bit of the sum is worth 2^-24, the smallest Float16.
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  const float shifted = math::bit_cast<float>(magnitude) + 0.5f;
  const uint32_t subnormal = math::bit_cast<uint32_t>(shifted) - math::bit_cast<uint32_t>(0.5f);
  uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // values from 65520 on round to infinity
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return {static_cast<uint16_t>(half | sign)};
#endif
}

// Calls visit(T()), where T is the C++ type of a dtype.
#ifdef __CUDACC__
#pragma nv_exec_check_disable  // the visitor may be a host function
#endif
template <typename Visitor>
KLFAST_HOST_DEVICE void visit_dtype(DType dtype, const Visitor& visit) {
  switch (dtype) {
    case DType::kFloat64:
      return visit(double());
    case DType::kFloat32:
      return visit(float());
    case DType::kBFloat16:
      return visit(BFloat16());
    case DType::kFloat16:
      return visit(Float16());
    case DType::kBool:
      return visit(Bool());
    case DType::kUInt8:
      return visit(uint8_t());
    case DType::kInt8:
      return visit(int8_t());
    case DType::kInt16:
      return visit(int16_t());
    case DType::kInt32:
      return visit(int32_t());
    case DType::kInt64:
      return visit(int64_t());
  }
}

// An element of memory of any dtype, or of any floating dtype.
template <bool kIsFloating = false>
KLFAST_HOST_DEVICE double element_at(const void* data, DType dtype, int64_t index) {
  double value = 0;
  visit_dtype(dtype, [&](auto zero) KLFAST_INLINE_LAMBDA {
    using T = decltype(zero);
    if constexpr (!kIsFloating || is_floating<T>) {
      value = convert<double>(static_cast<const T*>(data)[index]);
    }
  });
  return value;
}

}  // namespace
}  // namespace klfast
