// Sums of a lane, a tile, a segment and a sequence, and the order in which they are added.

#pragma once

#include "device/cuda/device.h"
#include "formulas/token.h"
#include "penalty/call.h"

namespace klfast::cuda {

// The sums of a lane over a tile: short, and so exact enough in the arithmetic's type.
template <typename Acc>
struct LaneSums {
  using Bits = typename math::Constants<Acc>::Bits;
  Acc kl = 0;
  Acc length = 0;
  Acc k1 = 0;
  Acc k2 = 0;
  Acc k3 = 0;
  int clipped = 0;
  int nonfinite = 0;
  Bits max_log_ratio = 0;  // of a non-negative number: ordered as integers, NaN last
  int last_kept = -1;      // position in the tile
};

// The sums of a tile, a segment or a sequence, as fields of 8 bytes: blocks pass them on in one
// array.
struct Sums {
  enum Field {
    kKl,
    kLength,
    kK1,
    kK2,
    kK3,
    kClipped,
    kNonfinite,
    kMaxLogRatio,
    kLastKept,
    kFields
  };
  double kl = 0;
  double length = 0;
  double k1 = 0;
  double k2 = 0;
  double k3 = 0;
  double clipped = 0;
  double nonfinite = 0;
  int64_t max_log_ratio = 0;
  int64_t last_kept = -1;  // index among all tokens
};

template <bool kStatistics>
__device__ __forceinline__ void add(Sums& sum, const Sums& part) {
  sum.kl += part.kl;
  sum.length += part.length;
  if constexpr (kStatistics) {
    sum.k1 += part.k1;
    sum.k2 += part.k2;
    sum.k3 += part.k3;
    sum.clipped += part.clipped;
    sum.nonfinite += part.nonfinite;
    sum.max_log_ratio =
        part.max_log_ratio > sum.max_log_ratio ? part.max_log_ratio : sum.max_log_ratio;
  }
  sum.last_kept = part.last_kept > sum.last_kept ? part.last_kept : sum.last_kept;
}

__device__ __forceinline__ double add_lanes(double value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

__device__ __forceinline__ int64_t greatest_of_lanes(int64_t value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const int64_t other = __shfl_xor_sync(0xffffffffu, static_cast<long long>(value), step);
    value = other > value ? other : value;
  }
  return value;
}

// The sums of a tile, in every lane. first_token is the index of its first token among all.
template <bool kStatistics, typename Acc>
__device__ __forceinline__ Sums add_up(const LaneSums<Acc>& lane, bool want_last_kept,
                                       int64_t first_token) {
  Sums sums;
  sums.kl = add_lanes(lane.kl);
  sums.length = add_lanes(lane.length);
  if constexpr (kStatistics) {
    sums.k1 = add_lanes(lane.k1);
    sums.k2 = add_lanes(lane.k2);
    sums.k3 = add_lanes(lane.k3);
    sums.clipped = add_lanes(lane.clipped);
    sums.nonfinite = add_lanes(lane.nonfinite);
    sums.max_log_ratio = greatest_of_lanes(lane.max_log_ratio);
  }
  if (want_last_kept) {
    sums.last_kept = greatest_of_lanes(lane.last_kept < 0 ? -1 : first_token + lane.last_kept);
  }
  return sums;
}

// Partial sums of segments in memory, [fields, slots]: written by one block, read by the last.
struct Partials {
  double* data;
  int64_t slots;

  __device__ __forceinline__ void put(Sums::Field field, int64_t slot, double value) const {
    data[field * slots + slot] = value;
  }
  __device__ __forceinline__ double get(Sums::Field field, int64_t slot) const {
    return __ldcg(data + field * slots + slot);  // past the first-level cache, which may be stale
  }
};

template <bool kStatistics>
__device__ __forceinline__ void put(const Partials& partials, int64_t slot, const Sums& sums,
                                    bool with_last_kept) {
  partials.put(Sums::kKl, slot, sums.kl);
  partials.put(Sums::kLength, slot, sums.length);
  if constexpr (kStatistics) {
    partials.put(Sums::kK1, slot, sums.k1);
    partials.put(Sums::kK2, slot, sums.k2);
    partials.put(Sums::kK3, slot, sums.k3);
    partials.put(Sums::kClipped, slot, sums.clipped);
    partials.put(Sums::kNonfinite, slot, sums.nonfinite);
    partials.put(Sums::kMaxLogRatio, slot, math::bit_cast<double>(sums.max_log_ratio));
  }
  if (with_last_kept) partials.put(Sums::kLastKept, slot, math::bit_cast<double>(sums.last_kept));
}

template <bool kStatistics>
__device__ __forceinline__ Sums get(const Partials& partials, int64_t slot, bool with_last_kept) {
  Sums sums;
  sums.kl = partials.get(Sums::kKl, slot);
  sums.length = partials.get(Sums::kLength, slot);
  if constexpr (kStatistics) {
    sums.k1 = partials.get(Sums::kK1, slot);
    sums.k2 = partials.get(Sums::kK2, slot);
    sums.k3 = partials.get(Sums::kK3, slot);
    sums.clipped = partials.get(Sums::kClipped, slot);
    sums.nonfinite = partials.get(Sums::kNonfinite, slot);
    sums.max_log_ratio = math::bit_cast<int64_t>(partials.get(Sums::kMaxLogRatio, slot));
  }
  if (with_last_kept) {
    sums.last_kept = math::bit_cast<int64_t>(partials.get(Sums::kLastKept, slot));
  }
  return sums;
}

}  // namespace klfast::cuda
