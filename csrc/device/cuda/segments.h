// Segments and tiles. A sequence is cut into segments, and a segment into tiles. One warp reads a
// segment, or several warps read its tiles in turns. Token positions alone decide the cuts and the
// order of sums.

#pragma once

#include <algorithm>

#include "device/cuda/device.h"
#include "tensors/view.h"

namespace klfast::cuda {

inline constexpr int64_t kTileTokens = 1024;
inline constexpr int kTilesPerSegment = 8;
inline constexpr int64_t kSegmentTokens = kTileTokens * kTilesPerSegment;
inline constexpr int kLog2SegmentTokens = 13;
static_assert(kSegmentTokens == 1 << kLog2SegmentTokens);

// The tokens of a tile of plain calls (penalty/cuda_plain.h). Their segments are tiles, or whole
// sequences.
inline constexpr int kLog2PlainTile = 12;
inline constexpr int kPlainTile = 1 << kLog2PlainTile;
inline constexpr int kLog2Whole = 62;

// A slot is the place of one segment in the grid. In a padded batch every row has the same number
// of slots. In a packed batch the host does not know the lengths. There, sequence s starts at slot
// floor(cu_seqlens[s] / segment()) + s. This gives every segment a slot, and some slots are unused.
// Pseudo-sequence S is the buffer's tail after the last sequence. Its outputs are zeroed.
struct Grid {
  int64_t slots;
  int64_t slots_per_row;  // 0 if rows have different numbers
  int log2_segment;
  int log2_warps;  // 1, 2, 4 or 8 warps share a segment, without effect on results
  unsigned blocks;

  KLFAST_HOST_DEVICE int64_t segment() const { return int64_t{1} << log2_segment; }

