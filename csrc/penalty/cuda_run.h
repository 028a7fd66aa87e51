// A warp's pass over its tiles of a segment.

#pragma once

#include "penalty/cuda_smooth.h"

namespace klfast::cuda {

// Calls flush(tile, sums) with the sums of each of the warp's tiles.
template <typename T, Variant variant, typename Acc, typename Flush>
__device__ __forceinline__ void run_tiles(const Task& task, const Limits<Acc>& limit,
                                          const Factors<Acc>& factors, const Span& segment,
                                          Turns turns, const Flush& flush) {
  constexpr int W = kWidth<T, variant>;
  constexpr int kGroup = W < 4 ? W : 4;
  LaneSums<Acc> sums = empty_lane<Acc>();
  if constexpr (kHasSmooth<T, variant>) {
    if (segment.layout != Layout::kAny) {
      run_smooth<T, variant>(task, factors, segment, turns, sums, flush);
    }
  }
#pragma unroll 1
  for (; turns.first() < segment.size; turns = turns.after()) {
    visit_chunks<W>(segment, turns.position(), turns.end(segment.size),
                    [&](const Span& span, const Place& at) KLFAST_INLINE_LAMBDA {
                      const Fetched<T, W> fetched = fetch_all<T, variant, W>(task.in, span, at);
#pragma unroll
                      for (int first = 0; first < W; first += kGroup) {
                        Tokens<Acc, kGroup> tokens;
                        take_tokens<variant>(fetched, first, task.in.old_logprobs.data != nullptr,
                                             tokens);
                        evaluate<variant>(task.in.options.estimator, limit, tokens);
                        add_tokens<variant>(tokens, at.position + first, sums);
                        const Place here = {at.position + first, at.end};
                        if constexpr (!is_plain<variant>) {
                          if (task.in.is_weighted()) {
                            weigh(task.in.weighting, span, here, tokens, sums);
                          }
                        }
                        if (task.stored != 0) {
                          store_results<T, variant>(task, factors, span, here, tokens);
                        }
                      }
                    });
    flush(turns.tile, sums);
    sums = empty_lane<Acc>();
  }
}

// This lane's part of the number of tokens that a mask of bools keeps in a tile.
__device__ __forceinline__ int count_kept(const Bool* mask, int size) {
  constexpr int W = 16;
  const int lane = static_cast<int>(threadIdx.x) % kWarp * W;
  const char* const first = reinterpret_cast<const char*>(mask + lane);
  const Input<W / 4> input(first);
  const unsigned shift = input.shift_of(first);
  int kept = 0;
#pragma unroll
  for (int done = 0; done < kTileTokens; done += kWarp * W) {
    const int rest = size - done - lane;
    if (rest >= W) {
      kept += Kept<W>::of(input.join(input.load(input.at(done)),
                                     input.load_rest(input.at(done), shift), shift))
                  .count();
    } else {
      for (int i = 0; i < rest; ++i) kept += mask[lane + done + i].byte != 0;
    }
  }
  return kept;
}

// The same for the sum of the weights alone. It equals the sum of run_tiles, because weights are
// added in the same order, and numbers of tokens are exact in any order.
template <int W, typename Acc, typename Flush>
__device__ __forceinline__ void run_lengths(const Task& task, const Span& segment, Turns turns,
                                            const Flush& flush) {
  const View& mask = task.in.mask;
#pragma unroll 1
  for (; turns.first() < segment.size; turns = turns.after()) {
    const int first = turns.first();
    const int end = turns.end(segment.size);
    LaneSums<Acc> sums = empty_lane<Acc>();
    Acc& length = sums.at[kLength];
    if (mask.data == nullptr) {
      length = threadIdx.x % kWarp == 0 ? static_cast<Acc>(end - first) : Acc(0);
    } else if (mask.dtype == DType::kBool && mask.column_stride == 1) {
      length = static_cast<Acc>(
          count_kept(static_cast<const Bool*>(mask.data) + segment.mask + first, end - first));
    } else {
      visit_chunks<W>(segment, first, end,
                      [&](const Span& span, const Place& at) KLFAST_INLINE_LAMBDA {
                        Chunk<Acc, W> weights;
                        load_weights(mask, span.mask, span.size, at, weights);
#pragma unroll
                        for (int i = 0; i < W; ++i) length += weights.element[i];
                      });
    }
    flush(turns.tile, sums);
  }
}

}  // namespace klfast::cuda
