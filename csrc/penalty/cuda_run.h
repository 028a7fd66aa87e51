// A warp's pass over its tiles of a segment.

#pragma once

#include "penalty/cuda_tile.h"

namespace klfast::cuda {

// Calls flush(tile, sums) with the sums of each of the warp's tiles.
template <typename T, typename Acc, typename Flush>
__device__ __forceinline__ void run_tiles(const Task& task, const Limits<Acc>& limit,
                                          const Factors<Acc>& factors, const Span& segment,
                                          Turns turns, const Flush& flush) {
  constexpr int W = kWidth<T>;
  constexpr int kGroup = W < 4 ? W : 4;
  LaneSums<Acc> sums = empty_lane<Acc>();
#pragma unroll 1
  for (; turns.first() < segment.size; turns = turns.after()) {
    visit_chunks<W>(segment, turns.position(), turns.end(segment.size),
                    [&](const Span& span, const Place& at) KLFAST_INLINE_LAMBDA {
                      const Fetched<T, W> fetched = fetch_all<T, W>(task.in, span, at);
#pragma unroll
                      for (int first = 0; first < W; first += kGroup) {
                        Tokens<Acc, kGroup> tokens;
                        take_tokens(fetched, first, task.in.old_logprobs.data != nullptr, tokens);
                        evaluate(task.in.options.estimator, limit, tokens);
                        add_tokens(tokens, at.position + first, sums);
                        const Place here = {at.position + first, at.end};
                        if (task.in.is_weighted()) {
                          weigh(task.in.weighting, span, here, tokens, sums);
                        }
                        if (task.stored != 0) {
                          store_results<T>(task, factors, span, here, tokens);
                        }
                      }
                    });
    flush(turns.tile, sums);
    sums = empty_lane<Acc>();
  }
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
    visit_chunks<W>(segment, first, end,
                    [&](const Span& span, const Place& at) KLFAST_INLINE_LAMBDA {
                      Chunk<Acc, W> weights;
                      load_weights(mask, span.mask, span.size, at, weights);
#pragma unroll
                      for (int i = 0; i < W; ++i) length += weights.element[i];
                    });
    flush(turns.tile, sums);
  }
}

}  // namespace klfast::cuda
