// Loads rows of logits into registers, for one model or two.
//
// A thread loads a chunk of 16 bytes at a time. A word's position in the row alone decides its
// chunk. A row is padded with words that do not exist, whose logits are -infinity.

#pragma once

#include "device/cuda/load.h"
#include "formulas/divergences.h"
#include "logits/cuda_plan.h"

namespace klfast::cuda {

template <typename T>
using AccOf = typename Source<T>::Acc;
template <typename T>
using ElementOf = typename Source<T>::Element;
template <typename T>
inline constexpr bool is_any_dtype = !std::is_same_v<T, ElementOf<T>>;
template <typename T>
inline constexpr int kChunk = 16 / static_cast<int>(sizeof(ElementOf<T>));  // words

// The base of exponentials. It is 2 if there is an instruction for base 2.
template <typename Acc>
inline constexpr math::Base kBase = sizeof(Acc) == 4 ? math::Base::kTwo : math::Base::kE;
template <typename Acc>
inline constexpr double kNatsOf = math::kNats<kBase<Acc>>;

// A chunk as loaded. Its elements are converted where they are used, because a conversion waits for
// the load.
using Raw = Chunk<uint32_t, 4>;

// The same chunk, unknown to the compiler, so that its elements are converted again.
__device__ __forceinline__ Raw opaque(Raw raw) {
#ifdef __CUDA_ARCH__
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(raw.element[i]));
#endif
  return raw;
}

// A chunk of the same words from every model.
template <int kModels>
struct Fetch {
  Raw of[kModels];
};

template <typename T, int kModels>
struct Converted {
  Chunk<AccOf<T>, kChunk<T>> of[kModels];
};

template <typename T>
__device__ __forceinline__ T element_of(const Raw& raw, int i) {
  if constexpr (sizeof(T) == 2) {
    return {static_cast<uint16_t>(raw.element[i / 2] >> (16 * (i % 2)))};
  } else if constexpr (sizeof(T) == 4) {
    return math::bit_cast<T>(raw.element[i]);
  } else {
    return math::bit_cast<T>(static_cast<uint64_t>(raw.element[2 * i + 1]) << 32 |
                             raw.element[2 * i]);
  }
}

// The greater of `greatest` and a chunk's greatest logit. NaN is ignored.
template <typename T>
__device__ __forceinline__ AccOf<T> greatest_of(const Raw& raw, AccOf<T> greatest) {
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) {
    greatest = std::fmax(greatest, convert<AccOf<T>>(element_of<ElementOf<T>>(raw, i)));
  }
  return greatest;
}

// The greatest logit of a sample of a row, of which each lane has a chunk, in all lanes.
template <typename T>
__device__ __forceinline__ AccOf<T> greatest_of_sample(const Raw& raw) {
  AccOf<T> greatest = greatest_of<T>(raw, -INFINITY);
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    greatest = std::fmax(greatest, __shfl_xor_sync(0xffffffffu, greatest, step));
  }
  return greatest;
}

template <typename T, int kModels>
__device__ __forceinline__ Converted<T, kModels> convert_words(const Fetch<kModels>& fetch) {
  Converted<T, kModels> words;
#pragma unroll
  for (int m = 0; m < kModels; ++m) {
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      words.of[m].element[i] = convert<AccOf<T>>(element_of<ElementOf<T>>(fetch.of[m], i));
    }
  }
  return words;
}

// The unit and origins of a row (divergences.h), in shared memory.
template <typename Acc, int kModels>
struct Frame {
  Acc unit;
  Acc origin[kModels];

  __device__ static Frame of(const divergences::Origins& origins) {
    Frame frame;
    frame.unit = static_cast<Acc>(divergences::unit_of(origins));
    frame.origin[0] = static_cast<Acc>(origins.first);
    if constexpr (kModels == 2) frame.origin[1] = static_cast<Acc>(origins.second);
    return frame;
  }
  // Null for a row without an origin. Such a row costs one comparison per chunk.
  __device__ __forceinline__ const Frame* if_any() const { return unit == Acc(1) ? nullptr : this; }
};

