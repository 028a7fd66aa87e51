// A warp's pass over the whole chunks of a smooth segment, which most tokens lie in: inputs are
// dense, and the mask, if there is one, is of bools.
//
// Chunks are loaded while those before them are computed. For eight tokens of a lane at a time the
// estimator is chosen once, and the warp votes once on whether the short formula serves them all. A
// masked token has its inputs cleared, and so x = 0, where every estimator is 0.

#pragma once

#include "penalty/cuda_tile.h"

namespace klfast::cuda {

// A lane's chunks of a dense input: `n` words each, on or `shift` bytes after a vector of them.
template <int n>
struct Input {
  using Words = Chunk<uint32_t, n>;

  const char* vectors;

  __device__ __forceinline__ explicit Input(const char* first) : vectors(first - shift_of(first)) {}

  __device__ static __forceinline__ unsigned shift_of(const char* first) {
    return static_cast<unsigned>(reinterpret_cast<uintptr_t>(first) % sizeof(Words));
  }

  // The vector that holds the first byte of the chunk at `byte`: the chunk, where it is aligned.
  __device__ __forceinline__ const char* at(unsigned byte) const {
    return in_register(vectors + static_cast<uint64_t>(byte));
  }
  __device__ static __forceinline__ Words load(const char* vector) {
    return load_aligned<uint32_t, n>(reinterpret_cast<const uint32_t*>(vector));
  }
  // The vector that holds its last byte.
  __device__ static __forceinline__ Words load_rest(const char* vector, unsigned shift) {
    return load(shift == 0 ? vector : vector + sizeof(Words));
  }
  // The words of a chunk, from any of them on.
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

// Any weight that is 1.
struct One {
  template <typename Acc>
  friend __device__ __forceinline__ Acc operator*(One, Acc value) {
    return value;
  }
};

// A word whose lower half consists of the highest bit of byte `low`, and its upper half of that of
// byte `high`.
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

// Which tokens of a chunk are kept: the highest bit of a byte each.
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

