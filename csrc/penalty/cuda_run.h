// A warp's pass over a tile: the sums of its lanes.

#pragma once

#include "penalty/cuda_smooth.h"

namespace klfast::cuda {

template <typename T, Pass pass, typename Acc>
__device__ __forceinline__ LaneSums<Acc> run_tile(const Task& task, const Limits<Acc>& limit,
                                                  const Factors<Acc>& factors,
                                                  const Tile& warp_tile) {
  constexpr int W = kWidth<T, pass>;
  constexpr int kGroup = W < 4 ? W : 4;
  LaneSums<Acc> sums = empty_lane<Acc>();
  int done = 0;
  if constexpr (kHasSmooth<T, pass>) {
    const bool has_grad_out = task.backward && task.in.reduction.result == Result::kToken;
    if (warp_tile.is_smooth && !has_grad_out) {
      const int size =
          warp_tile.size < kTileTokens ? warp_tile.size : static_cast<int>(kTileTokens);
      done = size / (kWarp * W) * (kWarp * W);
      visit_row(estimators::Table(), task.in.options.estimator, [&](auto formula) {
        run_smooth<T, pass, decltype(formula)>(task, factors, warp_tile, done, sums);
      });
    }
  }
  visit_chunks<W>(warp_tile, done, [&](const Tile& tile, const Place& at) {
    const Fetched<T, W> fetched = fetch_all<T, pass, W>(task.in, tile, at);
#pragma unroll
    for (int first = 0; first < W; first += kGroup) {
      Tokens<Acc, kGroup> tokens;
      take_tokens<pass>(fetched, first, task.in.old_logprobs.data != nullptr, tokens);
      evaluate<pass>(task.in.options.estimator, limit, tokens);
      add_tokens<pass>(tokens, at.position + first, sums);
      if (task.stores_tokens) {
        store_results<T, pass>(task, factors, tile, Place{at.position + first, at.end}, tokens);
      }
    }
  });
  return sums;
}

// The sum of the weights alone, in the order of run_tile.
template <int W, typename Acc>
__device__ __forceinline__ LaneSums<Acc> run_lengths(const Task& task, const Tile& warp_tile) {
  LaneSums<Acc> sums = empty_lane<Acc>();
  visit_chunks<W>(warp_tile, 0, [&](const Tile& tile, const Place& at) {
    Chunk<Acc, W> weights;
    load_weights(task.in.mask, tile, at, weights);
#pragma unroll
    for (int i = 0; i < W; ++i) sums.at[kLength] += weights.element[i];
  });
  return sums;
}

}  // namespace klfast::cuda
