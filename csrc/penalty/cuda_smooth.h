// A warp's pass over the whole chunks of a smooth tile, which most tokens lie in: every input is
// aligned, and the mask, if there is one, is of bools.
//
// The estimator is chosen before the loop. A chunk is loaded while the one before it is computed,
// and stays in words as loaded until then. The warp votes once per chunk on whether the short
// formula serves all of its tokens; nothing else branches. Sums are added in the order of
// run_chunks, and have its bits: f(0) = 0, so a masked token needs no factor.

#pragma once

#include "penalty/cuda_tile.h"

namespace klfast::cuda {

// Passes that smooth tiles take: those without limits, importance weights and conversions.
template <typename T, Pass pass>
inline constexpr bool kHasSmooth =
    is_plain<pass> && std::is_same_v<T, typename Source<T>::Element> && sizeof(T) <= 4;

// The weight of a token under a mask of bools. A masked token's terms are 0 without it.
struct Kept {
  bool kept;
  template <typename Acc>
  friend __device__ __forceinline__ Acc operator*(Kept, Acc value) {
    return value;
  }
  template <typename Acc>
  __device__ __forceinline__ explicit operator Acc() const {
    return kept ? Acc(1) : Acc(0);
  }
};

// A lane's chunk of every input, in words as loaded.
template <int W>
struct Words {
  Chunk<uint32_t, 4> logprobs;
  Chunk<uint32_t, 4> ref_logprobs;
  Chunk<uint32_t, W / 4> mask;
};

// Where a lane finds its chunks.
template <typename T, int W>
struct Places {
  const T* logprobs;
  const T* ref_logprobs;
  const Bool* mask;  // null: every token is kept

  __device__ __forceinline__ Words<W> load(int position) const {
    const auto words = [&](const T* from) {
      return load_aligned<uint32_t, 4>(reinterpret_cast<const uint32_t*>(from + position));
    };
    Words<W> loaded = {words(logprobs), words(ref_logprobs), {}};
#pragma unroll
    for (int i = 0; i < W / 4; ++i) loaded.mask.element[i] = 0x01010101u;
    if (mask != nullptr) {
      loaded.mask =
          load_aligned<uint32_t, W / 4>(reinterpret_cast<const uint32_t*>(mask + position));
    }
    return loaded;
  }
};

// Element i of a vector of words, converted.
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

// The tokens of a chunk.
template <int W>
struct SmoothTokens {
  float log_ratio[W];  // 0 where masked
  bool kept[W];
};

// Adds the tokens to the sums, and returns f'(x) of each where the pass has gradients.
template <Range range, Pass pass, typename E, int W>
__device__ __forceinline__ void add_smooth(const SmoothTokens<W>& tokens, LaneSums<float>& sums,
                                           Chunk<float, W>& value, Chunk<float, W>& derivative) {
#pragma unroll
  for (int i = 0; i < W; ++i) {
    const float x = tokens.log_ratio[i];
    const auto formula = E::template at<range>(x);
    value.element[i] = formula.value;
    if constexpr (has_gradient<pass>) derivative.element[i] = formula.derivative;
    const Observation<range, float, Kept> token = {formula.value, {tokens.kept[i]}, x, 0};
    add_token<depth_of<pass>>(token, [&](int row) -> float& { return sums.at[row]; });
  }
}

template <typename T, int W>
__device__ __forceinline__ void store_smooth(T* to, const Chunk<float, W>& values) {
  store_chunk<T, float, W>(to, W, values);
}

// Adds the first `whole` tokens of a tile, a multiple of a warp's chunks.
template <typename T, Pass pass, typename E>
__device__ __forceinline__ void run_smooth(const Task& task, const Factors<float>& factors,
                                           const Tile& tile, int whole, LaneSums<float>& sums) {
  constexpr int W = kWidth<T, pass>;
  constexpr int kStep = kWarp * W;
  static_assert(sizeof(T) * W == 16);
  const int lane = threadIdx.x % kWarp * W;
  const KlPenaltyInputs& in = task.in;
  const Places<T, W> places = {
      static_cast<const T*>(in.logprobs.data) + tile.logprobs + lane,
      static_cast<const T*>(in.ref_logprobs.data) + tile.ref_logprobs + lane,
      in.mask.data == nullptr ? nullptr
                              : static_cast<const Bool*>(in.mask.data) + tile.mask + lane};
  const int64_t index = tile.index + lane;
  Words<W> next = places.load(0);
#pragma unroll 1
  for (int done = 0; done < whole; done += kStep) {
    const Words<W> words = next;
    if (done + kStep < whole) next = places.load(done + kStep);
    SmoothTokens<W> tokens;
    bool is_far = false;
    float furthest = 0;
#pragma unroll
    for (int i = 0; i < W; ++i) {
      tokens.kept[i] = (words.mask.element[i / 4] & (0xffu << (8 * (i % 4)))) != 0;
      const float difference =
          element_of<T>(words.logprobs, i) - element_of<T>(words.ref_logprobs, i);
      const float x = tokens.kept[i] ? difference : 0.0f;
      tokens.log_ratio[i] = x;
      if constexpr (depth_of<pass> == Depth::kAlways) {
        furthest = fmaxf(furthest, fabsf(x));  // without NaN, which either formula passes on
      } else {
        is_far = is_far || !math::is_near(x);
      }
    }
    is_far = is_far || furthest > 1.0f;
    Chunk<float, W> value, derivative;
    if (__any_sync(0xffffffffu, is_far)) {
      add_smooth<Range::kAnywhere, pass, E>(tokens, sums, value, derivative);
    } else {
      add_smooth<Range::kNear, pass, E>(tokens, sums, value, derivative);
    }
    if constexpr (depth_of<pass> != Depth::kAlways) {
      if (task.scores.data != nullptr) {
#pragma unroll
        for (int i = 0; i < W; ++i) {
          if (tokens.kept[i]) sums.last_kept = done + lane + i;
        }
      }
    }
    if (task.value.data != nullptr) {
#pragma unroll
      for (int i = 0; i < W; ++i) value.element[i] *= factors.coef;
      store_chunk(static_cast<float*>(task.value.data) + index + done, W, value);
    }
    if constexpr (has_gradient<pass>) {
      const auto store = [&](const Output& output, float factor) {
        if (output.data == nullptr) return;
        Chunk<float, W> gradient;
#pragma unroll
        for (int i = 0; i < W; ++i) {
          gradient.element[i] = tokens.kept[i] ? factor * derivative.element[i] : 0.0f;
        }
        store_chunk(static_cast<T*>(output.data) + index + done, W, gradient);
      };
      store(task.grad_logprobs, factors.gradient);
      store(task.grad_ref_logprobs, -factors.gradient);
    }
  }
}

}  // namespace klfast::cuda
