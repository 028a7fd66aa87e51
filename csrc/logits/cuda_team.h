// The blocks that read one row, and the combination of numbers over all their threads.

#pragma once

#include "device/cuda/cluster.h"
#include "logits/cuda_rows.h"
#include "tensors/convert.h"

namespace klfast::cuda {

struct Add {
  __device__ static double of_nothing() { return 0; }
  __device__ static double of(double a, double b) { return a + b; }
};

// The greater number; NaN is ignored.
struct Greatest {
  __device__ static double of_nothing() { return -INFINITY; }
  template <typename T>
  __device__ static T of(T a, T b) {
    return b > a ? b : a;
  }
};

template <typename How, int n>
__device__ __forceinline__ void combine_lanes(double (&numbers)[n]) {
#pragma unroll(n > 2 ? 1 : 5)
  for (int step = kWarp / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      numbers[i] = How::of(numbers[i], __shfl_xor_sync(0xffffffffu, numbers[i], step));
    }
  }
}

// The numbers of every warp of up to kWarps for each part of a row that one block sums, in shared
// memory. Two sets are used in turns: while one block of a cluster writes for a combination,
// another may still read those of the last.
template <int kParts, int kWarps, int kNumbers, bool kSharesTurn>
struct ExchangeOf {
  static constexpr int kMostParts = kParts;
  static constexpr int kMostWarps = kWarps;
  static constexpr int kMostNumbers = kNumbers;
  static constexpr bool kHasTurn = kSharesTurn;  // kernels short of registers keep it here
  double numbers[2][kParts][kWarps][kNumbers];
  int turn;
};

// A row is summed in parts, by one block each or by one block one after the other. Numbers are
// combined over the lanes of a warp for each part alone, and then over parts and warps, so that
// both ways give the same bits.
template <typename Exchange>
struct TeamOf {
  const RowPlan& plan;
  Exchange& exchange;

  // All threads take part in everything here.
  __device__ __forceinline__ TeamOf(const RowPlan& plan, Exchange& exchange)
      : plan(plan), exchange(exchange) {
    if constexpr (Exchange::kHasTurn) {
      if (threadIdx.x == 0) exchange.turn = 0;
      __syncthreads();
    }
  }

  // Takes a thread's numbers of a part; every part of the block must be kept before the total.
  template <typename How, int n>
  __device__ __forceinline__ void keep(int part, double (&numbers)[n]) const {
    combine_lanes<How>(numbers);
    if (threadIdx.x % kWarp == 0) {
      double* const own = place_of(part, static_cast<int>(threadIdx.x) / kWarp);
#pragma unroll
      for (int i = 0; i < n; ++i) own[i] = numbers[i];
    }
  }

  // The numbers kept, combined over parts and warps, always in the same order. The first warp of
  // every block gets the result. The caller has a barrier of the block between two totals.
  template <typename How, int n>
  __device__ __forceinline__ void total(double (&numbers)[n]) {
    meet();
    if (threadIdx.x < kWarp) {
      const int warps = static_cast<int>(blockDim.x) / kWarp;
#pragma unroll
      for (int i = 0; i < n; ++i) numbers[i] = How::of_nothing();
#pragma unroll 1
      for (int place = static_cast<int>(threadIdx.x); place < plan.parts * Exchange::kMostWarps;
           place += kWarp) {
        const int part = place / Exchange::kMostWarps;
        const int warp = place % Exchange::kMostWarps;
        if (warp >= warps) continue;
        const double* from = place_of(part, warp);
        if (plan.blocks > 1) from = of_block(from, part);
#pragma unroll
        for (int i = 0; i < n; ++i) numbers[i] = How::of(numbers[i], from[i]);
      }
      combine_lanes<How>(numbers);
      if (Exchange::kHasTurn && threadIdx.x == 0) exchange.turn ^= 1;
    }
    own_turn ^= 1;
  }

  // Both, where each block sums one part.
  template <typename How, int n>
  __device__ __forceinline__ void combine(double (&numbers)[n]) {
    keep<How>(plan.rank_of_block(), numbers);
    total<How>(numbers);
  }

  // leave() follows the last combination, end() is last in a block: other blocks read its memory
  // until all have left.
  __device__ __forceinline__ void leave() const {
    if (plan.blocks > 1) cluster_arrive();
  }
  __device__ __forceinline__ void end() const {
    if (plan.blocks > 1) cluster_wait();
  }

 private:
  int own_turn = 0;

  __device__ __forceinline__ void meet() const {
    if (plan.blocks == 1) return __syncthreads();
    cluster_arrive();
    cluster_wait();
  }

  __device__ __forceinline__ double* place_of(int part, int warp) const {
    const int turn = Exchange::kHasTurn ? exchange.turn : own_turn;
    return exchange.numbers[turn][Exchange::kMostParts == 1 ? 0 : part][warp];
  }
};

using Exchange = ExchangeOf<1, kMostThreads / kWarp, 5, true>;
using Team = TeamOf<Exchange>;

__device__ __forceinline__ bool is_word(const RowInputs& in, int64_t row) {
  return in.token_ids[row] >= 0 && in.token_ids[row] < in.shape.words;
}

// The place of the row's target token in a part, or -1.
__device__ __forceinline__ int64_t target_in(const RowInputs& in, int64_t row, const Part& part) {
  if (in.token_ids == nullptr || !is_word(in, row)) return -1;
  const int64_t place = in.token_ids[row] - part.begin;
  return place < part.size ? place : -1;
}

// The target token's log-prob in a row that starts at `first`; NaN if it is no word. `scale` is
// rounded, as in the sums.
inline __device__ __noinline__ double log_prob(const RowInputs& in, const Logits& logits,
                                               const char* first, int64_t row, double scale,
                                               double unit, double origin, double lse) {
  if (!is_word(in, row)) return NAN;
  double word = 0;
  visit_dtype(logits.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (is_floating<T>) {
      word = convert<double>(
          reinterpret_cast<const T*>(first)[in.token_ids[row] * logits.word_stride]);
    }
  });
  return divergences::log_prob(word, scale, unit, origin, lse);
}

template <typename Acc>
__device__ __forceinline__ void store_number(void* data, int64_t index, double value) {
  if (data != nullptr) static_cast<Acc*>(data)[index] = static_cast<Acc>(value);
}

template <typename Acc>
__device__ __forceinline__ double number_at(const void* data, int64_t index) {
  return data == nullptr ? 0.0 : static_cast<double>(static_cast<const Acc*>(data)[index]);
}

// The greatest of a thread's words in the first `rounds` rounds, of each model.
template <typename Rows>
__device__ __forceinline__ void find_greatest(const Rows& rows, int rounds,
                                              double (&greatest)[Rows::kOf]) {
  using T = typename Rows::Type;
  AccOf<T> best[Rows::kOf];
#pragma unroll
  for (int m = 0; m < Rows::kOf; ++m) best[m] = -INFINITY;
  const auto add = [&](const Converted<T, Rows::kOf>& words) {
#pragma unroll
    for (int m = 0; m < Rows::kOf; ++m) {
#pragma unroll
      for (int i = 0; i < kChunk<T>; ++i) {
        best[m] = Greatest::of(best[m], words.of[m].element[i]);
      }
    }
  };
  for_each_round<1>(rows, rounds < rows.rounds.some ? rounds : rows.rounds.some, add, [] {});
#pragma unroll
  for (int m = 0; m < Rows::kOf; ++m) greatest[m] = best[m];
}

}  // namespace klfast::cuda
