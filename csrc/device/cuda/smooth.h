// A warp's tokens of a smooth segment. Its inputs are two dense tensors of one dtype, and a mask of
// bools or none. Chunks may be unaligned. Each is loaded while the chunk before it is computed.

#pragma once

#include "device/cuda/tokens.h"

namespace klfast::cuda {

// A lane's chunks of a dense input. A chunk has `n` words of 32 bits. It starts at a vector of `n`
// words, or `shift` bytes after its start.
template <int n>
struct Input {
  using Words = Chunk<uint32_t, n>;

  const char* vectors;

  __device__ __forceinline__ explicit Input(const char* first) : vectors(first - shift_of(first)) {}

  __device__ static __forceinline__ unsigned shift_of(const char* first) {
    return static_cast<unsigned>(reinterpret_cast<uintptr_t>(first) % sizeof(Words));
  }

  // The vector that holds the first byte of the chunk at `byte`. It is the chunk itself if that is
  // aligned.
  __device__ __forceinline__ const char* at(unsigned byte) const {
    return in_register(vectors + static_cast<uint64_t>(byte));
  }
  __device__ static __forceinline__ Words load(const char* vector) {
    return load_aligned<uint32_t, n>(reinterpret_cast<const uint32_t*>(vector));
  }
  // Loads the vector that holds the last byte of a chunk.
  __device__ static __forceinline__ Words load_rest(const char* vector, unsigned shift) {
    return load(shift == 0 ? vector : vector + sizeof(Words));
  }
  // Loads a chunk that starts at any word.
  __device__ static __forceinline__ Words load_words(const char* first) {
    Words words;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      words.element[i] = __ldg(reinterpret_cast<const uint32_t*>(first) + i);
    }
    return words;
  }
  __device__ static __forceinline__ Words join(const Words& first, const Words& rest,
                                               unsigned shift) {
    union {
      Words vectors[2];
      Chunk<uint32_t, 2 * n> words;
    } both = {{first, rest}};
    return cut<n, n>(both.words, shift);
  }
};

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

  __device__ __forceinline__ bool has(int i) const {
    return (words[i / 4] & (0x80u << (8 * (i % 4)))) != 0;
  }

  __device__ __forceinline__ int count() const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < W / 4; ++i) bits |= (words[i] & 0x80808080u) >> i;
    return __popc(bits);
  }

  // A mask for word `index` of a chunk whose elements have `size` bytes. The bits of kept tokens
  // are set.
  template <int size>
  __device__ __forceinline__ uint32_t bits_of_word(int index) const {
    constexpr int kTokens = 4 / size;  // tokens in a word
    const int token = index * kTokens;
    const unsigned first = token % 4, last = first + kTokens - 1;
    return spread_signs(words[token / 4], first, last);
  }

  template <int size>
  __device__ __forceinline__ Chunk<uint32_t, W * size / 4> clear(
      Chunk<uint32_t, W * size / 4> chunk) const {
#pragma unroll
    for (int i = 0; i < W * size / 4; ++i) chunk.element[i] &= bits_of_word<size>(i);
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
