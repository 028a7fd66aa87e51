// Loads of a warp's tokens into registers, from any dtype, stride and alignment.
//
// A lane loads a chunk of W consecutive tokens at a time. The dtype decides W, so that a chunk
// fills a vector of 16 bytes. A token's position alone decides which lane loads it. An aligned
// chunk is loaded as vectors. An unaligned chunk (packed sequences, sliced rows) is loaded as two
// vectors that are shifted into place. A chunk at the end of a row, or with other strides, is
// loaded element by element.

#pragma once

#include <type_traits>

#include "device/cuda/device.h"
#include "tensors/convert.h"

namespace klfast::cuda {

// All inputs have the dtype T, or any dtypes if T is AnyDtype<Acc>.
template <typename Acc>
struct AnyDtype {};

template <typename T>
struct Source {
  using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
  using Element = T;  // converted after all inputs have been fetched
};

template <typename A>
struct Source<AnyDtype<A>> {
  using Acc = A;
  using Element = A;  // converted at once
};

template <typename T, int W>
struct alignas(sizeof(T) * W < 16 ? sizeof(T) * W : 16) Chunk {
  T element[W];
};

// The tokens of an input from the start of a tile on. `size` is larger than a tile if the sequence
// goes on.
template <typename T>
struct Row {
  const T* first;
  int64_t stride;
  int size;
};

template <int kBytes>
using VectorOf = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;

// The vectors of a chunk. They have at most 16 bytes, and 8 bytes if elements have 8, because such
// vectors are always aligned.
template <typename T, int W>
struct Vectors {
  static constexpr int kMost = sizeof(T) == 8 ? 8 : 16;
  static constexpr int kBytes = sizeof(T) * W < kMost ? sizeof(T) * W : kMost;
  static constexpr int kCount = sizeof(T) * W / kBytes;
  static constexpr bool kShifts = kBytes >= 4 && kBytes > sizeof(T);  // in units of 4 bytes
  using Vector = VectorOf<kBytes>;
};

// The kind of memory that is loaded. Memory that the kernel also writes must not be kReadOnly.
enum class Memory { kReadOnly, kReadWrite };

template <Memory memory, typename Vector>
__device__ __forceinline__ Vector load_vector(const Vector* from) {
  if constexpr (memory == Memory::kReadOnly) return __ldg(from);
  return *from;
}

template <typename T, int W, Memory memory = Memory::kReadOnly>
__device__ __forceinline__ Chunk<T, W> load_aligned(const T* from) {
  using Vs = Vectors<T, W>;
  union {
    typename Vs::Vector vectors[Vs::kCount];
    Chunk<T, W> chunk;
  } loaded;
#pragma unroll
  for (int i = 0; i < Vs::kCount; ++i) {
    loaded.vectors[i] = load_vector<memory>(reinterpret_cast<const typename Vs::Vector*>(from) + i);
  }
  return loaded.chunk;
}

// Moves units down by the bits of `shift` (in bytes) whose value is at most `step` units. Each bit
// moves the whole array, because a register cannot be indexed at run time.
template <int step, int n>
__device__ __forceinline__ void shift_units(uint32_t (&units)[n], unsigned shift) {
  if constexpr (step > 0) {
    const bool moves = (shift & (4u * step)) != 0;
#pragma unroll
    for (int i = 0; i < n - step; ++i) units[i] = moves ? units[i + step] : units[i];
    shift_units<step / 2>(units, shift);
  }
}

// Cuts `n` units out of a vector of `kUnits` units and the vectors that follow it. The first unit
// starts `shift` bytes inside the first vector.
template <int n, int kUnits>
__device__ __forceinline__ Chunk<uint32_t, n> cut(const Chunk<uint32_t, n + kUnits>& vectors,
                                                  unsigned shift) {
  Chunk<uint32_t, n + kUnits> units = vectors;
  shift_units<kUnits / 2>(units.element, shift);
  Chunk<uint32_t, n> chunk;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    chunk.element[i] = __funnelshift_r(units.element[i], units.element[i + 1], 8 * (shift % 4));
  }
  return chunk;
}

// A chunk that starts inside a vector. That vector and the next are loaded, and the chunk is cut
// out of them. Every loaded vector holds a byte of the chunk, so none lies outside of the chunk's
// allocation, which consists of whole vectors. If a chunk is aligned, the last vector holds none of
// its bytes: the caller must then know that the memory goes on.
template <typename T, int W>
struct Shifted {
  using Vs = Vectors<T, W>;
  static constexpr int kUnits = Vs::kBytes / 4;  // in each vector
  static constexpr int kTotal = kUnits * Vs::kCount;
  union {
    typename Vs::Vector vectors[Vs::kCount + 1];
    Chunk<uint32_t, kTotal + kUnits> units;
  };

  template <Memory memory>
  __device__ __forceinline__ void load(const T* from) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(from);
    const auto* aligned =
        reinterpret_cast<const typename Vs::Vector*>(address - address % Vs::kBytes);
#pragma unroll
    for (int i = 0; i <= Vs::kCount; ++i) vectors[i] = load_vector<memory>(aligned + i);
  }

  // The chunk that starts `shift` bytes into the first vector.
  __device__ __forceinline__ Chunk<T, W> cut(unsigned shift) const {
    return math::bit_cast<Chunk<T, W>>(cuda::cut<kTotal, kUnits>(units, shift));
  }
};