template <typename T, int kModels>
__device__ __forceinline__ void place_words(Converted<T, kModels>& words,
                                            const Frame<AccOf<T>, kModels>* frame) {
  if (frame == nullptr) return;
#pragma unroll
  for (int m = 0; m < kModels; ++m) {
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      AccOf<T>& word = words.of[m].element[i];
      word = divergences::placed(word, frame->unit, frame->origin[m]);
    }
  }
}

__device__ __forceinline__ bool is_aligned(const char* address) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(Raw) == 0;
}

template <typename T>
__device__ __forceinline__ T minus_infinity() {
  if constexpr (std::is_same_v<T, BFloat16>) return {0xff80};
  if constexpr (std::is_same_v<T, Float16>) return {0xfc00};
  if constexpr (std::is_floating_point_v<T>) return -math::Constants<T>::kInfinity;
}

// The position of a thread's chunk, and the range of its warp's chunks, in a row with the words
// [low, high).
struct Stretch {
  int position;
  int first;
  int end;
  int low;
  int high;

  __device__ __forceinline__ bool is_whole() const { return first >= low && end <= high; }
  __device__ __forceinline__ bool has(int place) const { return place >= low && place < high; }
};

// Loads a chunk word by word from a row that starts at `first`. It is not inlined, because it is
// long and rare.
template <typename T>
__device__ __noinline__ Raw load_singly(const char* first, DType dtype, int64_t stride,
                                        int position, int low, int high) {
  union {
    ElementOf<T> elements[kChunk<T>];
    Raw raw;
  } loaded;
  const auto load = [&](auto zero) {
    using From = decltype(zero);
    const From* const row = reinterpret_cast<const From*>(first);
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      const int place = position + i;
      const bool exists = place >= low && place < high;
      const From word = exists ? row[place * stride] : minus_infinity<From>();
      if constexpr (is_any_dtype<T>) {
        loaded.elements[i] = convert<AccOf<T>>(word);
      } else {
        loaded.elements[i] = word;
      }
    }
  };
  if constexpr (!is_any_dtype<T>) {
    load(T());
  } else {
    visit_dtype(dtype, [&](auto zero) {
      if constexpr (is_floating<decltype(zero)>) load(zero);
    });
  }
  return loaded.raw;
}

// The size of a floating dtype in bytes.
template <typename T>
__device__ __forceinline__ int64_t size_of(DType dtype) {
  if constexpr (!is_any_dtype<T>) return sizeof(T);
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// Loads a chunk of any alignment and stride from a row that starts at `first`.
template <typename T, Memory memory>
__device__ __forceinline__ Raw load_raw(const char* first, DType dtype, int64_t stride,
                                        const Stretch& at) {
  if constexpr (!is_any_dtype<T>) {
    if (stride == 1 && at.is_whole()) {
      const auto* const from =
          reinterpret_cast<const uint32_t*>(first + at.position * static_cast<int64_t>(sizeof(T)));
      return is_aligned(first) ? load_aligned<uint32_t, 4, memory>(from)
                               : load_shifted<uint32_t, 4, memory>(from);
    }
  }
  return load_singly<T>(first, dtype, stride, at.position, at.low, at.high);
}

template <typename T>
__device__ __forceinline__ const char* address_of(const LogitsShape& shape, const Logits& logits,
                                                  int64_t row, int64_t word) {
  const int64_t offset = shape.offset(logits, row) + word * logits.word_stride;
  return static_cast<const char*>(logits.data) + offset * size_of<T>(logits.dtype);
}

// The address of a thread's chunk in a round of a dense row. `first` is the thread's chunk in the
// first round.
__device__ __forceinline__ const char* chunk_in_round(const char* first, int round) {
  constexpr unsigned bytes = kPairThreads * sizeof(Raw);
#ifdef __CUDA_ARCH__
  const char* chunk;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(chunk) : "r"(round), "r"(bytes), "l"(first));
  return chunk;
#else
  return first + static_cast<unsigned>(round) * bytes;
#endif
}

