// `Packed` is the number that a formula takes where tokens lie side by side in registers. On a B200
// (sm_100) one instruction multiplies, adds or fuses two floats, with the bits of two instructions.
// Elsewhere it is one float: ptxas of 13.0 makes two instructions of a pair on sm_120.

#pragma once

#include "math/exp_series.h"

namespace klfast::math {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200

class TwoFloats {
 public:
  TwoFloats() = default;
  __device__ __forceinline__ TwoFloats(float both) : floats_{both, both} {}
  template <typename To>
  __device__ __forceinline__ To cast() const {
    To to;
    std::memcpy(&to, floats_, sizeof(to));
    return to;
  }
  template <typename Function>
  __device__ __forceinline__ TwoFloats each(const Function& function) const {
    return {function(floats_[0]), function(floats_[1])};
  }

  __device__ __forceinline__ TwoFloats times_plus(TwoFloats b, TwoFloats c) const {
    uint64_t sum;
    asm("fma.rn.f32x2 %0, %1, %2, %3;" : "=l"(sum) : "l"(bits()), "l"(b.bits()), "l"(c.bits()));
    return bit_cast<TwoFloats>(sum);
  }
  friend __device__ __forceinline__ TwoFloats operator*(TwoFloats a, TwoFloats b) {
    uint64_t product;
    asm("mul.rn.f32x2 %0, %1, %2;" : "=l"(product) : "l"(a.bits()), "l"(b.bits()));
    return bit_cast<TwoFloats>(product);
  }
  friend __device__ __forceinline__ TwoFloats operator+(TwoFloats a, TwoFloats b) {
    uint64_t sum;
    asm("add.rn.f32x2 %0, %1, %2;" : "=l"(sum) : "l"(a.bits()), "l"(b.bits()));
    return bit_cast<TwoFloats>(sum);
  }
  // ptxas makes the negation of a float a part of the instruction that takes the pair.
  friend __device__ __forceinline__ TwoFloats operator-(TwoFloats a) {
    return {-a.floats_[0], -a.floats_[1]};
  }
  friend __device__ __forceinline__ TwoFloats operator-(TwoFloats a, TwoFloats b) { return a + -b; }

 private:
  __device__ __forceinline__ TwoFloats(float first, float second) : floats_{first, second} {}
  __device__ __forceinline__ uint64_t bits() const { return cast<uint64_t>(); }

  float floats_[2];
};

template <>
struct ScalarOf<TwoFloats> {
  using type = float;
};
template <>
struct Constants<TwoFloats> : Constants<float> {};

template <typename T>
using Packed = std::conditional_t<std::is_same_v<T, float>, TwoFloats, T>;

#else

template <typename T>
using Packed = T;

#endif

// The elements of a number, which is Packed<T> or T.
template <typename T, typename Number>
struct Unpacked {
  static constexpr int kSize = sizeof(Number) / sizeof(T);
  T element[kSize];
};
template <typename T, typename Number>
__device__ __forceinline__ Unpacked<T, Number> unpacked(Number number) {
  return bit_cast<Unpacked<T, Number>>(number);
}

// The number of the first elements of an array.
template <typename Number, typename T>
__device__ __forceinline__ Number packed(const T* elements) {
  Unpacked<T, Number> some;
#pragma unroll
  for (int i = 0; i < some.kSize; ++i) some.element[i] = elements[i];
  return bit_cast<Number>(some);
}

}  // namespace klfast::math
