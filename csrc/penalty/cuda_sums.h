// Sums of a lane, a tile, a segment and a sequence, and the order in which they are added.

#pragma once

#include "device/cuda/device.h"
#include "formulas/statistics.h"

namespace klfast::cuda {

// The sums of a lane over a tile: short, and so exact enough in the arithmetic's type.
template <typename Acc>
struct LaneSums : Statistics<Acc> {
  int last_kept;  // position in the tile, or -1
};

// The sums of a tile, a segment or a sequence. Without initialisers, as it lies in shared memory.
struct Sums : Statistics<double> {
  int64_t last_kept;  // index among all tokens, or -1
};

template <typename Acc>
__device__ __forceinline__ LaneSums<Acc> empty_lane() {
  return {empty_statistics<Acc>(), -1};
}

__device__ __forceinline__ Sums empty_sums() { return {empty_statistics<double>(), -1}; }

__device__ __forceinline__ int64_t greater(int64_t a, int64_t b) { return b > a ? b : a; }

template <Depth depth>
__device__ __forceinline__ void add(Sums& sum, const Sums& part) {
  combine<depth>(sum, part);
  sum.last_kept = greater(sum.last_kept, part.last_kept);
}

// The values of all lanes of a warp as one, in every lane.
template <typename Combination>
__device__ __forceinline__ double combine_lanes(double value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = Combination::combine(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  return value;
}

__device__ __forceinline__ double add_lanes(double value) {
  return combine_lanes<math::Sum>(value);
}

__device__ __forceinline__ int64_t greatest_of_lanes(int64_t value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = greater(value, __shfl_xor_sync(0xffffffffu, static_cast<long long>(value), step));
  }
  return value;
}

// The sums of a tile, in every lane. first_token is the index of its first token among all.
template <Depth depth, typename Acc>
__device__ __forceinline__ Sums add_up(const LaneSums<Acc>& lane, bool want_last_kept,
                                       int64_t first_token) {
  Sums sums = empty_sums();
  for_each_statistic<depth>([&](auto row) {
    using Row = decltype(row);
    constexpr int i = index_of<Row>;
    sums.at[i] = combine_lanes<Row>(lane.at[i]);
  });
  if (want_last_kept) {
    sums.last_kept = greatest_of_lanes(lane.last_kept < 0 ? -1 : first_token + lane.last_kept);
  }
  return sums;
}

// The sums of segments in memory, written by one block, read by the last: the statistics, and
// kLastKept if asked for.
struct Partials {
  double* data;  // [rows, slots]
  int64_t slots;

  static constexpr int kLastKept = kStatistics;
  static constexpr int rows(bool has_all) {
    return has_all ? kLastKept + 1 : number_of_statistics<Depth::kAlways>;
  }

  __device__ __forceinline__ void put(int row, int64_t slot, double value) const {
    data[row * slots + slot] = value;
  }
  __device__ __forceinline__ double get(int row, int64_t slot) const {
    return __ldcg(data + row * slots + slot);  // past the first-level cache, which may be stale
  }
};

template <Depth depth>
__device__ __forceinline__ void put(const Partials& partials, int64_t slot, const Sums& sums,
                                    bool with_last_kept) {
  for_each_statistic<depth>([&](auto row) {
    constexpr int i = index_of<decltype(row)>;
    partials.put(i, slot, sums.at[i]);
  });
  if (with_last_kept) {
    partials.put(Partials::kLastKept, slot, math::bit_cast<double>(sums.last_kept));
  }
}

template <Depth depth>
__device__ __forceinline__ Sums get(const Partials& partials, int64_t slot, bool with_last_kept) {
  Sums sums = empty_sums();
  for_each_statistic<depth>([&](auto row) {
    constexpr int i = index_of<decltype(row)>;
    sums.at[i] = partials.get(i, slot);
  });
  if (with_last_kept) {
    sums.last_kept = math::bit_cast<int64_t>(partials.get(Partials::kLastKept, slot));
  }
  return sums;
}

}  // namespace klfast::cuda
