// Sums of a lane, a warp and a segment, and the order in which they are added: the same whether one
// warp has read a segment or several in turns.

#pragma once

#include "device/cuda/lanes.h"
#include "rollout/cuda_task.h"

namespace klfast::rollout::cuda {

// Whether a statistic's far tokens have a sum of their own: two need none, and save registers.
template <typename Row>
struct HasFarSum {
  static constexpr bool value =
      !std::is_same_v<Row, statistics::logprobs> && !std::is_same_v<Row, statistics::k2>;
};

// The sums of a lane, weighted by the mask. Of near tokens weights are e^x, and masks 1; e^x - 1 is
// the sum of x and k3.
enum LaneRow {
  kNearStatistics,  // of statistics::OfNear, in its order
  kNearLength = kNearStatistics + statistics::OfNear::kSize,
  kNearGrowthSquares,  // (e^x - 1)^2
  kNearRows,
  // Of far tokens.
  kFarLength = kNearRows,
  kFarNumbers,  // of tokens, and of those that are not finite
  kFarCounted,
  kFarExcluded,
  kFarBelowAbove,  // numbers of tokens
  kFarStatistics,  // those of statistics::Sums that are not added to the sum of near tokens
  kLaneRows = kFarStatistics + Where<HasFarSum, statistics::Sums>::kSize
};

// Where near and far tokens of a statistic are added.
template <typename Row>
inline constexpr int near_lane_of = kNearStatistics + near_sum_of<Row>;
template <typename Row>
KLFAST_HOST_DEVICE constexpr int far_lane_of() {
  if constexpr (HasFarSum<Row>::value) {
    return kFarStatistics + IndexIn<Row, Where<HasFarSum, statistics::Sums>>::value;
  } else {
    return near_lane_of<Row>;
  }
}

// Two numbers of tokens as a term of one sum, which is exact: of a segment's at most, and in the
// arithmetic's type of a tile's of a lane.
inline constexpr double kSecondNumber = 2 * kSegmentTokens;
static_assert(kTileTokens / kWarp * kSecondNumber < (1 << 24));

template <typename Acc>
__device__ __forceinline__ Acc numbers(bool first, bool second) {
  return (first ? Acc(1) : Acc(0)) + (second ? Acc(kSecondNumber) : Acc(0));
}

struct Numbers {
  double first, second;

  __device__ __forceinline__ static Numbers of(double sum) {
    const double second = static_cast<double>(static_cast<int>(sum / kSecondNumber));
    return {sum - second * kSecondNumber, second};
  }
};

// The extremes of x over counted tokens: of those inside of the bounds on a weight, and of others.
enum Extreme { kLeastInside, kGreatestInside, kLeastOutside, kGreatestOutside, kExtremes };

static_assert(int{kLaneRows} <= int{kTotals});

// The sums of a lane over a tile, in the arithmetic's type, and its extremes over the segment.
template <typename Acc>
struct LaneSums {
  Acc at[kLaneRows] = {};
  Acc extremes[kExtremes] = {Acc(INFINITY), Acc(-INFINITY), Acc(INFINITY), Acc(-INFINITY)};
  unsigned far = 0;  // the tile's far tokens: a bit each

  __device__ __forceinline__ void empty_tile() {
#pragma unroll
    for (int row = 0; row < kLaneRows; ++row) at[row] = 0;
    far = 0;
  }
};

// Rows that a warp adds as one: of rejected tokens, and of rules.
enum WarpRow { kWarpRejected, kWarpRejectedTokens, kWarpRules };

__device__ __forceinline__ How how_of_warp_row(int row) {
  return row < kWarpRules ? How::kSum : how_of(row - kWarpRules + kTotals);
}

KLFAST_HOST_DEVICE int warp_rows(int rules) { return kWarpRules + rules * kRuleTotals; }

// The shared memory of a block: sums of lanes over a segment, for a warp that reads it alone, or
// over tiles, for the warps that share one; rows of warps; the totals of segments.
template <typename Acc>
struct BlockMemory {
  static constexpr bool kShares = sizeof(Acc) == 4;  // fp64 is for checking, not for speed
  static constexpr int kTiles = kWarps / kLeastSharing * kTilesPerSegment;
  template <typename T>
  struct Lanes {
    T at[kLaneRows][kWarp];
  };
  struct Fixed {
    union {
      Lanes<double> segments[kWarps];
      Lanes<Acc> tiles[kShares ? kTiles : 1];
    };
    Acc extremes[kWarps][kExtremes];
  };
  static_assert(kTiles == 2 * kWarps);

  Fixed& fixed;
  double* totals;     // [kWarps, rows_of_totals]
  double* warp_rows;  // [2 * kWarps, warp_rows], with rules alone

