// Gradients of a part of a row: each logit is read once, and its gradient written once.
//
// A gradient, unlike a sum, does not depend on the thread that computes it. Chunks therefore start
// at aligned vectors of the output, which are also aligned vectors of logits that lie as the output
// does.

#pragma once

#include "logits/call.h"
#include "logits/cuda_rows.h"

namespace klfast::cuda {

template <typename T, int kModels>
struct GradientPart {
  const char* from[kModels];
  DType dtype[kModels];
  int64_t stride[kModels];
  Output to[kModels];
  int64_t index;  // of the part's first word in the outputs
  int64_t size;
  int64_t target;  // place of the row's target token in the part; out of range if it is not there
  AccOf<T> target_gradient[kModels];  // added to the gradient of that word
  const Frame<AccOf<T>, kModels>* frame;
};

// The same part, read from where it is staged.
template <typename T, int kModels>
__device__ __forceinline__ GradientPart<T, kModels> of_staged(
    GradientPart<T, kModels> part, const StagedRows<T, kModels>& staged) {
#pragma unroll
  for (int m = 0; m < kModels; ++m) {
    part.from[m] = staged.first[m];
    part.stride[m] = 1;
  }
  return part;
}

template <typename To, typename Acc>
__device__ __forceinline__ uint32_t pack(Acc low, Acc high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<Acc, float>) {
    uint32_t packed;
    if constexpr (std::is_same_v<To, BFloat16>) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
  }
#endif
  return convert<To>(low).bits | static_cast<uint32_t>(convert<To>(high).bits) << 16;
}

// A chunk as stored in memory; under AnyDtype it is not converted yet.
template <typename T>
__device__ __forceinline__ Raw raw_of(const Chunk<AccOf<T>, kChunk<T>>& values) {
  if constexpr (sizeof(ElementOf<T>) == 2) {
    Raw raw;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      raw.element[i] = pack<T>(values.element[2 * i], values.element[2 * i + 1]);
    }
    return raw;
  } else {
    return math::bit_cast<Raw>(values);
  }
}

// Stores a chunk word by word in a row that starts at `first`. Not inlined, as it is long, and
// rare.
template <typename T>
__device__ __noinline__ void store_singly(char* first, DType dtype, Raw raw, int position, int low,
                                          int high) {
  const auto store = [&](auto zero) {
    using To = decltype(zero);
    To* const row = reinterpret_cast<To*>(first);
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      const int place = position + i;
      if (place < low || place >= high) continue;
      if constexpr (is_any_dtype<T>) {
        row[place] = convert<To>(element_of<AccOf<T>>(raw, i));
      } else {
        row[place] = element_of<T>(raw, i);
      }
    }
  };
  if constexpr (!is_any_dtype<T>) {
    store(T());
  } else {
    visit_dtype(dtype, [&](auto zero) {
      if constexpr (is_floating<decltype(zero)>) store(zero);
    });
  }
}

// Stores a chunk that is not read again soon, in one vector where it is aligned.
template <typename T>
__device__ __forceinline__ void stream_raw(char* first, DType dtype, const Stretch& at,
                                           const Raw& raw) {
  if constexpr (!is_any_dtype<T>) {
    char* const to = first + at.position * static_cast<int64_t>(sizeof(T));
    if (at.is_whole() && reinterpret_cast<uintptr_t>(first) % sizeof(Raw) == 0) {
      return __stcs(reinterpret_cast<uint4*>(to), math::bit_cast<uint4>(raw));
    }
  }
  store_singly<T>(first, dtype, raw, at.position, at.low, at.high);
}

// The elements between the last aligned vector of an output's memory and the start of a part.
template <typename T>
__device__ __forceinline__ int offset_in_memory(const Output& output, int64_t index) {
  const auto size = static_cast<uintptr_t>(size_of<T>(output.dtype));
  const auto place =
      reinterpret_cast<uintptr_t>(output.data) / size + static_cast<uintptr_t>(index);
  return static_cast<int>(place % static_cast<unsigned>(kChunk<T>));
}

// The place of the row's target token among this thread's chunks.
struct Target {
  int round;  // -1 if another thread has it, or none
  int place;  // in the chunk

  template <typename T>
  __device__ static Target of(int64_t word) {
    const int64_t round = word / words_of_round<T>();
    const int rest = static_cast<int>(word - round * words_of_round<T>());
    const bool is_own = word >= 0 && rest / kChunk<T> == static_cast<int>(threadIdx.x);
    return {is_own ? static_cast<int>(round) : -1, rest % kChunk<T>};
  }
};

// The addresses of a thread's chunks, if those of logits and gradients are aligned vectors.
template <typename T, int kModels>
struct Smooth {
  bool is_smooth;
  const char* from[kModels];
  char* to[kModels];