template <typename T, int W, Memory memory = Memory::kReadOnly>
__device__ __forceinline__ Chunk<T, W> load_shifted(const T* from) {
  Shifted<T, W> loaded;
  loaded.template load<memory>(from);
  return loaded.cut(reinterpret_cast<uintptr_t>(from) % Vectors<T, W>::kBytes);
}

// Loads a chunk element by element, with zeros beyond the end.
template <typename T, int W>
__device__ __forceinline__ Chunk<T, W> load_single(const Row<T>& row, int position) {
  Chunk<T, W> chunk = {};
#pragma unroll
  for (int i = 0; i < W; ++i) {
    if (position + i < row.size) chunk.element[i] = row.first[(position + i) * row.stride];
  }
  return chunk;
}

// Loads a lane's chunk at `position`. `end` is the end of its warp's chunks. All lanes of a warp
// take the same branch. Without kShifts an unaligned chunk is loaded element by element, which is
// less code for inputs that are rarely unaligned.
template <typename T, int W, bool kShifts = true>
__device__ __forceinline__ Chunk<T, W> load_chunk(const Row<T>& row, int position, int end) {
  using Vs = Vectors<T, W>;
  const T* const from = row.first + position;
  const bool dense = row.stride == 1;
  const bool aligned = reinterpret_cast<uintptr_t>(row.first) % Vs::kBytes == 0;
  if (dense && aligned && end <= row.size) return load_aligned<T, W>(from);
  if constexpr (Vs::kShifts && kShifts) {
    if (dense && !aligned && end <= row.size) return load_shifted<T, W>(from);
  }
  return load_single<T, W>(row, position);
}

// Two numbers as 16-bit elements of one 32-bit word.
template <typename To>
__device__ __forceinline__ uint32_t pack(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t packed;
  if constexpr (std::is_same_v<To, BFloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
#else
  return convert<To>(low).bits | static_cast<uint32_t>(convert<To>(high).bits) << 16;
#endif
}

template <typename To, typename Acc, int W>
__device__ __forceinline__ Chunk<To, W> convert_chunk(const Chunk<Acc, W>& values) {
  if constexpr (std::is_same_v<To, Acc>) {
    return values;
  } else if constexpr (sizeof(To) == 2 && std::is_same_v<Acc, float> && W % 2 == 0) {
    Chunk<uint32_t, W / 2> words;
#pragma unroll
    for (int i = 0; i < W / 2; ++i) {
      words.element[i] = pack<To>(values.element[2 * i], values.element[2 * i + 1]);
    }
    return math::bit_cast<Chunk<To, W>>(words);
  } else {
    Chunk<To, W> chunk;
#pragma unroll
    for (int i = 0; i < W; ++i) chunk.element[i] = convert<To>(values.element[i]);
    return chunk;
  }
}

template <typename To, int W>
__device__ __forceinline__ void store_aligned(To* to, const Chunk<To, W>& chunk) {
  using Vs = Vectors<To, W>;
  union {
    Chunk<To, W> chunk;
    typename Vs::Vector vectors[Vs::kCount];
  } stored = {chunk};
#pragma unroll
  for (int i = 0; i < Vs::kCount; ++i) {
    // One instruction. The compiler would split plain stores and merge them with store_singly().
    __stwb(reinterpret_cast<typename Vs::Vector*>(to) + i, stored.vectors[i]);
  }
}

// Stores the first `count` elements.
template <typename To, int W>
__device__ __forceinline__ void store_singly(To* to, int count, const Chunk<To, W>& chunk) {
#pragma unroll
  for (int i = 0; i < W; ++i) {
    if (i < count) to[i] = chunk.element[i];
  }
}

// Zeroes `count` elements of an output, from `index` on. Zeros of all dtypes have the same bytes,
// and a thread stores 16 of them, because a buffer may have more tokens behind its sequences than
// in them. The threads are numbered from 0 to `step`, and `first` is this thread's number.
__device__ __noinline__ inline void store_zeros(const Output& output, int64_t index, int64_t count,
                                                int first, int step) {
  if (output.data == nullptr) return;
  const int64_t size = element_size(output.dtype);
  char* const from = static_cast<char*>(output.data) + index * size;
  char* const to = from + count * size;
  char* at = from - reinterpret_cast<uintptr_t>(from) % sizeof(uint4) + sizeof(uint4) * first;
#pragma unroll 1
  for (; at < to; at += sizeof(uint4) * step) {
    if (at >= from && at + sizeof(uint4) <= to) {
      __stcs(reinterpret_cast<uint4*>(at), uint4{});
      continue;
    }
#pragma unroll 1
    for (unsigned i = 0; i < sizeof(uint4); ++i) {
      if (at + i >= from && at + i < to) at[i] = 0;
    }
  }
}

// Stores a lane's W results in consecutive places of an output. Only `count` places exist.
template <typename To, typename Acc, int W>
__device__ __forceinline__ void store_chunk(To* to, int count, const Chunk<Acc, W>& values) {
  const Chunk<To, W> chunk = convert_chunk<To>(values);
  if (count >= W && reinterpret_cast<uintptr_t>(to) % Vectors<To, W>::kBytes == 0) {
    store_aligned(to, chunk);
  } else {
    store_singly(to, count, chunk);
  }
}

}  // namespace klfast::cuda
