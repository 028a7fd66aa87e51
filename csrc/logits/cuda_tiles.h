// Rows of logits in tiles. After each tile a warp checks its sums.
//
// A tile has kTile chunks for every lane, 512 bytes apart. The warps of a block take tiles in
// turns, starting at the row's first tile. So the words that a lane reads depend only on the number
// of warps, and not on the parts in which a row is summed.

#pragma once

#include "logits/cuda_rows.h"

namespace klfast::cuda {

inline constexpr int kTile = 4;  // chunks of a lane
inline constexpr int kStepBytes = kWarp * static_cast<int>(sizeof(Raw));

template <typename T>
inline constexpr int kStepWords = kWarp * kChunk<T>;
template <typename T>
inline constexpr int kTileWords = kTile * kStepWords<T>;

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }

template <typename T>
__device__ __forceinline__ Raw nothing_loaded() {
  union {
    T elements[kChunk<T>];
    Raw raw;
  } nothing;
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) nothing.elements[i] = minus_infinity<T>();
  return nothing.raw;
}

// A chunk without the words for which leaves_out(place in the chunk).
template <typename T, typename LeavesOut>
__device__ __forceinline__ Raw without(const Raw& raw, const LeavesOut& leaves_out) {
  union {
    T elements[kChunk<T>];
    Raw raw;
  } left;
  left.raw = raw;
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) {
    if (leaves_out(i)) left.elements[i] = minus_infinity<T>();
  }
  return left.raw;
}

// True if all chunks of all rows are aligned vectors, as in most tensors. Kernels are compiled for
// such rows and for any rows. One kernel for both would need more registers than four blocks leave.
inline bool is_smooth(const LogitsShape& shape, const Logits& logits, int chunk) {
  const auto is_whole = [&](int64_t words) { return words % chunk == 0; };
  return reinterpret_cast<uintptr_t>(logits.data) % sizeof(Raw) == 0 && logits.word_stride == 1 &&
         is_whole(shape.words) && is_whole(logits.outer_stride) && is_whole(logits.inner_stride);
}

// A row in memory, of logits of type T.
template <typename T, bool kSmooth>
struct TiledRow {
  const char* first;
  int64_t stride;
  int words;

  __device__ __forceinline__ TiledRow(const char* first, int64_t stride, int64_t words)
      : first(first), stride(stride), words(static_cast<int>(words)) {}

  __device__ __forceinline__ int tiles() const {
    return (words + kTileWords<T> - 1) / kTileWords<T>;
  }
  // The number of leading tiles in which every lane has four chunks that are aligned vectors.
  __device__ __forceinline__ int smooth_tiles() const {
    return kSmooth ? words / kTileWords<T> : 0;
  }

  // The lane's first chunk of a smooth tile.
  __device__ __forceinline__ const char* own_chunk(int tile) const {
    return first + static_cast<int64_t>(tile) * (kTile * kStepBytes) +
           static_cast<int>(threadIdx.x % kWarp * sizeof(Raw));
  }
  __device__ __forceinline__ static Raw load_smooth(const char* own, int k) {
    return load_aligned<uint32_t, 4>(reinterpret_cast<const uint32_t*>(own + k * kStepBytes));
  }

  // Calls visit(chunk, position of the chunk) for the lane's chunks of any tile. Two chunks are
  // loaded together.
  template <typename Visit>
  __device__ __forceinline__ void for_each_chunk(int tile, const Visit& visit) const {
    constexpr int kChunksInFlight = 2;
#pragma unroll 1
    for (int k = 0; k < kTile; k += kChunksInFlight) {
      Raw chunks[kChunksInFlight];
      const int begin = tile * kTileWords<T> + k * kStepWords<T>;
      const int own = static_cast<int>(threadIdx.x % kWarp) * kChunk<T>;
      load_chunks(begin, own, chunks);
#pragma unroll
      for (int i = 0; i < kChunksInFlight; ++i) {
        visit(opaque(chunks[i]), begin + own + i * kStepWords<T>);
      }
    }
  }

  __device__ __forceinline__ void load_smooth_tile(int tile, Raw (&chunks)[kTile]) const {
    const char* const own = own_chunk(tile);
#pragma unroll
    for (int k = 0; k < kTile; ++k) chunks[k] = load_smooth(own, k);
  }

  __device__ __forceinline__ T word(int64_t index) const {
    return reinterpret_cast<const T*>(first)[index * stride];
  }

  // Loads the chunk that starts at a word.
  __device__ __forceinline__ Raw load_chunk(int at) const {
    Raw chunk[1];
    load_chunks(at, 0, chunk);
    return chunk[0];
  }

 private:
  // Loads chunks that lie a step apart. The first starts at begin + place.
  template <int n>
  __device__ __forceinline__ void load_chunks(int begin, int place, Raw (&chunks)[n]) const {
    const int64_t offset = static_cast<int64_t>(begin) * (kSmooth ? 1 : stride);
    const char* const from = first + offset * static_cast<int>(sizeof(T));
    const int rest = words - begin - place;
#pragma unroll
    for (int k = 0; k < n; ++k) chunks[k] = nothing_loaded<T>();
    if constexpr (kSmooth) {
      const char* const own = from + place * static_cast<int>(sizeof(T));
#pragma unroll
      for (int k = 0; k < n; ++k) {
        if (k * kStepWords<T> < rest) chunks[k] = load_smooth(own, k);
      }
    } else {
      if (stride == 1) load_shifted_vectors(from, rest, place, chunks);
#pragma unroll
      for (int k = 0; k < n; ++k) {
        const int at = k * kStepWords<T>;
        if (stride == 1 && is_shifted(at, rest)) continue;
        load_words(from, rest - at, place + at, chunks[k]);
      }
    }
  }

  // True if the chunk at `at` is loaded as two vectors. The second vector then holds a word in the
  // row: the chunk's last word, or the word after the chunk if the chunk is an aligned vector. For
  // the last chunk of an aligned row the second vector would hold none.
  __device__ __forceinline__ static bool is_shifted(int at, int rest) {
    return at + kChunk<T> < rest;
  }

  template <int n>
  __device__ __forceinline__ static void load_shifted_vectors(const char* from, int rest, int place,
                                                              Raw (&chunks)[n]) {
    Shifted<uint32_t, 4> loaded[n] = {};
    const char* const own = from + place * static_cast<int>(sizeof(T));
#pragma unroll
    for (int k = 0; k < n; ++k) {
      if (!is_shifted(k * kStepWords<T>, rest)) continue;
      loaded[k].template load<Memory::kReadOnly>(
          reinterpret_cast<const uint32_t*>(own + k * kStepBytes));
    }
    const unsigned shift = reinterpret_cast<uintptr_t>(from) % sizeof(Raw);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const Raw cut = loaded[k].cut(shift);
      if (is_shifted(k * kStepWords<T>, rest)) chunks[k] = cut;
    }
  }

  // Loads a chunk's words one by one, as far as they exist.
  __device__ __forceinline__ void load_words(const char* from, int rest, int at, Raw& chunk) const {
    union {
      T elements[kChunk<T>];
      Raw raw;
    } loaded;
    loaded.raw = chunk;
    const int64_t apart = stride * static_cast<int>(sizeof(T));
    int64_t word = reinterpret_cast<int64_t>(from) + at * apart;
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      if (i < rest) loaded.elements[i] = *reinterpret_cast<const T*>(word);
      word = opaque(word + apart);  // without this all addresses take registers at once
    }
    chunk = loaded.raw;
  }
};

}  // namespace klfast::cuda