  static size_t bytes(int rules) {
    const int rows =
        kWarps * rows_of_totals(rules) + (rules > 0 ? 2 * kWarps * cuda::warp_rows(rules) : 0);
    return sizeof(Fixed) + rows * sizeof(double);
  }

  __device__ __forceinline__ static BlockMemory of_block(int rules) {
    char* const first = dynamic_shared();
    double* const totals = reinterpret_cast<double*>(first + sizeof(Fixed));
    return {*reinterpret_cast<Fixed*>(first), totals, totals + kWarps * rows_of_totals(rules)};
  }
};

// The sums of a segment, as its warps add tiles.
template <typename Acc, bool kRules>
class SegmentSums {
 public:
  __device__ __forceinline__ SegmentSums(int rules, int warps, int group, int warp)
      : memory_(BlockMemory<Acc>::of_block(rules)),
        rules_(rules),
        warps_(warps),
        group_(group),
        own_(group * warps + warp) {
    if (warps == 1) {
#pragma unroll
      for (int row = 0; row < kLaneRows; ++row) memory_.fixed.segments[group].at[row][lane()] = 0;
      if (kRules) empty(warp_rows_of(group));
      __syncwarp();
    }
  }

  // The rows of rules to which a tile is added.
  __device__ __forceinline__ double* begin_rules(int tile) const {
    if (warps_ == 1) return warp_rows_of(group_);
    empty(tile_rows(tile));
    __syncwarp();
    return tile_rows(tile);
  }

  __device__ __forceinline__ void end_tile(int tile, const LaneSums<Acc>& sums) const {
    if (warps_ > 1) {
#pragma unroll
      for (int row = 0; row < kLaneRows; ++row) tile_of(tile).at[row][lane()] = sums.at[row];
    } else {
      add<0, kNearRows>(sums);
      if (sums.far != 0) add<kNearRows, kLaneRows>(sums);
    }
  }

