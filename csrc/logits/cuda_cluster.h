// The blocks that read one row, and how numbers are combined over all their threads.

#pragma once

#include "device/cuda/cluster.h"
#include "logits/cuda_rows.h"
#include "logits/rows.h"
#include "math/combine.h"
#include "tensors/convert.h"

namespace klfast::cuda {

inline constexpr int kPairWarps = kPairThreads / kWarp;
inline constexpr int kMostNumbers = 4;  // most calls combine at most so many at a time

using math::Maximum;
using math::Sum;

// Combines each of n numbers over the lanes of a warp, with few instructions.
template <typename How, int n>
__device__ __forceinline__ void combine_numbers(double (&numbers)[n]) {
#pragma unroll 1
  for (int step = kWarp / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      numbers[i] = How::combine(numbers[i], __shfl_xor_sync(0xffffffffu, numbers[i], step));
    }
  }
}

// The blocks of a row, which form a cluster if there are several.
struct BlocksOfRow {
  const RowPlan& plan;

  // leave() follows the last combination. end() comes last in a block, because other blocks read
  // its memory until all have left.
  __device__ __forceinline__ void leave() const {
    if (plan.blocks > 1) cluster_arrive();
  }
  __device__ __forceinline__ void end() const {
    if (plan.blocks > 1) cluster_wait();
  }
  __device__ __forceinline__ void meet() const {
    if (plan.blocks == 1) return __syncthreads();
    cluster_arrive();
    cluster_wait();
  }
};

// The numbers of every warp over one part.
template <int kNumbers>
using WarpNumbers = double[kPairWarps][kNumbers];

// The shared memory of a cluster. A block has a set of numbers for each of its parts. A block that
// shares its row has two such groups and uses them in turns. While it writes the numbers of a
// combination, another block may still read those before.
template <int kNumbers = kMostNumbers>
struct ClusterMemory {
  WarpNumbers<kNumbers> sets[kMostPairParts];
  double totals[kNumbers];
  // Per warp, equal in all lanes. They are in shared memory because the sums use all registers.
  int group[kPairWarps];  // its first set
  int part[kPairWarps];   // of the block's
};

// Combines numbers over the lanes of a warp. Lane 32 / n * i gets number i. While a lane has
// several numbers, it gives away half of them at every step.
template <typename How, int n>
__device__ __forceinline__ double scatter_lanes(double (&numbers)[n]) {
  static_assert(n == 1 || n == 2 || n == 4 || n == 8);
  int step = kWarp / 2;
#pragma unroll
  for (int half = n / 2; half > 0; half /= 2, step /= 2) {
    const bool is_upper = (threadIdx.x & static_cast<unsigned>(step)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const double given = is_upper ? numbers[i] : numbers[i + half];
      const double kept = is_upper ? numbers[i + half] : numbers[i];
      numbers[i] = How::combine(kept, __shfl_xor_sync(0xffffffffu, given, step));
    }
  }
#pragma unroll
  for (; step > 0; step /= 2) {
    numbers[0] = How::combine(numbers[0], __shfl_xor_sync(0xffffffffu, numbers[0], step));
  }
  return numbers[0];
}

// The blocks that sum a row. Each takes its parts one after the other. Numbers are combined over
// the lanes of a warp in each part, and then over warps and parts, so any number of blocks gives
// the same bits.
template <int kNumbers = kMostNumbers>
struct Cluster : BlocksOfRow {
  using Memory = ClusterMemory<kNumbers>;
  Memory& memory;

  // All threads call all functions here. Every warp has a barrier of its own after this.
  __device__ __forceinline__ Cluster(const RowPlan& plan, Memory& memory)
      : BlocksOfRow{plan}, memory(memory) {
    if (is_first_lane()) own(memory.group) = 0;
  }

  // Combines `n` numbers over all threads and all parts, always in the same order. of_part(part,
  // numbers) gives a thread's numbers of a part. The first thread of every block gets the totals.
  // The caller puts a barrier of the block between two combinations.
  template <typename How, int n, typename OfPart>
  __device__ __forceinline__ const double* combine(const OfPart& of_part) const {
    static_assert(n <= kNumbers);
    if (is_first_lane()) own(memory.part) = 0;
    __syncwarp();
#pragma unroll 1
    do {
      double of_thread[n];
      of_part(plan.rank_of_block() * plan.share + own(memory.part), of_thread);
      const double sum = scatter_lanes<How>(of_thread);
      const int part = own(memory.part);
      const unsigned lane = in_register(threadIdx.x) % kWarp;
      if (lane % (kWarp / n) == 0) {
        memory.sets[own(memory.group) + part][own_warp()][lane / (kWarp / n)] = sum;
      }
      __syncwarp();
      if (is_first_lane()) own(memory.part) = part + 1;
      __syncwarp();
    } while (own(memory.part) < plan.share);
    meet();
    if (own_warp() == 0) read<How, n>(plan.blocks, plan.share, memory);
    if (is_first_lane() && plan.blocks > 1) own(memory.group) ^= plan.share;
    return memory.totals;
  }

 private:
  __device__ __forceinline__ static unsigned own_warp() { return in_register(threadIdx.x) / kWarp; }
  __device__ __forceinline__ static bool is_first_lane() {
    return in_register(threadIdx.x) % kWarp == 0;
  }
  __device__ __forceinline__ static int& own(int (&of_warp)[kPairWarps]) {
    return of_warp[own_warp()];
  }

  // Run by the first warp. It is not inlined, so that its numbers and the plan's address take no
  // registers from the sums.
  template <typename How, int n>
  __device__ __noinline__ static void read(int blocks, int share, Memory& memory) {
    double numbers[n];
#pragma unroll
    for (int i = 0; i < n; ++i) numbers[i] = How::kEmpty;
#pragma unroll 1
    for (int place = static_cast<int>(threadIdx.x); place < blocks * share * kPairWarps;
         place += kWarp) {
      const int part = place / kPairWarps;
      const int set = memory.group[0] + (part & (share - 1));
      const double* from = memory.sets[set][place % kPairWarps];
      if (blocks > 1) from = of_block(from, part >> (31 - __clz(static_cast<unsigned>(share))));
#pragma unroll
      for (int i = 0; i < n; ++i) numbers[i] = How::combine(numbers[i], from[i]);
    }
    combine_numbers<How>(numbers);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (threadIdx.x == 0) memory.totals[i] = numbers[i];
    }
  }
};

// The place of the row's target token in a part, or -1.
__device__ __forceinline__ int64_t target_in(const RowInputs& in, int64_t row, const Part& part) {
  if (in.token_ids == nullptr || !in.is_word(in.token_ids[row])) return -1;
  const int64_t place = in.token_ids[row] - part.begin;
  return place < part.size ? place : -1;
}

// The target token's log-prob in a row that starts at `first`. It is NaN if the id is no word.
// `scale` is rounded, as in the sums.
template <math::Base base = math::Base::kE>
__device__ __noinline__ double log_prob(const RowInputs& in, const Logits& logits,
                                        const char* first, int64_t row, double scale, double unit,
                                        double origin, double lse) {
  if (!in.is_word(in.token_ids[row])) return NAN;
  const double word = element_at<true>(first, logits.dtype, in.token_ids[row] * logits.word_stride);
  return divergences::log_prob<base>(word, scale, unit, origin, lse);
}

}  // namespace klfast::cuda
