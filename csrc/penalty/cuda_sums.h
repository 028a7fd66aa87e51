// Sums of a lane, a segment and a sequence, and the order in which they are added.

#pragma once

#include "device/cuda/lanes.h"
#include "device/cuda/segments.h"
#include "formulas/statistics.h"

namespace klfast::cuda {

// The sums of a lane over a tile. A tile is short, so the type of the arithmetic is exact enough.
template <typename Acc>
struct LaneSums : Statistics<Acc> {
  Acc weighted;   // the sum of values times their weights
  int last_kept;  // position in the segment, or -1
};

// The sums of a segment or a sequence. It has no initialisers, because it lies in shared memory.
struct Sums : Statistics<double> {
  double weighted;
  int64_t last_kept;  // index among all tokens, or -1
};

template <typename Acc>
__device__ __forceinline__ LaneSums<Acc> empty_lane() {
  return {empty_statistics<Acc>(), Acc(0), -1};
}

__device__ __forceinline__ Sums empty_sums() { return {empty_statistics<double>(), 0, -1}; }

__device__ __forceinline__ int64_t greater(int64_t a, int64_t b) { return b > a ? b : a; }

template <Depth depth>
__device__ __forceinline__ void add(Sums& sum, const Sums& part) {
  combine<depth>(sum, part);
  if constexpr (depth == Depth::kLimited) sum.weighted += part.weighted;
  sum.last_kept = greater(sum.last_kept, part.last_kept);
}

// Shared memory for the sums of lanes. A warp that shares its segment stores sums over a tile. A
// warp that reads a segment alone stores sums over the segment.
template <Depth depth, typename Acc>
struct LaneMemory {
  static constexpr int kRows =
      depth == Depth::kAlways ? number_of_statistics<Depth::kAlways> : kStatistics;
  template <typename T>
  struct Lanes {
    T at[kRows][kWarp];
    T weighted[depth == Depth::kLimited ? kWarp : 1];
    int last_kept[kWarp];
  };
  union {
    Lanes<double> segments[kWarps];
    Lanes<Acc> tiles[kWarps / kLeastSharing][kTilesPerSegment];
  };
};

// A lane's sums over a segment. Tiles are added in their order, so no result depends on whether one
// warp or several read them.
template <Depth depth, typename Acc>
class SegmentSums {
 public:
  __device__ __forceinline__ SegmentSums(LaneMemory<depth, Acc>& memory, int warps, int group)
      : memory(memory), warps(warps), group(group) {
    if (warps == 1) put(memory.segments[group], empty_sums(), 0.0, -1);
  }

  __device__ __forceinline__ void add(int tile, const LaneSums<Acc>& sums) {
    if (warps > 1) {
      put(memory.tiles[group][tile], sums, sums.weighted, sums.last_kept);
    } else {
      auto& lanes = memory.segments[group];
      for_each_statistic<depth>([&](auto row) {
        using Row = decltype(row);
        double& total = lanes.at[index_of<Row>][lane()];
        total = Row::template combine<double>(total, sums.at[index_of<Row>]);
      });
      if constexpr (depth == Depth::kLimited) lanes.weighted[lane()] += sums.weighted;
      if (sums.last_kept >= 0) lanes.last_kept[lane()] = sums.last_kept;
    }
  }

  // The sums over the segment's `tiles` tiles, in every lane of a warp.
  __device__ __forceinline__ Sums finish(int tiles, bool with_last_kept, int64_t first_token) {
    Sums totals = empty_sums();
    int last_kept = -1;
    if (warps > 1) {
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) take(memory.tiles[group][tile], totals, last_kept);
    } else {
      take(memory.segments[group], totals, last_kept);
    }
    for_each_statistic<depth>([&](auto row) {
      constexpr int i = index_of<decltype(row)>;
      totals.at[i] = combine_lanes<decltype(row)>(totals.at[i]);
    });
    if constexpr (depth == Depth::kLimited) totals.weighted = add_lanes(totals.weighted);
    if (depth != Depth::kAlways && with_last_kept) {
      totals.last_kept =
          combine_lanes<math::Maximum>(last_kept < 0 ? int64_t{-1} : first_token + last_kept);
    }
    return totals;
  }

 private:
  LaneMemory<depth, Acc>& memory;
  int warps;  // warps that share the segment
  int group;  // number of the segment in the block

  __device__ static __forceinline__ int lane() { return threadIdx.x % kWarp; }

  template <typename Row>
  __device__ static __forceinline__ void add(Row, Sums& totals, double part) {
    double& total = totals.at[index_of<Row>];
    total = Row::template combine<double>(total, part);
  }

  template <typename Lanes, typename T>
  __device__ static __forceinline__ void put(Lanes& lanes, const Statistics<T>& sums, T weighted,
                                             int last_kept) {
    for_each_statistic<depth>([&](auto row) {
      constexpr int i = index_of<decltype(row)>;
      lanes.at[i][lane()] = sums.at[i];
    });
    if constexpr (depth == Depth::kLimited) lanes.weighted[lane()] = weighted;
    if (depth != Depth::kAlways) lanes.last_kept[lane()] = last_kept;
  }

  template <typename Lanes>
  __device__ static __forceinline__ void take(const Lanes& lanes, Sums& totals, int& last_kept) {
    for_each_statistic<depth>(
        [&](auto row) { add(row, totals, lanes.at[index_of<decltype(row)>][lane()]); });
    if constexpr (depth == Depth::kLimited) totals.weighted += lanes.weighted[lane()];
    if (depth != Depth::kAlways && lanes.last_kept[lane()] > last_kept) {
      last_kept = lanes.last_kept[lane()];
    }
  }
};

// The sums of segments in memory. A block writes them, and the last block reads them. They are the
// statistics, kWeighted for calls of any kind, and kLastKept if it is wanted.
struct Partials {
  double* data;  // [rows, slots]
  int64_t slots;

  static constexpr int kWeighted = kStatistics;
  static constexpr int kLastKept = kWeighted + 1;
  static constexpr int rows(bool has_all) {
    return has_all ? kLastKept + 1 : number_of_statistics<Depth::kAlways>;
  }

  __device__ __forceinline__ void put(int row, int64_t slot, double value) const {
    data[row * slots + slot] = value;
  }
  __device__ __forceinline__ double get(int row, int64_t slot) const {
    return __ldcg(data + row * slots + slot);  // not from the first-level cache, which may be stale
  }
};

template <Depth depth>
__device__ __forceinline__ void put(const Partials& partials, int64_t slot, const Sums& sums,
                                    bool with_last_kept) {
  for_each_statistic<depth>([&](auto row) {
    constexpr int i = index_of<decltype(row)>;
    partials.put(i, slot, sums.at[i]);
  });
  if constexpr (depth == Depth::kLimited) partials.put(Partials::kWeighted, slot, sums.weighted);
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
  if constexpr (depth == Depth::kLimited) sums.weighted = partials.get(Partials::kWeighted, slot);
  if (with_last_kept) {
    sums.last_kept = math::bit_cast<int64_t>(partials.get(Partials::kLastKept, slot));
  }
  return sums;
}

}  // namespace klfast::cuda