  // Before the segment's first warp finishes.
  __device__ __forceinline__ void end(const LaneSums<Acc>& sums) const {
#pragma unroll
    for (int row = 0; row < kExtremes; row += 2) {
      const Acc least = combine_lanes<Minimum>(sums.extremes[row]);
      const Acc greatest = combine_lanes<Maximum>(sums.extremes[row + 1]);
      if (lane() == 0) {
        memory_.fixed.extremes[own_][row] = least;
        memory_.fixed.extremes[own_][row + 1] = greatest;
      }
    }
    if (warps_ > 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }

  // The raw sums of the segment of `tiles` tiles, in the first rows of the totals, and totals of
  // rules. Run by one warp.
  __device__ __forceinline__ double* finish(int tiles) const {
    double* const totals = memory_.totals + group_ * rows_of_totals(rules_);
    const bool any_far = __any_sync(0xffffffffu, lane_sum(kFarNumbers, tiles) != 0);
#pragma unroll 1
    for (int row = 0; row < kLaneRows; ++row) {
      const bool is_empty = row >= kNearRows && !any_far;
      const double total = is_empty ? 0.0 : add_lanes(lane_sum(row, tiles));
      if (lane() == 0) totals[row] = total;
    }
    if (kRules) {
      if (warps_ > 1) {
#pragma unroll 1
        for (int tile = 1; tile < tiles; ++tile) {
          combine_rows(tile_rows(0), tile_rows(tile));
          __syncwarp();
        }
      }
      if (tiles == 0 && warps_ > 1) empty(of_segment());
      __syncwarp();
#pragma unroll 1
      for (int row = lane(); row < rules_ * kRuleTotals; row += kWarp) {
        totals[kTotals + row] = of_segment()[kWarpRules + row];
      }
    }
    __syncwarp();
    return totals;
  }

  // After finish(): the sums of tokens that rules reject.
  __device__ __forceinline__ double rejected(WarpRow row) const {
    return kRules ? of_segment()[row] : 0.0;
  }

  // An extreme over the segment's warps.
  template <typename Combination>
  __device__ __forceinline__ double extreme(Extreme which) const {
    double value = Combination::kEmpty;
#pragma unroll 1
    for (int warp = 0; warp < warps_; ++warp) {
      const double own = memory_.fixed.extremes[group_ * warps_ + warp][which];
      value = Combination::combine(value, own);
    }
    return value;
  }

 private:
  BlockMemory<Acc> memory_;
  int rules_;
  int warps_;  // that share the segment
  int group_;  // the segment's among those of the block
  int own_;    // the warp's

  __device__ static __forceinline__ int lane() { return threadIdx.x % kWarp; }

  __device__ __forceinline__ double* tile_rows(int tile) const {
    return warp_rows_of(group_ * kTilesPerSegment + tile);
  }
  __device__ __forceinline__ double* warp_rows_of(int i) const {
    return memory_.warp_rows + i * warp_rows(rules_);
  }
  __device__ __forceinline__ double* of_segment() const {
    return warps_ == 1 ? warp_rows_of(group_) : tile_rows(0);
  }
  __device__ __forceinline__ auto& tile_of(int tile) const {
    return memory_.fixed.tiles[BlockMemory<Acc>::kShares ? group_ * kTilesPerSegment + tile : 0];
  }

  __device__ __forceinline__ void empty(double* rows) const {
#pragma unroll 1
    for (int row = lane(); row < warp_rows(rules_); row += kWarp) {
      rows[row] = empty_of(how_of_warp_row(row));
    }
  }
  __device__ __forceinline__ void combine_rows(double* rows, const double* more) const {
#pragma unroll 1
    for (int row = lane(); row < warp_rows(rules_); row += kWarp) {
      rows[row] = combine(how_of_warp_row(row), rows[row], more[row]);
    }
  }

  template <int first, int last>
  __device__ __forceinline__ void add(const LaneSums<Acc>& sums) const {
    auto& segment = memory_.fixed.segments[group_];
#pragma unroll
    for (int row = first; row < last; ++row) segment.at[row][lane()] += sums.at[row];
  }

  // A lane's sum over the segment.
  __device__ __forceinline__ double lane_sum(int row, int tiles) const {
    if (warps_ == 1) return memory_.fixed.segments[group_].at[row][lane()];
    double sum = 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) sum += tile_of(tile).at[row][lane()];
    return sum;
  }
};

// Makes totals of the raw sums in their first rows, those of weights for weights per token.
template <typename Acc, bool kRules>
__device__ __forceinline__ void write_totals(const TokenBounds<Acc>& bounds,
                                             const SegmentSums<Acc, kRules>& sums, double* totals) {
  double raw[kLaneRows];
#pragma unroll
  for (int row = 0; row < kLaneRows; ++row) raw[row] = totals[row];
  const double length = raw[kNearLength];
  const NearSums near = {length,
                         raw[near_lane_of<statistics::k1>] + raw[near_lane_of<statistics::k3>],
                         raw[kNearGrowthSquares]};
  const Numbers numbers = Numbers::of(raw[kFarNumbers]);
  const Numbers below_above = Numbers::of(raw[kFarBelowAbove]);
  const double least_inside = sums.template extreme<Minimum>(kLeastInside);
  const double least_outside = sums.template extreme<Minimum>(kLeastOutside);
  const double greatest_inside = sums.template extreme<Maximum>(kGreatestInside);
  const double greatest_outside = sums.template extreme<Maximum>(kGreatestOutside);
  const auto weight_of = [&](double x) {
    const double y = clamp(x, -kExponentLimit, kExponentLimit);
    return clamp(exp<Range::kAnywhere>(y), double(bounds.floor), double(bounds.cap));
  };
  const double least = Minimum::combine(least_inside, least_outside);
  const double greatest = Maximum::combine(greatest_inside, greatest_outside);
  const bool any_inside = least_inside <= greatest_inside;
  const bool drops = bounds.masks && least_outside <= greatest_outside;  // some weights are 0
  totals[kLength] = length + raw[kFarLength];
  totals[kTokens] = length + numbers.first;
  totals[kNonfinite] = numbers.second;
  totals[kCounted] = length + raw[kFarCounted];
  totals[kExcluded] = raw[kFarExcluded];
  totals[kRejected] = sums.rejected(kWarpRejected);
  totals[kRejectedTokens] = sums.rejected(kWarpRejectedTokens);
  for_each_row(statistics::Sums(), [&](auto row) KLFAST_INLINE_LAMBDA {
    using Row = decltype(row);
    const double far = raw[far_lane_of<Row>()];
    double& total = totals[kStatisticsSums + sum_of<Row>];
    if constexpr (!HasFarSum<Row>::value) {
      total = far;
    } else if constexpr (std::is_same_v<Row, statistics::error>) {
      total = far + (raw[near_lane_of<statistics::abs>] + raw[near_lane_of<Row>]);
    } else if constexpr (Row::has_near_sum) {
      total = far + raw[near_lane_of<Row>];
    } else {
      total = far + Row::near(near);
    }
  });
  totals[kBelow] = below_above.first;
  totals[kAbove] = below_above.second;
  // log_least is log_floor where there is one.
  totals[kOutside] =
      below_above.second + (bounds.log_floor > -Acc(INFINITY) ? below_above.first : 0.0);
  totals[kLeast] = least;
  totals[kGreatest] = greatest;
  totals[kLeastWeight] = drops ? 0.0 : weight_of(least);
  totals[kGreatestWeight] =
      drops ? (any_inside ? weight_of(greatest_inside) : 0.0) : weight_of(greatest);
}

}  // namespace klfast::rollout::cuda