  void set_blocks() {
    const int64_t per_block = kWarps >> log2_warps;
    blocks = static_cast<unsigned>(std::max<int64_t>(1, (slots + per_block - 1) / per_block));
  }
};

inline constexpr int kLeastSharing = 4;  // warps, if more than one share a segment

// The logarithm of the number of warps that share a segment. It is 0 if the segments suffice for
// the whole device, because a warp pays for each segment and not for each tile.
inline int log2_warps_of(int64_t segments, int64_t typical_length, int processors) {
  constexpr int kWarpsPerProcessor = 32;
  const int64_t tiles = (typical_length + kTileTokens - 1) / kTileTokens;
  if (tiles <= 1 || segments >= int64_t{kWarpsPerProcessor} * processors) return 0;
  return tiles <= kLeastSharing ? 2 : 3;
}

// The length of the longest sequence, as far as the host knows, and of a typical one.
inline int64_t longest_of(const Batch& batch) {
  return batch.packed() ? batch.tokens : batch.width;
}
inline int64_t typical_length_of(const Batch& batch) {
  return batch.packed() ? batch.tokens / std::max<int64_t>(1, batch.sequences) : batch.width;
}

// A grid of segments of this size, without its warps and blocks.
inline Grid grid_of_segments(const Batch& batch, int log2_segment) {
  Grid grid;
  grid.log2_segment = log2_segment;
  const bool is_whole = log2_segment == kLog2Whole;
  const int64_t of_width = batch.width == 0 ? 1 : ((batch.width - 1) >> log2_segment) + 1;
  grid.slots_per_row = is_whole ? 1 : batch.packed() ? 0 : of_width;
  grid.slots = batch.packed() ? (batch.tokens >> log2_segment) + batch.sequences + 1
                              : batch.sequences * of_width;
  return grid;
}

inline Grid grid_of(const Batch& batch, int processors) {
  Grid grid = grid_of_segments(batch, kLog2SegmentTokens);
  const int64_t segments =
      batch.packed() ? std::max(batch.sequences, batch.tokens / kSegmentTokens) : grid.slots;
  grid.log2_warps = log2_warps_of(segments, typical_length_of(batch), processors);
  grid.set_blocks();
  return grid;
}

// The grid of a plain call. `tokens` is the number that a warp takes at a time. A block that reads
// a whole sequence needs no other block to finish it. Only a few long sequences are cut into tiles,
// because the device would wait for memory.
inline Grid plain_grid_of(const Batch& batch, int tokens, int processors) {
  constexpr int64_t kMostWhole = int64_t{1} << 30;  // positions in a segment are ints
  const int64_t longest = longest_of(batch), typical = typical_length_of(batch);
  const bool are_many = 2 * batch.sequences >= 3 * static_cast<int64_t>(processors);
  const bool is_whole = longest <= kPlainTile || (are_many && longest <= kMostWhole);
  Grid grid = grid_of_segments(batch, is_whole ? kLog2Whole : kLog2PlainTile);
  if (batch.packed()) {  // with other numbers of warps, blocks could not wait for each other's
    grid.log2_warps = typical <= 4 * tokens && is_whole ? 0 : 3;
  } else {
    grid.log2_warps = 0;
    while (grid.log2_warps < 3 && typical > static_cast<int64_t>(tokens) << grid.log2_warps) {
      ++grid.log2_warps;
    }
  }
  grid.set_blocks();
  return grid;
}

// The place of a sequence among all tokens. Values of cu_seqlens are clamped to the buffer, because
// they are not checked.
struct Sequence {
  int64_t start;
  int64_t length;
};

__device__ __forceinline__ int64_t clamp_index(int64_t index, int64_t lowest, int64_t highest) {
  return index < lowest ? lowest : (index > highest ? highest : index);
}

__device__ __forceinline__ int64_t start_of(const Batch& batch, int64_t sequence) {
  return clamp_index(batch.start(sequence), 0, batch.tokens);
}

__device__ __forceinline__ Sequence sequence_at(const Batch& batch, int64_t sequence) {
  const int64_t start = start_of(batch, sequence);
  if (!batch.packed()) return {start, batch.width};
  return {start, clamp_index(start_of(batch, sequence + 1), start, batch.tokens) - start};
}

// The first slot of a sequence that starts at this token of a packed batch.
__device__ __forceinline__ int64_t first_slot_at(const Grid& grid, int64_t sequence,
                                                 int64_t start) {
  return clamp_index((start >> grid.log2_segment) + sequence, 0, grid.slots);
}

__device__ __forceinline__ int64_t first_slot(const Batch& batch, const Grid& grid,
                                              int64_t sequence) {
  if (!batch.packed()) return sequence * grid.slots_per_row;
  return first_slot_at(grid, sequence, start_of(batch, sequence));
}

// The row of a slot of a padded batch. A division of 32 bits is short. The rows of 2^32 slots, with
// several in a row, would have 2^43 tokens.
__device__ __forceinline__ int64_t row_of_slot(const Grid& grid, int64_t slot) {
  return static_cast<uint32_t>(slot) / static_cast<uint32_t>(grid.slots_per_row);
}

// Finds the sequence of a slot. The whole warp searches: every lane probes one sequence. The last
// sequence that starts at or before the slot narrows the search 32-fold.
__device__ __forceinline__ int64_t sequence_of_slot(const Batch& batch, const Grid& grid,
                                                    int64_t slot) {
  if (grid.slots_per_row == 1) return slot;
  if (!batch.packed()) return row_of_slot(grid, slot);
  const int lane = threadIdx.x % kWarp;
  int64_t low = 0;
  int64_t high = batch.sequences + 1;
  while (high - low > 1) {
    const int64_t step = (high - low + kWarp - 1) / kWarp;
    const int64_t probe = low + lane * step;
    const bool reaches = probe < high && first_slot(batch, grid, probe) <= slot;
    const unsigned votes = __ballot_sync(0xffffffffu, reaches);
    const int last = votes == 0 ? 0 : kWarp - 1 - __clz(votes);
    low += last * step;
    high = low + step < high ? low + step : high;
  }
  return low;
}

// The segment of a slot. Its size is 0 if the slot is unused.
struct Segment {
  int64_t slot;
  int64_t sequence;
  int64_t start;     // of the sequence among all tokens
  int64_t length;    // of the sequence
  int64_t position;  // of the segment in the sequence
  int64_t size;
  bool exists;  // also for an empty sequence, whose first segment has size 0
};

__device__ __forceinline__ Segment segment_of_slot(const Batch& batch, const Grid& grid,
                                                   int64_t slot) {
  if (slot >= grid.slots) return {slot, 0, 0, 0, 0, 0, false};
  const int64_t s = sequence_of_slot(batch, grid, slot);
  const bool follows = s == batch.sequences;
  const int64_t end = start_of(batch, s);
  const Sequence sequence = follows ? Sequence{end, batch.tokens - end} : sequence_at(batch, s);
  const int64_t position = (slot - first_slot(batch, grid, s)) << grid.log2_segment;
  const bool has_tokens = position >= 0 && position < sequence.length;
  if (!has_tokens)
    return {slot, s, sequence.start, sequence.length, 0, 0, position == 0 && !follows};
  const int64_t rest = sequence.length - position;
  return {slot,           s,
          sequence.start, sequence.length,
          position,       rest < grid.segment() ? rest : grid.segment(),
          !follows};
}

__device__ __forceinline__ int64_t segments_of(const Grid& grid, int64_t length) {
  return length <= grid.segment() ? 1 : ((length - 1) >> grid.log2_segment) + 1;
}

// The slots of a sequence, or none beyond the last sequence. It is called, so its code is there
// once.
struct Slots {
  int64_t first;
  int64_t count;
};

__device__ __noinline__ inline Slots slots_of(const Batch& batch, const Grid& grid,
                                              int64_t sequence) {
  if (sequence >= batch.sequences) return {0, 0};
  if (!batch.packed()) return {sequence * grid.slots_per_row, segments_of(grid, batch.width)};
  const Sequence found = sequence_at(batch, sequence);
  return {first_slot_at(grid, sequence, found.start), segments_of(grid, found.length)};
}

}  // namespace klfast::cuda
