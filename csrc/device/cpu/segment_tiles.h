// The tiles of a segment. Kernels convert, evaluate and add up the tokens of one tile at a time.
// Kernels that are compiled once per instruction set include this file. Everything here is inlined
// into them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "device/cpu/lanes.h"
#include "device/cpu/segment.h"
#include "device/cpu/tiles.h"
#include "tensors/view.h"

namespace klfast::cpu {
namespace {

// The tokens that are added in the arithmetic's type. The sums of tiles are then added in double.
constexpr int64_t kTileTokens = 1024;

// The mask of a tile in which every token is kept.
struct Ones {
  Bool mask[kTileTokens] = {};

  constexpr Ones() {
    for (Bool& kept : mask) kept.byte = 1;
  }
};
constexpr Ones kOnes;

// The position of a tile in the inputs.
struct Tile {
  int64_t row;
  int64_t column;
  int64_t index;  // among all tokens
  int64_t size;
  int64_t padded;  // size rounded up to whole groups
};

// The tile of a segment that begins after the segment's first `done` tokens.
inline Tile tile_of(const Batch& batch, const Segment& segment, int64_t done) {
  const int64_t size = std::min(kTileTokens, segment.length - done);
  const int64_t position = segment.position + done;
  return {batch.row(segment.sequence), batch.column(segment.sequence, position),
          batch.start(segment.sequence) + position, size, (size + kLanes - 1) / kLanes * kLanes};
}

template <typename Acc>
KLFAST_HOST_DEVICE const Acc* load(const View& view, const Tile& tile, Acc* buffer) {
  return load_tile(view, tile.row, tile.column, tile.size, tile.padded, buffer);
}

// The weights of a tile. They are the mask, or ones if there is no mask. Padding has the weight 0.
template <typename Acc>
KLFAST_HOST_DEVICE const Acc* load_weights(const View& mask, const Tile& tile, Acc* buffer) {
  if (mask.data != nullptr) return load(mask, tile, buffer);
  std::fill(buffer, buffer + tile.size, Acc(1));
  std::fill(buffer + tile.size, buffer + tile.padded, Acc(0));
  return buffer;
}

// True if the mask's dtype can hold weights that no mask may have. These are negative, NaN and
// infinite.
inline bool can_be_bad(const View& mask) {
  return mask.data != nullptr && mask.dtype != DType::kBool && mask.dtype != DType::kUInt8;
}

template <typename Acc>
KLFAST_HOST_DEVICE bool any_bad(const Acc* weights, int64_t n) {
  int bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= !(weights[i] >= Acc(0) && weights[i] < Acc(INFINITY));
  return bad != 0;
}

}  // namespace
}  // namespace klfast::cpu
