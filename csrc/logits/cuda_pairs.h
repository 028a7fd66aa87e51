// Sums over the words of two models, in chunks of near words as a rule.

#pragma once

#include "logits/cuda_rows.h"

namespace klfast::cuda {

// The base in which float is summed (divergences.h).
template <typename Acc>
inline constexpr math::Base kBase = sizeof(Acc) == 4 ? math::Base::kTwo : math::Base::kE;

template <typename Acc>
using GuessOf = divergences::Guess<Acc, kBase<Acc>>;

// u' of a chunk's words, in rows without offsets.
template <typename Acc, int W>
struct LogRatios {
  Acc of[W];

  __device__ __forceinline__ LogRatios(const Chunk<Acc, W>& first, const Chunk<Acc, W>& second,
                                       const GuessOf<Acc>& guess) {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      of[i] = math::fma(second.element[i] - first.element[i], guess.scale, -guess.ratio);
    }
  }

  // Whether all of a warp's may be, and are, at most `limit`, which NaN is not.
  __device__ __forceinline__ bool are_within(Acc limit, bool may_be = true) const {
    bool far = !may_be;
#pragma unroll
    for (int i = 0; i < W; ++i) far |= !(fabs(of[i]) <= limit);
    return !__any_sync(0xffffffffu, far);
  }
};

template <typename Acc>
__device__ __forceinline__ bool has_offset(const GuessOf<Acc>& guess) {
  return guess.first_offset != guess.second_offset;
}

// Calls near(words) for the thread's chunks of all rounds, far(words) for those where it returned
// false, and flush() now and then. All lanes of a warp take part, and near() returns the same in all
// of them. The order of the calls depends on what it returns alone: of 32 rounds the far ones come
// last. They are loaded once more, so that nothing of them is in the way of the near ones, of which
// two chunks are loaded during two calls.
template <typename Rows, typename Near, typename Far, typename Flush>
__device__ __forceinline__ void for_each_chunk(const Rows& rows, const Near& near, const Far& far,
                                               const Flush& flush) {
  using T = typename Rows::Type;
  constexpr int kGroup = 2;
  constexpr int kSpan = 32;
#pragma unroll 1
  for (int span = 0; span < rows.rounds.some; span += kSpan) {
    const int end = min(span + kSpan, rows.rounds.some);
    const int whole = min(end, rows.whole_rounds()) / kGroup * kGroup;
    unsigned far_rounds = 0;
    int round = span;
    if (round < whole) {
      Fetch<Rows::kOf> fetches[kGroup];
#pragma unroll
      for (int g = 0; g < kGroup; ++g) fetches[g] = rows.load_whole(round + g);
#pragma unroll 1
      for (; round < whole; round += kGroup) {
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
          const auto words = convert_words<T>(fetches[g]);
          if (round + kGroup < whole) fetches[g] = rows.load_whole(round + kGroup + g);
          if (!near(words)) far_rounds |= 1u << (round - span + g);
        }
        if ((round & kGroup) != 0) flush();
      }
    }
#pragma unroll 1
    for (; round < end; ++round) {
      if (!near(convert_words<T>(rows.load(round)))) far_rounds |= 1u << (round - span);
      if (round % (2 * kGroup) == 2 * kGroup - 1) flush();
    }
#pragma unroll 1
    for (round = span; far_rounds != 0; far_rounds >>= 1, ++round) {
      if ((far_rounds & 1) == 0) continue;
      far(convert_words<T>(rows.load(round)));
      flush();
    }
  }
  flush();
}

}  // namespace klfast::cuda