// The number of words that a block loads in a round, a chunk per thread.
template <typename T>
inline constexpr int kRoundWords = kPairThreads * kChunk<T>;

// The position where a lane's chunk starts, if a warp's chunks follow each other from 0 on.
template <typename T>
__device__ __forceinline__ int start_of_lane() {
  return static_cast<int>(threadIdx.x % kWarp) * kChunk<T>;
}

// The position where a thread or a warp starts in the first round.
template <typename T>
__device__ __forceinline__ int start_of_thread() {
  return static_cast<int>(threadIdx.x) * kChunk<T>;
}
template <typename T>
__device__ __forceinline__ int start_of_warp() {
  return start_of_thread<T>() / (kWarp * kChunk<T>)*(kWarp * kChunk<T>);
}

// The rounds of a warp in a part.
struct Rounds {
  int some;
  int whole;  // rounds in which all words exist for the warp
  int tail;   // words in the last round
};

template <typename T>
__device__ __forceinline__ Rounds rounds_of(int size) {
  constexpr int kOfWarp = kWarp * kChunk<T>;
  const int rest = size - in_register(start_of_warp<T>());
  const int before = (rest - 1) / kRoundWords<T>;
  const int left = rest - before * kRoundWords<T>;
  if (rest <= 0) return {0, 0, 0};
  return {before + 1, left < kOfWarp ? before : before + 1, left < kOfWarp ? left : kOfWarp};
}

// A part of a row in memory.
template <typename T, int kModels>
struct ReadRows {
  using Type = T;
  static constexpr int kOf = kModels;
  const Logits* logits[kModels];
  const char* own[kModels];  // the thread's first chunk, if the part is dense
  Rounds rounds;             // `whole` is 0 if chunks are not aligned, or must be converted

  // The start of the part. It is computed from `own`, because a stored address would take
  // registers.
  __device__ __forceinline__ const char* first(int model) const {
    return own[model] - opaque(threadIdx.x) * sizeof(Raw);
  }

  // Loads the thread's chunk in a round.
  __device__ __forceinline__ Fetch<kModels> load(int round) const {
    return round < rounds.whole ? load_whole(round) : load_any(round);
  }

  // Loads the thread's chunk in a round below rounds.whole.
  __device__ __forceinline__ Fetch<kModels> load_whole(int round) const {
    Fetch<kModels> fetch;
#pragma unroll
    for (int m = 0; m < kModels; ++m) {
      fetch.of[m] = load_aligned<uint32_t, 4>(
          reinterpret_cast<const uint32_t*>(chunk_in_round(own[m], round)));
    }
    return fetch;
  }

  __device__ __forceinline__ Fetch<kModels> load_any(int round) const {
    constexpr int kOfWarp = kWarp * kChunk<T>;
    const int own = static_cast<int>(opaque(start_of_thread<T>()));  // not hoisted out of a loop
    const int start = own / kOfWarp * kOfWarp;
    const int words = round == rounds.some - 1 ? rounds.tail : kOfWarp;
    const Stretch at = {own, start, start + kOfWarp, 0, start + words};
    const int64_t base = static_cast<int64_t>(round) * kRoundWords<T>;
    Fetch<kModels> fetch;
#pragma unroll
    for (int m = 0; m < kModels; ++m) {
      const int64_t offset = base * logits[m]->word_stride * size_of<T>(logits[m]->dtype);
      fetch.of[m] = load_raw<T, Memory::kReadOnly>(first(m) + offset, logits[m]->dtype,
                                                   logits[m]->word_stride, at);
    }
    return fetch;
  }
};

}  // namespace klfast::cuda