  // The bits of kept tokens in word `index` of a chunk of elements of `size` bytes.
  template <int size>
  __device__ __forceinline__ uint32_t bits_of_word(int index) const {
    constexpr int kTokens = 4 / size;  // of a word
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

// The tokens that a lane computes at a time: a chunk, or two that lie a warp's chunks apart.
template <typename T>
inline constexpr int kChunks = 8 / kSmoothWidth<T>;

// A lane's chunks of every input: the vectors that hold their first bytes, and then the chunks.
template <int W, int n>
struct Loaded {
  Chunk<uint32_t, 4> logprobs[n];
  Chunk<uint32_t, 4> ref_logprobs[n];
  Chunk<uint32_t, W / 4> mask[n];  // keeps every token until a mask is loaded

  __device__ __forceinline__ Loaded() {
#pragma unroll
    for (int c = 0; c < n; ++c) {
#pragma unroll
      for (int i = 0; i < W / 4; ++i) mask[c].element[i] = 0x01010101u;
    }
  }
};

// The inputs of a lane in a segment; chunks are named by their positions.
template <typename T, int W, int n>
struct Inputs {
  static constexpr int kApart = kWarp * W;  // tokens from a chunk to the lane's next
  Input<4> logprobs;
  Input<4> ref_logprobs;
  Input<W / 4> mask;
  bool has_mask;
  unsigned shifts;  // of the three, a byte each

  __device__ __forceinline__ Inputs(const KlPenaltyInputs& in, const Span& span, int lane)
      : Inputs(at(in.logprobs, span.logprobs + lane, sizeof(T)),
               at(in.ref_logprobs, span.ref_logprobs + lane, sizeof(T)),
               at(in.mask, span.mask + lane, 1)) {}

  __device__ __forceinline__ void load(unsigned position, Loaded<W, n>& loaded) const {
    const char* const a = logprobs.at(position * sizeof(T));
    const char* const b = ref_logprobs.at(position * sizeof(T));
    const char* const m = mask.at(position);
#pragma unroll
    for (int c = 0; c < n; ++c) {
      loaded.logprobs[c] = logprobs.load(a + c * kApart * sizeof(T));
      loaded.ref_logprobs[c] = ref_logprobs.load(b + c * kApart * sizeof(T));
      if (has_mask) loaded.mask[c] = mask.load(m + c * kApart);
    }
  }

  // Makes chunks of the vectors that have been loaded. All that is missing is requested before the
  // first is used. Words of one element each are loaded once more: that is shorter than cutting.
  __device__ __forceinline__ void complete(unsigned position, Loaded<W, n>& loaded) const {
    constexpr bool kCuts = sizeof(T) < 4;
    const unsigned of_a = shifts & 0xff, of_b = shifts >> 8 & 0xff, of_mask = shifts >> 16;
    const char* const a = logprobs.at(position * sizeof(T) + (kCuts ? 0 : of_a));
    const char* const b = ref_logprobs.at(position * sizeof(T) + (kCuts ? 0 : of_b));
    const char* const m = mask.at(position);
    Loaded<W, n> rest;
#pragma unroll
    for (int c = 0; c < n; ++c) {
      constexpr int kBytes = kApart * sizeof(T);
      if constexpr (kCuts) {
        rest.logprobs[c] = logprobs.load_rest(a + c * kBytes, of_a);
        rest.ref_logprobs[c] = ref_logprobs.load_rest(b + c * kBytes, of_b);
      } else {
        loaded.logprobs[c] = logprobs.load_words(a + c * kBytes);
        loaded.ref_logprobs[c] = ref_logprobs.load_words(b + c * kBytes);
      }
      if (has_mask) rest.mask[c] = mask.load_rest(m + c * kApart, of_mask);
    }
#pragma unroll
    for (int c = 0; c < n; ++c) {
      if constexpr (kCuts) {
        loaded.logprobs[c] = logprobs.join(loaded.logprobs[c], rest.logprobs[c], of_a);
        loaded.ref_logprobs[c] =
            ref_logprobs.join(loaded.ref_logprobs[c], rest.ref_logprobs[c], of_b);
      }
      if (has_mask) loaded.mask[c] = mask.join(loaded.mask[c], rest.mask[c], of_mask);
    }
  }

 private:
  __device__ __forceinline__ Inputs(const char* a, const char* b, const char* m)
      : logprobs(a),
        ref_logprobs(b),
        mask(m),
        has_mask(in_register(m != nullptr) != 0),
        shifts(Input<4>::shift_of(a) | Input<4>::shift_of(b) << 8 |
               Input<W / 4>::shift_of(m) << 16) {}

  __device__ static __forceinline__ const char* at(const View& view, int64_t element, int size) {
    const char* const data = static_cast<const char*>(view.data);
    return data == nullptr ? nullptr : data + element * size;
  }
};

// x of each token, 0 where it is masked.
template <typename T, int W, int n>
__device__ __forceinline__ Chunk<float, n * W> log_ratios(const Loaded<W, n>& loaded,
                                                          const Kept<W> (&kept)[n]) {
  Chunk<float, n * W> x;
#pragma unroll
  for (int c = 0; c < n; ++c) {
    Chunk<uint32_t, 4> a = loaded.logprobs[c], b = loaded.ref_logprobs[c];
    if constexpr (sizeof(T) == 2) {  // words of two tokens are cleared before they are parted
      a = kept[c].template clear<2>(a);
      b = kept[c].template clear<2>(b);
    }
    Chunk<float, W> differences;
#pragma unroll
    for (int i = 0; i < W; ++i) differences.element[i] = element_of<T>(a, i) - element_of<T>(b, i);
    if constexpr (sizeof(T) == 4) {
      const auto words = math::bit_cast<Chunk<uint32_t, 4>>(differences);
      differences = math::bit_cast<Chunk<float, W>>(kept[c].template clear<4>(words));
    }
#pragma unroll
    for (int i = 0; i < W; ++i) x.element[c * W + i] = differences.element[i];
  }
  return x;
}

// Adds the statistics that add_token() leaves out under an estimator.
template <Depth depth>
__device__ __forceinline__ void add_rest(int estimator, int kept, LaneSums<float>& sums) {
  sums.at[kLength] += static_cast<float>(kept);
  for_each_statistic<depth>([&](auto row) {
    using E = typename decltype(row)::Of;
    if constexpr (!std::is_void_v<E>) {
      if (estimator == IndexIn<E, estimators::Table>::value) {
        sums.at[index_of<decltype(row)>] = sums.at[kKl];
      }
    }
  });
}

// The values of a lane's tokens and the derivatives; no call stores both.
template <int n>
struct SmoothResults {
  Chunk<float, n> value;
  Chunk<float, n> derivative;
};

// The results of tokens, which are added to the lane's sums.
template <Range range, Pass pass, typename E, int n>
__device__ __forceinline__ SmoothResults<n> evaluate_in(const Chunk<float, n>& x,
                                                        LaneSums<float>& sums) {
  SmoothResults<n> results;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const auto formula = E::template at<range>(x.element[i]);
    results.value.element[i] = formula.value;
    results.derivative.element[i] = formula.derivative;
    const Observation<range, float, One> token = {formula.value, {}, x.element[i], 0};
    klfast::add_token<depth_of<pass>, E>(token, [&](int row) -> float& { return sums.at[row]; });
  }
  return results;
}

// Whether every |x| is 1 at most, in integers: x^2 is not negative, and NaN is greater than all.
template <int n>
__device__ __forceinline__ bool are_near(const Chunk<float, n>& x) {
  static_assert(n == 8);
  const auto square = [&](int i) { return math::bit_cast<unsigned>(x.element[i] * x.element[i]); };
  const unsigned some = __vimax3_u32(square(0), square(1), square(2));
  const unsigned more = __vimax3_u32(square(3), square(4), square(5));
  return __vimax3_u32(__vimax3_u32(some, more, square(6)), square(7), 0) <=
         math::bit_cast<unsigned>(1.0f);
}

template <Pass pass, int n>
__device__ __forceinline__ SmoothResults<n> evaluate_smooth(int estimator, const Chunk<float, n>& x,
                                                            LaneSums<float>& sums) {
  SmoothResults<n> results;
  const bool is_far = __any_sync(0xffffffffu, !are_near(x));
  visit_row_first<estimators::k3>(estimators::Table(), estimator, [&](auto formula) {
    using E = decltype(formula);
    results = is_far ? evaluate_in<Range::kAnywhere, pass, E>(x, sums)
                     : evaluate_in<Range::kNear, pass, E>(x, sums);
  });
  return results;
}

// Whether a vector of W elements of every output of a call starts at a token.
template <typename T, Pass pass, int W>
__device__ __forceinline__ bool are_outputs_aligned(const Task& task, int64_t token) {
  const auto is_aligned = [&](const Output& output, int size) {
    const int vector = W * size < 16 ? W * size : 16;
    return output.data == nullptr ||
           (reinterpret_cast<uintptr_t>(output.data) + token * size) % vector == 0;
  };
  bool are_aligned = true;
  if constexpr (pass != Pass::kPlainGradient) are_aligned = is_aligned(task.value, sizeof(float));
  if constexpr (has_gradient<pass>) {
    are_aligned = are_aligned && is_aligned(task.grad_logprobs, sizeof(T)) &&
                  is_aligned(task.grad_ref_logprobs, sizeof(T));
  }
  return are_aligned;
}

// A chunk of results at a token's place.
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

// Chunk `c` of several, times a factor.
template <int W, int n>
__device__ __forceinline__ Chunk<float, W> scaled(const Chunk<float, n>& chunks, int c,
                                                  float factor) {
  Chunk<float, W> chunk;
#pragma unroll
  for (int i = 0; i < W; ++i) chunk.element[i] = factor * chunks.element[c * W + i];
  return chunk;
}

// Stores what is wanted of chunk `c`, which the warp has at `position`; `first` is the index of the
// lane's first token of the segment. A masked token's gradient is 0.
template <typename T, Pass pass, int W, int n>
__device__ __forceinline__ void store_results(const Task& task, bool in_vectors,
                                              const Factors<float>& factors, const Span& span,
                                              int64_t first, int position,
                                              const SmoothResults<n>& results, int c,
                                              const Kept<W>& kept, LaneSums<float>& sums) {
  const int64_t index = first + static_cast<unsigned>(position);
  if constexpr (depth_of<pass> != Depth::kAlways) {
    if ((task.stored & kNotesLastKept) != 0) {
#pragma unroll
      for (int i = 0; i < W; ++i) {
        if (kept.has(i)) sums.last_kept = position + threadIdx.x % kWarp * W + i;
      }
    }
  }
  if constexpr (pass != Pass::kPlainGradient) {
    if ((task.stored & kStoresValue) != 0) {
      store_smooth(task.value, index, in_vectors, scaled<W>(results.value, c, factors.coef));
    }
  }
  if constexpr (has_gradient<pass>) {
    const auto store = [&](const Output& output, float factor) KLFAST_INLINE_LAMBDA {
      Chunk<float, W> gradient = scaled<W>(results.derivative, c, factor);
      if ((task.stored & kTimesGradOut) != 0) {
        const auto grad_out =
            load_dense<float, W>(static_cast<const float*>(task.grad_out.data) + span.grad_out +
                                 position + threadIdx.x % kWarp * W);
#pragma unroll
        for (int i = 0; i < W; ++i) gradient.element[i] *= grad_out.element[i];
      }
      const auto words = math::bit_cast<Chunk<uint32_t, 4>>(convert_chunk<T>(gradient));
      store_smooth(output, index, in_vectors,
                   math::bit_cast<Chunk<T, W>>(kept.template clear<sizeof(T)>(words)));
    };
    if ((task.stored & kStoresGradient) != 0) store(task.grad_logprobs, factors.gradient);
    if ((task.stored & kStoresRefGradient) != 0) store(task.grad_ref_logprobs, -factors.gradient);
  }
}

// Reads the whole chunks of a smooth segment, and calls flush(tile, sums) after every tile. If
// tokens are left after the last chunk, its tile has not been flushed, and its sums are in `sums`.
template <typename T, Pass pass, typename Flush>
__device__ __forceinline__ void run_smooth(const Task& task, const Factors<float>& factors,
                                           const Span& span, Turns& turns, LaneSums<float>& sums,
                                           const Flush& flush) {
  constexpr int W = kSmoothWidth<T>;
  constexpr int n = kChunks<T>;
  constexpr int kApart = Inputs<T, W, n>::kApart;
  constexpr int kStep = kApart * n;
  static_assert(sizeof(T) * W == 16 && n * W == 8);
  const int lane = threadIdx.x % kWarp * W;
  const int whole = span.size / kStep * kStep;
  if (turns.position() >= whole) return;
  const int64_t first = span.index + lane;
  const bool in_vectors = are_outputs_aligned<T, pass, W>(task, first);
  const Inputs<T, W, n> inputs(task.in, span, lane);
  const bool is_alone = turns.warps == 1;
  const int estimator = task.in.options.estimator;
  int position = turns.first();
  Loaded<W, n> loaded;
  inputs.load(position, loaded);
#pragma unroll 1
  do {
    const int end = in_register(turns.end(whole));
    const int last = in_register((is_alone ? whole : end) - kStep);  // to load ahead
    int kept_tokens = 0;
#pragma unroll 1
    do {
      if (inputs.shifts != 0) inputs.complete(position, loaded);
      Kept<W> kept[n];
#pragma unroll
      for (int c = 0; c < n; ++c) {
        kept[c] = Kept<W>::of(loaded.mask[c]);
        kept_tokens += kept[c].count();
      }
      const Chunk<float, 8> x = log_ratios<T>(loaded, kept);
      inputs.load(position < last ? position + kStep : last, loaded);
      const SmoothResults<8> results = evaluate_smooth<pass>(estimator, x, sums);
      if (pass == Pass::kPlainGradient || task.stored != 0) {
#pragma unroll
        for (int c = 0; c < n; ++c) {
          store_results<T, pass>(task, in_vectors, factors, span, first, position + c * kApart,
                                 results, c, kept[c], sums);
        }
      }
      position += kStep;
    } while (position < end);
    add_rest<depth_of<pass>>(estimator, kept_tokens, sums);
    if (end == whole && whole < span.size) {
      turns.done = end - turns.first();
      return;
    }
    flush(turns.tile, sums);
    sums = empty_lane<float>();
    turns = turns.after();
    if (!is_alone && turns.first() < whole) {
      position = turns.first();
      inputs.load(position, loaded);
    }
  } while (turns.first() < whole);
}

}  // namespace klfast::cuda
