// A warp's pass over its tiles of a segment.

#pragma once

#include "rollout/cuda_far.h"
#include "rollout/cuda_rules.h"

namespace klfast::rollout::cuda {

// Whether a vector of W elements of every output starts at a token.
template <int W>
__device__ __forceinline__ bool are_outputs_aligned(const rollout::Outputs& out, int64_t index) {
  const auto weights = reinterpret_cast<uintptr_t>(static_cast<float*>(out.weights.data) + index);
  const auto mask = reinterpret_cast<uintptr_t>(static_cast<char*>(out.mask.data) + index);
  return (out.weights.data == nullptr || weights % 16 == 0) && mask % W == 0;
}

// Stores the masks and the weights of a lane's chunks, of which the first begins at `index`.
template <int W, int n>
__device__ __forceinline__ void store_results(const rollout::Outputs& out, bool in_vectors,
                                              int64_t index, const Chunk<Bool, W> (&masks)[n],
                                              const float (&weights)[n * W]) {
  const auto store = [&](bool vectors) KLFAST_INLINE_LAMBDA {
#pragma unroll
    for (int c = 0; c < n; ++c) {
      const int64_t place = index + c * kWarp * W;
      store_smooth(out.mask, place, vectors, masks[c]);
      if (out.weights.data == nullptr) continue;
      Chunk<float, W> chunk;
#pragma unroll
      for (int i = 0; i < W; ++i) chunk.element[i] = weights[c * W + i];
      store_smooth(out.weights, place, vectors, chunk);
    }
  };
  if (in_vectors) {
    store(true);
  } else {
    store(false);
  }
}

// The mask of a chunk, as zeros and ones.
template <int W>
__device__ __forceinline__ Chunk<Bool, W> mask_of(const Kept<W>& kept) {
  Chunk<uint32_t, W / 4> words;
#pragma unroll
  for (int i = 0; i < W / 4; ++i) words.element[i] = kept.words[i] >> 7 & 0x01010101u;
  return bit_cast<Chunk<Bool, W>>(words);
}

// The tokens of chunks, as loaded.
template <typename T, int W, int n>
__device__ __forceinline__ Tokens<float, n * W> tokens_of(const Loaded<W, n>& loaded,
                                                          const KeptChunks<W, n>& kept) {
  Tokens<float, n * W> tokens;
#pragma unroll
  for (int c = 0; c < n; ++c) {
    Chunk<uint32_t, 4> a = loaded.first[c], b = loaded.second[c];
    if constexpr (sizeof(T) == 2) {  // words of two tokens are cleared before they are parted
      a = kept.of[c].template clear<2>(a);
      b = kept.of[c].template clear<2>(b);
    }
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const int at = c * W + i;
      float logprob = element_of<T>(a, i);
      float x = logprob - element_of<T>(b, i);
      if constexpr (sizeof(T) == 4) {
        logprob = kept.or_zero(at, logprob);
        x = kept.or_zero(at, x);
      }
      tokens.logprob[at] = logprob;
      tokens.x[at] = x;
      tokens.squared[at] = x * x;
    }
  }
  return tokens;
}

// Reads the whole chunks of a smooth segment, and calls end_tile(true, tile, sums) after every
// tile: its mask is of bools. If tokens are left after the last chunk, its tile has not ended, and
// its sums are in `sums`.
template <typename T, bool kRules, typename End>
__device__ __forceinline__ void run_smooth(const Task<float>& task, const Span& span, Turns& turns,
                                           LaneSums<float>& sums, const End& end_tile) {
  constexpr int W = kWidth<T>;
  constexpr int n = kChunks<T>;
  using Inputs = klfast::cuda::Inputs<T, W, n>;
  constexpr int kApart = Inputs::kApart;
  static_assert(sizeof(T) * W == 16 && n * W == 8);
  const rollout::Inputs& in = task.call.in;
  rollout::Outputs out = task.call.out;
  if (in.options.weight != Weight::kToken) out.weights.data = nullptr;
  const int lane = threadIdx.x % kWarp * W;
  if (turns.position() >= span.size / (kApart * n) * (kApart * n)) return;
  const int64_t first = span.index + lane;
  const bool in_vectors = are_outputs_aligned<W>(out, first);
  const Inputs inputs(in.logprobs, span.logprobs, in.rollout_logprobs, span.rollout_logprobs,
                      in.mask, span.mask, lane);
  // Rules need the registers of chunks that would be loaded ahead of the next tile.
  const bool loads_across = !kRules && turns.warps == 1;
  int kept_tokens = 0;
  const auto visit = [&](int position, const Loaded<W, n>& loaded,
                         const auto& load_next) KLFAST_INLINE_LAMBDA {
    KeptChunks<W, n> kept;
#pragma unroll
    for (int c = 0; c < n; ++c) kept.of[c] = Kept<W>::of(loaded.mask[c]);
    Tokens<float, 8> tokens = tokens_of<T>(loaded, kept);
    load_next();
    Chunk<Bool, W> masks[n];
#pragma unroll
    for (int c = 0; c < n; ++c) masks[c] = mask_of(kept.of[c]);
    if (any_far(tokens.squared, task.far_squares)) {
      sums.far |= drop_far(task.far_squares, tokens, kept) << first_bit(position);
    }
    kept_tokens += kept.count();
    float weights[8];
    add_near(tokens, kept, sums, weights);
    store_results<W, n>(out, in_vectors, first + static_cast<unsigned>(position), masks, weights);
  };
  const auto end_steps = [&]() KLFAST_INLINE_LAMBDA {
    sums.at[kNearLength] += static_cast<float>(kept_tokens);
    kept_tokens = 0;
  };
  const auto end = [&](int tile) KLFAST_INLINE_LAMBDA { end_tile(std::true_type(), tile, sums); };
  walk_smooth(inputs, span.size, turns, loads_across, visit, end_steps, end);
}

