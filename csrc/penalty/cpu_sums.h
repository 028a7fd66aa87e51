// The sums of a tile and of a segment, by lane. Included by kernels that are compiled once per
// instruction set: everything here is inlined into them.

#pragma once

#include <algorithm>

#include "device/cpu/lanes.h"
#include "formulas/statistics.h"

namespace klfast::cpu {
namespace {

// [statistics, lanes]: LaneSums<Acc> of a tile, LaneSums<double> of a segment.
template <typename T>
struct LaneSums {
  T at[kStatistics][kLanes];
};

template <typename T>
void clear(LaneSums<T>& sums) {
  const Statistics<T> empty = empty_statistics<T>();
  for (int i = 0; i < kStatistics; ++i) std::fill_n(sums.at[i], kLanes, empty.at[i]);
}

template <Depth depth, math::Range range, typename Acc>
KLFAST_HOST_DEVICE void add_token(LaneSums<Acc>& sums, int64_t lane,
                                  const Observation<range, Acc>& token) {
  klfast::add_token<depth>(token,
                           [&](int i) KLFAST_INLINE_LAMBDA -> Acc& { return sums.at[i][lane]; });
}

// Adds a tile's sums to those of its segment, and empties them.
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

}  // namespace
}  // namespace klfast::cpu