  __device__ __forceinline__ Smooth(const GradientPart<T, kModels>& part, int offset)
      : is_smooth(!is_any_dtype<T>) {
    const int64_t beyond = start_of_thread<T>() - offset;
#pragma unroll
    for (int m = 0; m < kModels; ++m) {
      from[m] = part.from[m] + beyond * static_cast<int64_t>(sizeof(ElementOf<T>));
      to[m] = static_cast<char*>(part.to[m].data) +
              (part.index + beyond) * static_cast<int64_t>(sizeof(ElementOf<T>));
      is_smooth = is_smooth && part.stride[m] == 1 && is_aligned(from[m]) &&
                  (part.to[m].data == nullptr || is_aligned(to[m]));
    }
  }

  template <Memory memory>
  __device__ __forceinline__ Fetch<kModels> load(int round) const {
    Fetch<kModels> fetch;
#pragma unroll
    for (int m = 0; m < kModels; ++m) {
      fetch.of[m] = load_aligned<uint32_t, 4, memory>(
          reinterpret_cast<const uint32_t*>(from[m] + bytes_before(round)));
    }
    return fetch;
  }

  __device__ __forceinline__ void store(int round, int model, const Raw& raw) const {
    __stcs(reinterpret_cast<uint4*>(to[model] + bytes_before(round)), math::bit_cast<uint4>(raw));
  }
};

// Writes formula(words, model) for each word and model: the gradient of that model's logit, from
// the logits of all models, in the arithmetic's type.
template <typename T, Memory memory, int kModels, typename Formula>
__device__ __forceinline__ void write_gradients(const GradientPart<T, kModels>& part,
                                                const Formula& formula) {
  if (part.to[0].data == nullptr && part.to[kModels - 1].data == nullptr) return;
  const Output& any = part.to[0].data != nullptr ? part.to[0] : part.to[kModels - 1];
  const int offset = offset_in_memory<T>(any, part.index);
  const bool has_target = part.target >= 0 && part.target < part.size;
  const Target target = Target::of<T>(has_target ? part.target + offset : -1);
  const Rounds rounds = rounds_of<T>(offset + part.size);
  const Smooth<T, kModels> smooth(part, offset);
#pragma unroll 1
  for (int round = 0; round < rounds.some; ++round) {
    const int start = static_cast<int>(opaque(start_of_warp<T>()));
    const Stretch at = {static_cast<int>(opaque(start_of_thread<T>())), start,
                        start + kWarp * kChunk<T>, round == 0 ? offset : 0,
                        start + (round == rounds.some - 1 ? rounds.tail : kWarp * kChunk<T>)};
    const int64_t base = static_cast<int64_t>(round) * words_of_round<T>() - offset;
    const bool is_smooth = smooth.is_smooth && at.is_whole();
    Fetch<kModels> fetch;
    if (is_smooth) {
      fetch = smooth.template load<memory>(round);
    } else {
#pragma unroll
      for (int m = 0; m < kModels; ++m) {
        const int64_t beyond = opaque(base) * part.stride[m] * size_of<T>(part.dtype[m]);
        fetch.of[m] = load_raw<T, memory>(part.from[m] + beyond, part.dtype[m], part.stride[m], at);
      }
    }
    auto words = convert_words<T>(fetch);
    place_words<T>(words, part.frame);
#pragma unroll
    for (int m = 0; m < kModels; ++m) {
      if (part.to[m].data == nullptr) continue;
      Chunk<AccOf<T>, kChunk<T>> gradient;
#pragma unroll
      for (int i = 0; i < kChunk<T>; ++i) {
        AccOf<T> of_word[kModels];
#pragma unroll
        for (int n = 0; n < kModels; ++n) of_word[n] = words.of[n].element[i];
        gradient.element[i] = formula(of_word, m);
      }
      if (round == target.round) {
#pragma unroll
        for (int i = 0; i < kChunk<T>; ++i) {
          gradient.element[i] += i == target.place ? part.target_gradient[m] : AccOf<T>(0);
        }
      }
      const Raw raw = raw_of<T>(gradient);
      if (is_smooth) {
        smooth.store(round, m, raw);
      } else {
        const int64_t beyond = (part.index + opaque(base)) * size_of<T>(part.to[m].dtype);
        stream_raw<T>(static_cast<char*>(part.to[m].data) + beyond, part.to[m].dtype, at, raw);
      }
    }
  }
}

// Zeroes `size` elements of an output from `index` on.
inline __device__ __noinline__ void write_zeros(const Output& output, int64_t index, int64_t size) {
  if (output.data == nullptr) return;
  const int64_t of_element = element_size(output.dtype);
  char* const first = static_cast<char*>(output.data) + index * of_element;
  char* const end = first + size * of_element;
  const auto beyond = static_cast<int>(reinterpret_cast<uintptr_t>(first) % sizeof(uint4));
  const int step = static_cast<int>(blockDim.x * sizeof(uint4));
  for (char* to = first - beyond + threadIdx.x * sizeof(uint4); to < end; to += step) {
    if (to >= first && to + sizeof(uint4) <= end) {
      __stcs(reinterpret_cast<uint4*>(to), uint4{});
      continue;
    }
    for (int i = 0; i < static_cast<int>(sizeof(uint4)); ++i) {
      if (to + i >= first && to + i < end) to[i] = 0;
    }
  }
}

}  // namespace klfast::cuda