// Copies the mask of a lane's chunk, or makes one.
template <int W>
__device__ __forceinline__ void copy_mask(const Call& call, const Span& span, int position) {
  const View& mask = call.in.mask;
  const Output& out = call.out.mask;
  const int64_t index = span.index + position;
  visit_dtype(out.dtype, [&](auto zero) {
    using To = decltype(zero);
    To* const to = static_cast<To*>(out.data) + index;
    const To* const from = static_cast<const To*>(mask.data) + span.mask;
#pragma unroll
    for (int i = 0; i < W; ++i) {
      if (position + i >= span.size) continue;
      if (mask.data != nullptr) {
        to[i] = from[(position + i) * mask.column_stride];
      } else if constexpr (std::is_same_v<To, Bool>) {
        to[i] = Bool{1};
      }
    }
  });
}

// The same for a chunk of any dtype and stride.
template <typename T, int W, typename Acc>
__device__ __forceinline__ void run_chunk(const Task<Acc>& task, const Span& span, const Place& at,
                                          LaneSums<Acc>& sums) {
  const rollout::Inputs& in = task.call.in;
  const auto a = fetch<T, W>(in.logprobs, span.logprobs, span.size, at);
  const auto b = fetch<T, W>(in.rollout_logprobs, span.rollout_logprobs, span.size, at);
  Chunk<Acc, W> weights;
  load_weights(in.mask, span.mask, span.size, at, weights);
  Tokens<Acc, W> tokens;
  KeptBits kept = {0};
#pragma unroll
  for (int i = 0; i < W; ++i) {
    const Acc m = weights.element[i];
    const Acc logprob = convert<Acc>(a.element[i]);
    const Acc x = logprob - convert<Acc>(b.element[i]);
    const bool is_kept = m != Acc(0);
    if (is_kept) kept.bits |= 1u << i;
    tokens.logprob[i] = is_kept ? logprob : Acc(0);
    tokens.x[i] = is_kept ? x : Acc(0);
    // A token whose weight is neither 0 nor 1 is far.
    tokens.squared[i] = is_kept && m != Acc(1) ? Acc(INFINITY) : tokens.x[i] * tokens.x[i];
  }
  copy_mask<W>(task.call, span, at.position);
  if (any_far(tokens.squared, task.far_squares)) {
    sums.far |= drop_far(task.far_squares, tokens, kept) << first_bit(at.end - kWarp * W);
  }
  sums.at[kNearLength] += static_cast<Acc>(kept.count());
  Acc near_weights[W];
  add_near(tokens, kept, sums, near_weights);
  if (in.options.weight != Weight::kToken) return;
#pragma unroll
  for (int i = 0; i < W; ++i) weights.element[i] = near_weights[i];
  store_chunk(static_cast<Acc*>(task.call.out.weights.data) + span.index + at.position,
              span.size - at.position, weights);
}

// Adds the warp's tiles to the sums of its segment, and stores what is decided per token.
template <typename T, bool kRules, typename Acc>
__device__ __forceinline__ void run_tiles(const Task<Acc>& task, const Span& segment, Turns turns,
                                          const SegmentSums<Acc, kRules>& segment_sums) {
  constexpr int W = kWidth<T>;
  LaneSums<Acc> sums;
  const auto end_tile = [&](auto has_bools, int tile, LaneSums<Acc>& of_lane) KLFAST_INLINE_LAMBDA {
    constexpr bool kBools = decltype(has_bools)::value;
    const int first = tile * static_cast<int>(kTileTokens);
    if (of_lane.far != 0) add_far<T, kBools>(task, segment, first, of_lane);
    segment_sums.end_tile(tile, of_lane);
    of_lane.empty_tile();
    if constexpr (kRules) {
      run_rules<T, kBools>(task, segment, first,
                           min(segment.size, first + static_cast<int>(kTileTokens)),
                           segment_sums.begin_rules(tile));
    }
  };
  if constexpr (kHasSmooth<T>) {
    if (segment.is_smooth) run_smooth<T, kRules>(task, segment, turns, sums, end_tile);
  }
#pragma unroll 1
  for (; turns.first() < segment.size; turns = turns.after()) {
    visit_chunks<W>(segment, turns.position(), turns.end(segment.size),
                    [&](const Span& span, const Place& at)
                        KLFAST_INLINE_LAMBDA { run_chunk<T, W>(task, span, at, sums); });
    end_tile(std::false_type(), turns.tile, sums);
  }
  segment_sums.end(sums);
}

}  // namespace klfast::rollout::cuda
