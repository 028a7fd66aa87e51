// The sums of a tile and of a segment, by lane. Kernels that are compiled once per instruction set
// include this file. Everything here is inlined into them.

#pragma once

#include <algorithm>
#include <cstdint>

#include "device/cpu/lanes.h"
#include "device/cpu/segment_tiles.h"
#include "formulas/statistics.h"
#include "penalty/cpu_kernel.h"

namespace klfast::cpu {
namespace {

// Sums of the shape [statistics, lanes]. A tile has LaneSums<Acc>, and a segment LaneSums<double>.
template <typename T>
struct LaneSums {
  T at[kStatistics][kLanes];
};

template <Depth depth, typename T>
KLFAST_HOST_DEVICE void clear(LaneSums<T>& sums) {
  for_each_statistic<depth>([&](auto row) KLFAST_INLINE_LAMBDA {
    using Row = decltype(row);
    std::fill_n(sums.at[index_of<Row>], kLanes, T(Row::kEmpty));
  });
}

template <Depth depth, typename E = void, math::Range range, typename Acc>
KLFAST_HOST_DEVICE void add_token(LaneSums<Acc>& sums, int64_t lane,
                                  const Observation<range, Acc>& token) {
  klfast::add_token<depth, E>(token,
                              [&](int i) KLFAST_INLINE_LAMBDA -> Acc& { return sums.at[i][lane]; });
}

// The sums of a block's lanes, in memory.
template <typename B>
struct SumsInMemory {
  typename B::Element* at;

  KLFAST_HOST_DEVICE operator B() const { return load<B>(at); }
  KLFAST_HOST_DEVICE void operator=(const B& sums) const { store(sums, at); }
};

// Adds a block of tokens to its lanes, which begin at `lane`.
template <Depth depth, typename E, math::Range range, int N>
KLFAST_HOST_DEVICE void add_token(LaneSums<float>& sums, int64_t lane,
                                  const Observation<range, Block<float, N>>& tokens) {
  klfast::add_token<depth, E>(tokens, [&](int i) KLFAST_INLINE_LAMBDA {
    return SumsInMemory<Block<float, N>>{sums.at[i] + lane};
  });
}

// Writes the sums of a tile that add_token() leaves out for E. `kept` has the kept tokens per lane.
template <Depth depth, typename E, typename Acc>
KLFAST_HOST_DEVICE void add_derived(const uint8_t* kept, LaneSums<Acc>& sums) {
  std::copy_n(kept, kLanes, sums.at[kLength]);
  for_each_statistic<depth>([&](auto row) KLFAST_INLINE_LAMBDA {
    using Row = decltype(row);
    if constexpr (std::is_same_v<typename Row::Of, E>) {
      std::copy_n(sums.at[kKl], kLanes, sums.at[index_of<Row>]);
    }
  });
}

// Adds a tile's sums to its segment's sums, and empties the tile's sums.
template <Depth depth, typename Acc>
void flush(LaneSums<Acc>& tile, LaneSums<double>& segment) {
  for_each_statistic<depth>([&](auto row) KLFAST_INLINE_LAMBDA {
    using Row = decltype(row);
    flush<Row>(tile.at[index_of<Row>], segment.at[index_of<Row>]);
  });
}

template <Depth depth>
void add_up(LaneSums<double>& segment, Statistics<double>& sums) {
  for_each_statistic<depth>([&](auto row) KLFAST_INLINE_LAMBDA {
    using Row = decltype(row);
    sums.at[index_of<Row>] = combine_lanes<Row>(segment.at[index_of<Row>]);
  });
}

// clear() and add_up() for a segment and the statistics that a task wants.
inline void clear(const SegmentTask& task, LaneSums<double>& segment) {
  task.want_statistics ? clear<Depth::kLimited>(segment) : clear<Depth::kAlways>(segment);
}

inline void add_up(const SegmentTask& task, LaneSums<double>& segment, Partial& partial) {
  task.want_statistics ? add_up<Depth::kLimited>(segment, partial)
                       : add_up<Depth::kAlways>(segment, partial);
}

}  // namespace
}  // namespace klfast::cpu
