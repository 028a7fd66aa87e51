// The blocks that read one row, and the combination of numbers over all their threads.

#pragma once

#include "device/cuda/cluster.h"
#include "logits/cuda_rows.h"
#include "tensors/convert.h"

namespace klfast::cuda {

inline constexpr int kMostWarps = kMostThreads / kWarp;
inline constexpr int kMostNumbers = 5;  // combined at a time

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
#pragma unroll 1
  for (int step = kWarp / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      numbers[i] = How::of(numbers[i], __shfl_xor_sync(0xffffffffu, numbers[i], step));
    }
  }
}

// The numbers of every warp, in shared memory. Two sets are used in turns: while one block of a
// cluster writes for a combination, another may still read those of the last.
struct Exchange {
  double numbers[2][kMostWarps][kMostNumbers];
  int turn;
};

struct Team {
  const RowPlan& plan;
  Exchange& exchange;

  // All threads must construct it, and take part in every combination.
  __device__ __forceinline__ Team(const RowPlan& plan, Exchange& exchange)
      : plan(plan), exchange(exchange) {
    if (threadIdx.x == 0) exchange.turn = 0;
    __syncthreads();
  }

  // Combines numbers over all threads of all blocks, always in the same order. The first warp of
  // every block gets the result. The caller has a barrier of the block between two combinations.
  template <typename How, int n>
  __device__ __forceinline__ void combine(double (&numbers)[n]) {
    static_assert(n <= kMostNumbers);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warps = static_cast<int>(blockDim.x) / kWarp;
    auto* const own = exchange.numbers[exchange.turn];
    combine_lanes<How>(numbers);
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < n; ++i) own[warp][i] = numbers[i];
    }
    meet();
    if (warp == 0) {
#pragma unroll
      for (int i = 0; i < n; ++i) numbers[i] = How::of_nothing();
#pragma unroll 1
      for (int place = lane; place < plan.blocks * warps; place += kWarp) {
        const double* from = own[place % warps];
        if (plan.blocks > 1) from = of_block(from, place / warps);
#pragma unroll
        for (int i = 0; i < n; ++i) numbers[i] = How::of(numbers[i], from[i]);
      }
      combine_lanes<How>(numbers);
      if (lane == 0) exchange.turn ^= 1;
    }
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
  __device__ __forceinline__ void meet() const {
    if (plan.blocks == 1) return __syncthreads();
    cluster_arrive();
    cluster_wait();
  }
};

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
template <math::Base base = math::Base::kE>
__device__ __noinline__ double log_prob(const RowInputs& in, const Logits& logits,
                                        const char* first, int64_t row, double scale, double unit,
                                        double origin, double lse) {
  if (!is_word(in, row)) return NAN;
  double word = 0;
  visit_dtype(logits.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (is_floating<T>) {
      word = convert<double>(
          reinterpret_cast<const T*>(first)[in.token_ids[row] * logits.word_stride]);
    }
  });
  return divergences::log_prob<base>(word, scale, unit, origin, lse);
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
