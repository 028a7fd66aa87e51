// Sums over words of two models. Most chunks have only near words.

#pragma once

#include "logits/cuda_rows.h"
#include "math/packed.h"

namespace klfast::cuda {

template <typename Acc>
using GuessOf = divergences::Guess<Acc, kBase<Acc>>;

// u' of the words in a chunk, for rows without offsets.
template <typename Acc, int W>
struct LogRatios {
  Acc of[W];
  bool are_near;  // equal in all lanes of a warp: `may_be`, and |u| <= `limit` in all

  // NaN is not near.
  __device__ __forceinline__ LogRatios(const Chunk<Acc, W>& first, const Chunk<Acc, W>& second,
                                       const GuessOf<Acc>& guess, Acc limit, bool may_be = true) {
    bool far = !may_be;
    using Number = math::Packed<Acc>;
    constexpr int kWords = sizeof(Number) / sizeof(Acc);
#pragma unroll
    for (int i = 0; i < W; i += kWords) {
      const Number difference =
          math::packed<Number>(&second.element[i]) - math::packed<Number>(&first.element[i]);
      const auto ratios = math::unpacked<Acc>(math::fma(difference, guess.scale, -guess.ratio));
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        of[i + j] = ratios.element[j];
        far |= !(fabs(of[i + j]) <= limit);
      }
    }
    are_near = !__any_sync(0xffffffffu, far);
  }
};

// The greatest |u| of near words in a row, in the base's unit. It is negative if the row has none,
// because it has an offset or an origin.
template <typename Acc>
__device__ __forceinline__ Acc near_limit(const GuessOf<Acc>& guess, const Frame<Acc, 2>& frame) {
  const bool is_plain = guess.first_offset == guess.second_offset && frame.if_any() == nullptr;
  return is_plain ? Acc(1 / math::kNats<kBase<Acc>>) : Acc(-1);
}

// Sums over the thread's chunks of all rounds. `rows` loads them (cuda_rows.h). `sums` has these
// functions:
//   start()                 is called once, after the first whole rounds are requested.
//   near_of(words)          says if a chunk is near (are_near), the same in all lanes of a warp.
//   add_near(words, near)   adds a near chunk.
//   add_far(words)          adds any chunk.
//   flush()                 is called after every fourth round, and after every far chunk.
// All lanes of a warp take part. Only the words decide the order of the calls. Among kSpan rounds,
// the far rounds come last. Their chunks are loaded again, so that the far rounds cost the near
// ones no registers. Two near chunks are loaded while two are added.
// benchmarks/results/sass.json has bounds for the instructions per word.
template <typename Rows, typename Sums>
__device__ __forceinline__ void add_chunks(const Rows& rows, Sums& sums) {
  using T = typename Rows::Type;
  constexpr int kGroup = 2;
  constexpr int kSpan = 32;
  static_assert(kSpan == 8 * sizeof(unsigned), "far_rounds has a bit for each round of a span");
  Fetch<Rows::kOf> fetches[kGroup];
  const auto load_group = [&](int round) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) fetches[g] = rows.load_whole(round + g);
  };
  constexpr bool kHasWhole = !is_any_dtype<T>;
  if (kHasWhole && rows.rounds.whole >= kGroup) load_group(0);
  sums.start();
#pragma unroll 1
  for (int span = 0; span < rows.rounds.some; span += kSpan) {
    const int end = min(span + kSpan, rows.rounds.some);
    const int whole = min(end, rows.rounds.whole) / kGroup * kGroup;
    unsigned far_rounds = 0;
    int round = span;
    if (kHasWhole && round < whole) {
      if (span > 0) load_group(span);
#pragma unroll 1
      for (; round < whole; round += kGroup) {
        // In the last round the same chunks are loaded again. A condition would need a copy of
        // their registers.
        const int next = min(round + kGroup, whole - kGroup);
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
          const auto words = convert_words<T>(fetches[g]);
          const auto near = sums.near_of(words);
          fetches[g] = rows.load_whole(next + g);  // after the vote, to reuse registers
          if (near.are_near) {
            sums.add_near(words, near);
          } else {
            far_rounds |= 1u << (round - span + g);
          }
        }
        if ((round & kGroup) != 0) sums.flush();
      }
    }
#pragma unroll 1
    for (; round < end; ++round) {
      const auto words = convert_words<T>(rows.load(round));
      const auto near = sums.near_of(words);
      if (near.are_near) {
        sums.add_near(words, near);
      } else {
        far_rounds |= 1u << (round - span);
      }
      if (round % (2 * kGroup) == 2 * kGroup - 1) sums.flush();
    }
#pragma unroll 1
    for (round = span; far_rounds != 0; far_rounds >>= 1, ++round) {
      if ((far_rounds & 1) == 0) continue;
      sums.add_far(convert_words<T>(rows.load(round)));
      sums.flush();
    }
  }
  sums.flush();
}

}  // namespace klfast::cuda
