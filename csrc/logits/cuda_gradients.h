// Gradients of a part of a row: each logit is read once, and its gradient written once.
//
// A sum depends on which thread adds what, but a gradient does not depend on the thread that
// computes it. So chunks start at aligned vectors of the output. If logits lie like the output,
// these chunks are also aligned vectors of logits.

#pragma once

#include "logits/call.h"
#include "logits/cuda_rows.h"

namespace klfast::cuda {

template <typename T, int kModels>
struct GradientPart {
  static constexpr int kOf = kModels;
  const char* from[kModels];
  DType dtype[kModels];
  int64_t stride[kModels];
  Output to[kModels];
  int64_t index;  // of the part's first word in the outputs
  int size;
  int64_t target;  // position of the row's target token in the part, or out of range
  AccOf<T> target_gradient[kModels];  // added to the gradient of the target token
  const Frame<AccOf<T>, kModels>* frame;
};

// A chunk in the dtype of memory, or not yet converted with AnyDtype.
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

// Stores a chunk word by word in a row that starts at `first`. It is not inlined, because it is
// long and rare.
template <typename T>
__device__ __noinline__ void store_singly(char* first, DType dtype, Raw raw, int position, int low,
                                          int high) {
  const auto store = [&](auto zero) {
    using To = decltype(zero);
    To* const to = reinterpret_cast<To*>(first) + position;
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      if (i < low - position || i >= high - position) continue;
      if constexpr (is_any_dtype<T>) {
        to[i] = convert<To>(element_of<AccOf<T>>(raw, i));
      } else {
        to[i] = element_of<T>(raw, i);
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

// Stores a chunk that is not read again soon. If the chunk is aligned, it is stored as one vector.
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

// The number of elements between the last aligned vector of an output's memory and the start of a
// part.
template <typename T>
__device__ __forceinline__ int offset_in_memory(const Output& output, int64_t index) {
  const auto size = static_cast<uintptr_t>(size_of<T>(output.dtype));
  const auto place =
      reinterpret_cast<uintptr_t>(output.data) / size + static_cast<uintptr_t>(index);
  return static_cast<int>(place % static_cast<unsigned>(kChunk<T>));
}

// The position of the row's target token in this thread's chunks.
struct Target {
  int round;          // -1 if not in this thread
  int place;          // in the chunk
  int round_of_warp;  // -1 if not in this warp

  template <typename T>
  __device__ static Target of(int64_t word) {
    const int64_t round = word / kRoundWords<T>;
    const int rest = static_cast<int>(word - round * kRoundWords<T>);
    const int thread = rest / kChunk<T>;
    const bool is_own = word >= 0 && thread == static_cast<int>(threadIdx.x);
    const bool is_of_warp = word >= 0 && thread / kWarp == static_cast<int>(threadIdx.x) / kWarp;
    return {is_own ? static_cast<int>(round) : -1, rest % kChunk<T>,
            is_of_warp ? static_cast<int>(round) : -1};
  }
};

// The addresses of a thread's chunks. is_smooth is true if they are aligned vectors of logits and
// gradients.
template <typename T, int kModels>
struct Smooth {
  bool is_smooth;
  bool writes[kModels];
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
      writes[m] = part.to[m].data != nullptr;
      is_smooth = is_smooth && part.stride[m] == 1 && is_aligned(from[m]) &&
                  (!writes[m] || is_aligned(to[m]));
    }
  }

  template <Memory memory>
  __device__ __forceinline__ Fetch<kModels> load(int round) const {
    Fetch<kModels> fetch;
#pragma unroll
    for (int m = 0; m < kModels; ++m) {
      fetch.of[m] = load_aligned<uint32_t, 4, memory>(
          reinterpret_cast<const uint32_t*>(chunk_in_round(from[m], round)));
    }
    return fetch;
  }

  __device__ __forceinline__ void store(int round, int model, const Raw& raw) const {
    __stcs(reinterpret_cast<uint4*>(const_cast<char*>(chunk_in_round(to[model], round))),
           math::bit_cast<uint4>(raw));
  }
};

// A mask of the lowest `count` bits of 32.
__device__ __forceinline__ unsigned bits_below(int count) {
  return count >= 32 ? ~0u : (1u << count) - 1;
}

// The chunks of a part. A thread's chunks start at aligned vectors of the output.
template <typename T, int kModels>
struct Chunks {
  int offset;  // number of words before the part in the first chunk
  Rounds rounds;
  Target target;

  __device__ __forceinline__ explicit Chunks(const GradientPart<T, kModels>& part)
      : offset(offset_in_memory<T>(part.to[0].data != nullptr ? part.to[0] : part.to[kModels - 1],
                                   part.index)),
        rounds(rounds_of<T>(offset + part.size)),
        target(Target::of<T>(part.target >= 0 && part.target < part.size ? part.target + offset
                                                                         : -1)) {}
};

// Writes the rounds whose bits are set, counted from `first`. Their chunks may be unaligned or not
// whole.
template <typename T, Memory memory, int kModels, typename Formula>
__device__ __forceinline__ void write_rounds(const GradientPart<T, kModels>& part, int first,
                                             unsigned bits, const Formula& formula) {
  const Chunks<T, kModels> chunks(part);
#pragma unroll 1
  for (int round = first; bits != 0; bits >>= 1, ++round) {
    if ((bits & 1) == 0) continue;
    const int start = static_cast<int>(opaque(start_of_warp<T>()));
    const bool is_last = round == chunks.rounds.some - 1;
    const Stretch at = {static_cast<int>(opaque(start_of_thread<T>())), start,
                        start + kWarp * kChunk<T>, round == 0 ? chunks.offset : 0,
                        start + (is_last ? chunks.rounds.tail : kWarp * kChunk<T>)};
    const int64_t base = static_cast<int64_t>(round) * kRoundWords<T> - chunks.offset;
    Fetch<kModels> fetch;
#pragma unroll
    for (int m = 0; m < kModels; ++m) {
      const int64_t beyond = opaque(base) * part.stride[m] * size_of<T>(part.dtype[m]);
      fetch.of[m] = load_raw<T, memory>(part.from[m] + beyond, part.dtype[m], part.stride[m], at);
    }
    auto words = convert_words<T>(fetch);
    place_words<T>(words, part.frame);
#pragma unroll
    for (int m = 0; m < kModels; ++m) {
      if (part.to[m].data == nullptr) continue;
      Chunk<AccOf<T>, kChunk<T>> gradient;
      formula.write_any(words, m, gradient);
      if (round == chunks.target.round) {
#pragma unroll
        for (int i = 0; i < kChunk<T>; ++i) {
          gradient.element[i] += i == chunks.target.place ? part.target_gradient[m] : AccOf<T>(0);
        }
      }
      const int64_t beyond = (part.index + opaque(base)) * size_of<T>(part.to[m].dtype);
      stream_raw<T>(static_cast<char*>(part.to[m].data) + beyond, part.to[m].dtype, at,
                    raw_of<T>(gradient));
    }
  }
}

// Writes the gradients of the logits of all models, which a formula computes for a chunk. Its
// function near_of(words) decides for all lanes of a warp whether write_near() may be called. That
// function computes the bits of write_any() in fewer instructions. A span has 32 rounds. In each
// span, three kinds of rounds come last: rounds where write_near() may not be called, rounds whose
// chunks are not aligned or not whole, and the round with the target. The functions part_at(0) and
// formula_of() return the part and the formula. Both are called again for the second loop, so that
// one loop takes no registers from the other.
template <typename T, Memory memory, typename PartAt, typename FormulaOf>
__device__ __forceinline__ void write_gradients(const PartAt& part_at,
                                                const FormulaOf& formula_of) {
  constexpr int kSpan = 32;
#pragma unroll 1
  for (int span = 0;; span += kSpan) {
    const auto part = part_at(opaque(0));
    constexpr int kModels = decltype(part)::kOf;
    if (part.to[0].data == nullptr && part.to[kModels - 1].data == nullptr) return;
    const Chunks<T, kModels> chunks(part);
    const int end = min(span + kSpan, chunks.rounds.some);
    if (span >= end) return;
    const auto formula = formula_of();
    const Smooth<T, kModels> smooth(part, chunks.offset);
    const int whole = smooth.is_smooth ? min(end, chunks.rounds.whole) : 0;
    int round = max(span, start_of_warp<T>() < chunks.offset ? 1 : 0);
    unsigned rest = bits_below(end - span);
    if (round < whole) {
      rest ^= bits_below(whole - span) ^ bits_below(round - span);
      Fetch<kModels> fetch = smooth.template load<memory>(round);
#pragma unroll 1
      for (; round < whole; ++round) {
        const auto words = convert_words<T>(fetch);
        const auto near = formula.near_of(words, round != chunks.target.round_of_warp);
        // The load follows the vote. Before it, the load would take other registers. In the last
        // round the same chunk is loaded again, because a condition would take more registers too.
        fetch = smooth.template load<memory>(min(round + 1, whole - 1));
        if (!near.are_near) {
          rest |= 1u << (round - span);
          continue;
        }
#pragma unroll
        for (int m = 0; m < kModels; ++m) {
          if (!smooth.writes[m]) continue;
          Chunk<AccOf<T>, kChunk<T>> gradient;
          formula.write_near(words, near, m, gradient);
          smooth.store(round, m, raw_of<T>(gradient));
        }
      }
    }
    if (rest == 0) continue;
    const auto same_part = part_at(opaque(0));
    write_rounds<T, memory>(same_part, span, rest, formula_of());
  }
}

// Zeroes `size` elements of an output, from `index` on. Run by all threads of a block.
__device__ __forceinline__ void write_zeros(const Output& output, int64_t index, int64_t size) {
  store_zeros(output, index, size, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
}

}  // namespace klfast::cuda
