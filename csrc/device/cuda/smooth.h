// Chunks of a smooth segment, as words of 32 bits. Its inputs are two dense tensors of one dtype,
// and a mask of bools or none.

#pragma once

#include "device/cuda/tokens.h"

namespace klfast::cuda {

// Spreads two bits over a word: the highest bit of byte `low` fills its lower half, and the highest
// bit of byte `high` its upper half.
__device__ __forceinline__ uint32_t spread_signs(uint32_t word, unsigned low, unsigned high) {
#ifdef __CUDA_ARCH__
  uint32_t spread;
  asm("prmt.b32 %0, %1, 0, %2;"
      : "=r"(spread)
      : "r"(word), "r"(0x8888u + low * 0x0011u + high * 0x1100u));
  return spread;
#else
  const auto has_sign = [&](unsigned byte) { return (word >> (8 * byte + 7) & 1u) != 0; };
  return (has_sign(low) ? 0x0000ffffu : 0u) | (has_sign(high) ? 0xffff0000u : 0u);
#endif
}

// The kept tokens of a chunk: the highest bit of a token's byte is set if it is kept.
template <int W>
struct Kept {
  uint32_t words[W / 4];

  // Any byte but 0 is true, as in torch.
  __device__ __forceinline__ static Kept of(const Chunk<uint32_t, W / 4>& bytes) {
    Kept kept;
#pragma unroll
    for (int i = 0; i < W / 4; ++i) {
      const uint32_t word = bytes.element[i];
      kept.words[i] = ((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word;
    }
    return kept;
  }

  // The last kept token, or -1.
  __device__ __forceinline__ int last() const {
    int last = -1;
#pragma unroll
    for (int i = 0; i < W / 4; ++i) {
      const uint32_t bits = words[i] & 0x80808080u;
      if (bits != 0) last = 4 * i + (31 - __clz(bits)) / 8;
    }
    return last;
  }

  __device__ __forceinline__ int count() const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < W / 4; ++i) bits |= (words[i] & 0x80808080u) >> i;
    return __popc(bits);
  }

  // A chunk whose elements have `size` bytes, with zeros for masked tokens.
  template <int size>
  __device__ __forceinline__ Chunk<uint32_t, W * size / 4> clear(
      Chunk<uint32_t, W * size / 4> chunk) const {
#pragma unroll
    for (int i = 0; i < W * size / 4; ++i) {
      constexpr int kTokens = 4 / size;  // tokens in a word
      const int token = i * kTokens;
      const unsigned first = token % 4, last = first + kTokens - 1;
      chunk.element[i] &= spread_signs(words[token / 4], first, last);
    }
    return chunk;
  }
};

// Element i of a chunk of words, converted.
template <typename T>
__device__ __forceinline__ float element_of(const Chunk<uint32_t, 4>& words, int i) {
  if constexpr (sizeof(T) == 4) {
    return math::bit_cast<float>(words.element[i]);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const uint32_t word = words.element[i / 2];
    return math::bit_cast<float>(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
  } else {
    return convert<float>(T{static_cast<uint16_t>(words.element[i / 2] >> (16 * (i % 2)))});
  }
}

}  // namespace klfast::cuda
