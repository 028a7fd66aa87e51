// A warp's pass over the whole chunks of a smooth segment. Its inputs are dense, and its mask, if
// there is one, has bools. Most tokens lie in such chunks.
//
// A chunk is loaded while the chunk before it is computed. A lane takes eight tokens at a time. For
// these the estimator is chosen once, and the warp votes once on whether the short formula serves
// them all. The inputs of a masked token are cleared, so that x = 0, where every estimator is 0.

#pragma once

#include "device/cuda/smooth.h"
#include "penalty/cuda_tile.h"

namespace klfast::cuda {

// A weight of 1 in any type.
struct One {
  template <typename Acc>
  friend __device__ __forceinline__ Acc operator*(One, Acc value) {
    return value;
  }
};

// x of each token, or 0 if the token is masked.
template <typename T, int W, int n>
__device__ __forceinline__ Chunk<float, n * W> log_ratios(const Loaded<W, n>& loaded,
                                                          const Kept<W> (&kept)[n]) {
  Chunk<float, n * W> x;
#pragma unroll
  for (int c = 0; c < n; ++c) {
    Chunk<uint32_t, 4> a = loaded.first[c], b = loaded.second[c];
    if constexpr (sizeof(T) == 2) {  // a word of two tokens is cleared before it is split
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

// Adds the statistics that add_token() leaves out for an estimator.
template <Depth depth>
__device__ __forceinline__ void add_rest(int estimator, int kept, LaneSums<float>& sums) {
  sums.at[kLength] += static_cast<float>(kept);
  for_each_statistic<depth>([&](auto row) {
    using E = typename decltype(row)::Of;
    if constexpr (!std::is_void_v<E>) {
      if (estimator == IndexIn<E, estimators::EstimatorTable>::value) {
        sums.at[index_of<decltype(row)>] = sums.at[kKl];
      }
    }
  });
}

// The values and derivatives of a lane's tokens. No call stores both.
template <int n>
struct SmoothResults {
  Chunk<float, n> value;
  Chunk<float, n> derivative;
};

// The results of tokens. They are also added to the lane's sums.
template <Range range, Variant variant, typename E, int n>
__device__ __forceinline__ SmoothResults<n> evaluate_in(const Chunk<float, n>& x,
                                                        LaneSums<float>& sums) {
  SmoothResults<n> results;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const auto formula = E::template at<range>(x.element[i]);
    results.value.element[i] = formula.value;
    results.derivative.element[i] = formula.derivative;
    const Observation<range, float, One> token = {formula.value, {}, x.element[i], 0};
    klfast::add_token<depth_of<variant>, E>(token, [&](int row) -> float& { return sums.at[row]; });
  }
  return results;
}

// True if every |x| <= 1. The squares are compared as integers: x^2 is not negative, and the bits
// of NaN are greater than all others.
template <int n>
__device__ __forceinline__ bool are_near(const Chunk<float, n>& x) {
  static_assert(n == 8);
  const auto square = [&](int i) { return math::bit_cast<unsigned>(x.element[i] * x.element[i]); };
  const unsigned some = __vimax3_u32(square(0), square(1), square(2));
  const unsigned more = __vimax3_u32(square(3), square(4), square(5));
  return __vimax3_u32(__vimax3_u32(some, more, square(6)), square(7), 0) <=
         math::bit_cast<unsigned>(1.0f);
}

template <Variant variant, int n>
__device__ __forceinline__ SmoothResults<n> evaluate_smooth(int estimator, const Chunk<float, n>& x,
                                                            LaneSums<float>& sums) {
  SmoothResults<n> results;
  const bool is_far = __any_sync(0xffffffffu, !are_near(x));
  visit_row_first<estimators::k3>(estimators::EstimatorTable(), estimator, [&](auto formula) {
    using E = decltype(formula);
    results = is_far ? evaluate_in<Range::kAnywhere, variant, E>(x, sums)
                     : evaluate_in<Range::kNear, variant, E>(x, sums);
  });
  return results;
}

// True if a vector of W elements starts at `token` in every output of a call.
template <typename T, Variant variant, int W>
__device__ __forceinline__ bool are_outputs_aligned(const Task& task, int64_t token) {
  const auto is_aligned = [&](const Output& output, int size) {
    const int vector = W * size < 16 ? W * size : 16;
    return output.data == nullptr ||
           (reinterpret_cast<uintptr_t>(output.data) + token * size) % vector == 0;
  };
  bool are_aligned = true;
  if constexpr (variant != Variant::kPlainGradient)
    are_aligned = is_aligned(task.value, sizeof(float));
  if constexpr (has_gradient<variant>) {
    are_aligned = are_aligned && is_aligned(task.grad_logprobs, sizeof(T)) &&
                  is_aligned(task.grad_ref_logprobs, sizeof(T));
  }
  return are_aligned;
}

// Chunk `c` of several chunks, multiplied by a factor.
template <int W, int n>
__device__ __forceinline__ Chunk<float, W> scaled(const Chunk<float, n>& chunks, int c,
                                                  float factor) {
  Chunk<float, W> chunk;
#pragma unroll
  for (int i = 0; i < W; ++i) chunk.element[i] = factor * chunks.element[c * W + i];
  return chunk;
}

// Stores the wanted results of chunk `c`, which the warp has at `position`. `first` is the index of
// the lane's first token of the segment. The gradient of a masked token is 0.
template <typename T, Variant variant, int W, int n>
__device__ __forceinline__ void store_results(const Task& task, bool in_vectors,
                                              const Factors<float>& factors, const Span& span,
                                              int64_t first, int position,
                                              const SmoothResults<n>& results, int c,
                                              const Kept<W>& kept, LaneSums<float>& sums) {
  const int64_t index = first + static_cast<unsigned>(position);
  if constexpr (depth_of<variant> != Depth::kAlways) {
    if ((task.stored & kNotesLastKept) != 0) {
#pragma unroll
      for (int i = 0; i < W; ++i) {
        if (kept.has(i)) sums.last_kept = position + threadIdx.x % kWarp * W + i;
      }
    }
  }
  if constexpr (variant != Variant::kPlainGradient) {
    if ((task.stored & kStoresValue) != 0) {
      store_smooth(task.value, index, in_vectors, scaled<W>(results.value, c, factors.coef));
    }
  }
  if constexpr (has_gradient<variant>) {
    const auto store = [&](const Output& output, float factor) KLFAST_INLINE_LAMBDA {
      Chunk<float, W> gradient = scaled<W>(results.derivative, c, factor);
      if (serves_backward<variant> && (task.stored & kTimesGradOut) != 0) {
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
// tokens are left after the last chunk, the tile is not flushed, and its sums stay in `sums`.
template <typename T, Variant variant, typename Flush>
__device__ __forceinline__ void run_smooth(const Task& task, const Factors<float>& factors,
                                           const Span& span, Turns& turns, LaneSums<float>& sums,
                                           const Flush& flush) {
  constexpr int W = kSmoothWidth<T>;
  constexpr int n = kChunks<T>;
  constexpr int kApart = Inputs<T, W, n>::kApart;
  static_assert(sizeof(T) * W == 16 && n * W == 8);
  const int lane = threadIdx.x % kWarp * W;
  if (turns.position() >= span.size / (kApart * n) * (kApart * n)) return;
  const int64_t first = span.index + lane;
  const bool in_vectors = are_outputs_aligned<T, variant, W>(task, first);
  const KlPenaltyInputs& in = task.in;
  const Inputs<T, W, n> inputs(in.logprobs, span.logprobs, in.ref_logprobs, span.ref_logprobs,
                               in.mask, span.mask, lane);
  const int estimator = task.in.options.estimator;
  int kept_tokens = 0;
  const auto visit = [&](int position, const Loaded<W, n>& loaded,
                         const auto& load_next) KLFAST_INLINE_LAMBDA {
    Kept<W> kept[n];
#pragma unroll
    for (int c = 0; c < n; ++c) {
      kept[c] = Kept<W>::of(loaded.mask[c]);
      kept_tokens += kept[c].count();
    }
    const Chunk<float, 8> x = log_ratios<T>(loaded, kept);
    load_next();
    const SmoothResults<8> results = evaluate_smooth<variant>(estimator, x, sums);
    if (variant == Variant::kPlainGradient || task.stored != 0) {
#pragma unroll
      for (int c = 0; c < n; ++c) {
        store_results<T, variant>(task, in_vectors, factors, span, first, position + c * kApart,
                                  results, c, kept[c], sums);
      }
    }
  };
  const auto end_steps = [&]() KLFAST_INLINE_LAMBDA {
    add_rest<depth_of<variant>>(estimator, kept_tokens, sums);
    kept_tokens = 0;
  };
  const auto end_tile = [&](int tile) KLFAST_INLINE_LAMBDA {
    flush(tile, sums);
    sums = empty_lane<float>();
  };
  walk_smooth(inputs, span.size, turns, turns.warps == 1, visit, end_steps, end_tile);
}

}  // namespace klfast::cuda
