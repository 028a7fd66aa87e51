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

// A lane computes this many chunks at a time. Two chunks lie a warp's chunks apart.
template <typename T>
inline constexpr int kChunks = 8 / kSmoothWidth<T>;

// A lane's chunks of every input. At first they hold the vectors with the chunks' first bytes, and
// later the chunks.
template <int W, int n>
struct Loaded {
  Chunk<uint32_t, 4> first[n];
  Chunk<uint32_t, 4> second[n];
  Chunk<uint32_t, W / 4> mask[n];  // every token is kept until a mask is loaded

  __device__ __forceinline__ Loaded() {
#pragma unroll
    for (int c = 0; c < n; ++c) {
#pragma unroll
      for (int i = 0; i < W / 4; ++i) mask[c].element[i] = 0x01010101u;
    }
  }
};

// The inputs of a lane in a segment. A chunk is named by its position.
template <typename T, int W, int n>
struct Inputs {
  static constexpr int kApart = kWarp * W;  // tokens between two chunks of a lane
  Input<4> first;
  Input<4> second;
  Input<W / 4> mask;
  bool has_mask;
  unsigned shifts;  // of the three inputs, a byte each

  // Two inputs of type T, and a mask of bools or none. Each comes with the offset of the segment's
  // first token. `lane` is the position of the lane's first token. The offsets are references
  // because they lie in shared memory and are read where they are used.
  __device__ __forceinline__ Inputs(const View& a, const int64_t& offset_of_a, const View& b,
                                    const int64_t& offset_of_b, const View& mask,
                                    const int64_t& offset_of_mask, int lane)
      : Inputs(at(a, offset_of_a + lane, sizeof(T)), at(b, offset_of_b + lane, sizeof(T)),
               at(mask, offset_of_mask + lane, 1)) {}

  __device__ __forceinline__ void load(unsigned position, Loaded<W, n>& loaded) const {
    const char* const a = first.at(position * sizeof(T));
    const char* const b = second.at(position * sizeof(T));
    const char* const m = mask.at(position);
#pragma unroll
    for (int c = 0; c < n; ++c) {
      loaded.first[c] = first.load(a + c * kApart * sizeof(T));
      loaded.second[c] = second.load(b + c * kApart * sizeof(T));
      if (has_mask) loaded.mask[c] = mask.load(m + c * kApart);
    }
  }

  // Makes chunks of the vectors that have been loaded. All missing memory is requested before the
  // first of it is used. If a word is one element, chunks are loaded again: that takes fewer
  // instructions than to cut them out.
  __device__ __forceinline__ void complete(unsigned position, Loaded<W, n>& loaded) const {
    constexpr bool kCuts = sizeof(T) < 4;
    const unsigned of_a = shifts & 0xff, of_b = shifts >> 8 & 0xff, of_mask = shifts >> 16;
    const char* const a = first.at(position * sizeof(T) + (kCuts ? 0 : of_a));
    const char* const b = second.at(position * sizeof(T) + (kCuts ? 0 : of_b));
    const char* const m = mask.at(position);
    Loaded<W, n> rest;
#pragma unroll
    for (int c = 0; c < n; ++c) {
      constexpr int kBytes = kApart * sizeof(T);
      if constexpr (kCuts) {
        rest.first[c] = first.load_rest(a + c * kBytes, of_a);
        rest.second[c] = second.load_rest(b + c * kBytes, of_b);
      } else {
        loaded.first[c] = first.load_words(a + c * kBytes);
        loaded.second[c] = second.load_words(b + c * kBytes);
      }
      if (has_mask) rest.mask[c] = mask.load_rest(m + c * kApart, of_mask);
    }
#pragma unroll
    for (int c = 0; c < n; ++c) {
      if constexpr (kCuts) {
        loaded.first[c] = first.join(loaded.first[c], rest.first[c], of_a);
        loaded.second[c] = second.join(loaded.second[c], rest.second[c], of_b);
      }
      if (has_mask) loaded.mask[c] = mask.join(loaded.mask[c], rest.mask[c], of_mask);
    }
  }

 private:
  __device__ __forceinline__ Inputs(const char* a, const char* b, const char* m)
      : first(a),
        second(b),
        mask(m),
        has_mask(in_register(m != nullptr) != 0),
        shifts(Input<4>::shift_of(a) | Input<4>::shift_of(b) << 8 |
               Input<W / 4>::shift_of(m) << 16) {}

  __device__ static __forceinline__ const char* at(const View& view, int64_t element, int size) {
    const char* const data = static_cast<const char*>(view.data);
    return data == nullptr ? nullptr : data + element * size;
  }
};

// Walks over the whole steps of a smooth segment of `size` tokens. A step has n chunks of each
// lane.
//   visit(position, loaded, load_next)  takes the tokens of a step. It calls load_next() once it
//                                       has them, so that the next loads overlap with its work.
//   end_steps()                         follows the last step of a tile.
//   end_tile(tile)                      comes next if no tokens are left after the last whole step.
//                                       Otherwise `turns` says where the tile goes on.
// With `loads_across` this warp has a next tile, and loads it before the present tile has ended.
template <typename T, int W, int n, typename Visit, typename EndSteps, typename EndTile>
__device__ __forceinline__ void walk_smooth(const Inputs<T, W, n>& inputs, int size, Turns& turns,
                                            bool loads_across, const Visit& visit,
                                            const EndSteps& end_steps, const EndTile& end_tile) {
  constexpr int kStep = Inputs<T, W, n>::kApart * n;
  const int whole = size / kStep * kStep;
  int position = turns.first();
  Loaded<W, n> loaded;
  inputs.load(position, loaded);
#pragma unroll 1
  do {
    const int end = in_register(turns.end(whole));
    const int last = in_register((loads_across ? whole : end) - kStep);  // to load ahead
#pragma unroll 1
    do {
      if (inputs.shifts != 0) inputs.complete(position, loaded);
      visit(position, loaded, [&]() KLFAST_INLINE_LAMBDA {
        inputs.load(position < last ? position + kStep : last, loaded);
      });
      position += kStep;
    } while (position < end);
    end_steps();
    if (end == whole && whole < size) {
      turns.done = end - turns.first();
      return;
    }
    end_tile(turns.tile);
    turns = turns.after();
    if (!loads_across && turns.first() < whole) {
      position = turns.first();
      inputs.load(position, loaded);
    }
  } while (turns.first() < whole);
}

// Stores a chunk of results at a token's place.
template <typename To, int W>
__device__ __forceinline__ void store_smooth(const Output& output, int64_t index, bool in_vectors,
                                             const Chunk<To, W>& chunk) {
  To* const to = static_cast<To*>(output.data) + index;
  if (in_vectors) {
    store_aligned(to, chunk);
  } else {
    store_singly(to, W, chunk);
  }
}

}  // namespace klfast::cuda
