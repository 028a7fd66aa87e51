// The division of rows of logits among blocks. The order of a row's sums depends on the vocabulary,
// the dtypes and the chip alone, never on the number of rows or of the blocks that share a row.

#pragma once

#include <algorithm>

#include "device/cuda/launch.h"
#include "logits/call.h"

namespace klfast::cuda {

inline constexpr int kRowThreads = 256;     // of a block; rows read by tiles take fewer if short
inline constexpr int kMostBlocksOfRow = 8;  // of a cluster, on any chip that has them

// A range of a row's words.
struct Part {
  int begin;
  int size;
};

__device__ __forceinline__ Part part_at(int64_t words, int part, int index) {
  const int begin = index * part;
  return {begin, max(0, min(part, static_cast<int>(words) - begin))};
}

// The plan of a kernel that sums: a row is cut into parts, each summed by a block of a cluster, or
// all by one block.
struct RowPlan {
  int blocks;  // of a row: one, or one per part; a power of 2
  int parts;
  int threads;
  int part;                // words; a multiple of a chunk's, or of a tile's
  bool is_staged = false;  // in shared memory, from the first read on
  int64_t shared = 0;      // bytes
  int64_t first_row = 0;   // of the launch

  __device__ __forceinline__ int64_t row_of_block() const {
    return first_row + (blockIdx.x >> (31 - __clz(static_cast<unsigned>(blocks))));
  }
  __device__ __forceinline__ int rank_of_block() const {
    return static_cast<int>(blockIdx.x & static_cast<unsigned>(blocks - 1));
  }
};

// The plan of a kernel that treats each word alone: blocks do not depend on each other.
struct PiecePlan {
  int blocks;  // of a row
  int threads;
  int piece;  // words
  int64_t first_row = 0;

  __device__ __forceinline__ int64_t row_of_block() const {
    return first_row + blockIdx.x / static_cast<unsigned>(blocks);
  }
  __device__ __forceinline__ Part part_of_block(int64_t words) const {
    return part_at(words, piece, static_cast<int>(blockIdx.x % static_cast<unsigned>(blocks)));
  }
};

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// The words of a part: a multiple of 128 bytes, so that parts start at cache lines if their row
// does.
inline int part_of(int64_t words, int blocks, int chunk) {
  return static_cast<int>(round_up((words + blocks - 1) / blocks, 8 * chunk));
}

// A plan that reads a row from memory in every pass. A block needs `state` bytes of shared memory;
// fits(plan) tells whether its clusters can be launched.
template <typename Fits>
RowPlan plan_read(int64_t words, int chunk, int64_t state, const Chip& chip, const Fits& fits) {
  constexpr int64_t kMostWords = 1 << 16;  // of a block, if the row can have more blocks
  const auto cut = [&](int blocks) -> RowPlan {
    return {blocks, blocks, kRowThreads, part_of(words, blocks, chunk), false, state};
  };
  int blocks = 1;
  while (chip.has_clusters && blocks < kMostBlocksOfRow && words > blocks * kMostWords) blocks *= 2;
  const RowPlan plan = cut(blocks);
  return fits(plan) ? plan : cut(1);
}

// A plan that stages a row in shared memory and reads it once; a word takes `bytes` for all models.
// A row gets as few blocks as leave room for two rows on a processor, so that one is read while
// another is summed or written, or else as many as it needs. A row too large for that is not
// staged: is_staged is all that its plan tells.
template <typename Fits>
RowPlan plan_staged(int64_t words, int chunk, int64_t bytes, int64_t state, const Chip& chip,
                    const Fits& fits) {
  constexpr int64_t kReserved = 1024;  // of a block, by CUDA
  for (int blocks = 1; chip.has_clusters && blocks <= kMostBlocksOfRow; blocks *= 2) {
    const int part = part_of(words, blocks, chunk);
    const int64_t shared = state + bytes * round_up(std::min<int64_t>(part, words), kWarp * chunk);
    const int64_t most = blocks == kMostBlocksOfRow ? chip.shared_of_block
                                                    : chip.shared_of_processor / 2 - kReserved;
    if (shared > std::min(most, chip.shared_of_block)) continue;
    const RowPlan plan = {blocks, blocks, kRowThreads, part, true, shared};
    if (fits(plan)) return plan;
  }
  return {};
}

// The plan of a kernel that sums the same parts without staging them, to the same bits.
inline RowPlan unstaged(RowPlan plan, int64_t state) {
  plan.is_staged = false;
  plan.shared = state;
  return plan;
}

// Whether rows are too few to fill the chip, of whose processors each has `together` blocks at a
// time.
inline bool are_few(int64_t rows, int together, const Chip& chip) {
  return rows < static_cast<int64_t>(chip.processors) * together;
}

// The plan for so many rows: only few are split, and the same parts are summed to the same bits.
inline RowPlan for_rows(RowPlan plan, int64_t rows, int together, const Chip& chip) {
  if (!are_few(rows, together, chip)) plan.blocks = 1;
  return plan;
}

// A plan that reads a row by tiles, in the same parts whether one block sums them or a cluster
// does. Only rows too few to fill the chip are split. A processor has `together` such blocks at a
// time.
template <typename Fits>
RowPlan plan_tiles(int64_t words, int64_t rows, int chunk, int tile, int together, int64_t state,
                   const Chip& chip, const Fits& fits) {
  constexpr int kLeastTiles = 16;  // of most parts: two a warp
  const int64_t tiles = (words + tile - 1) / tile;
  int parts = 1;
  while (parts < kMostBlocksOfRow && tiles > parts * kLeastTiles) parts *= 2;
  const auto part = static_cast<int>((tiles + parts - 1) / parts * tile);
  const int64_t chunks = (words + chunk - 1) / chunk;
  const auto threads = static_cast<int>(std::min<int64_t>(kRowThreads, round_up(chunks, kWarp)));
  RowPlan plan = {parts, parts, threads, part, false, state};
  if (!are_few(rows, together, chip) || !chip.has_clusters || !fits(plan)) plan.blocks = 1;
  return plan;
}

// Pieces of nearly one size, whose constants are computed once each: whole rows where these are
// many. `multiple`: of its words.
inline PiecePlan plan_pieces(int64_t words, int multiple, int64_t rows, const Chip& chip) {
  constexpr int kBlocksOfProcessor = 8;  // blocks of a processor, more than run at once
  const int64_t about =
      are_few(rows, kBlocksOfProcessor, chip) ? 1 << 15 : 1 << 18;  // words of a block
  const int64_t pieces = std::max<int64_t>(1, words / about);
  const auto piece =
      static_cast<int>(std::min(words, round_up((words + pieces - 1) / pieces, multiple)));
  return {static_cast<int>((words + piece - 1) / piece), kRowThreads, piece};
}

// Whether the clusters of a plan can be launched, to be asked of a plan.
template <typename Task>
auto launchable(void (*kernel)(Task)) {
  return [kernel](const RowPlan& plan) {
    const Blocks blocks = {static_cast<unsigned>(plan.blocks), plan.threads, plan.blocks,
                           static_cast<size_t>(plan.shared)};
    return plan.blocks == 1 || can_cluster(address_of_kernel(kernel), blocks);
  };
}

// Batches become one where the rows of all models lie evenly, as those of one batch do.
template <typename... Models>
void join_batches(LogitsShape& shape, const Models&... models) {
  const auto is_even = [&](const Logits& logits) {
    return logits.outer_stride == shape.inner * logits.inner_stride;
  };
  if ((is_even(models) && ...)) shape = {1, shape.rows(), shape.words};
}

// Launches a kernel over all rows, in as few grids as can hold them.
template <typename Task>
void launch_rows(void (*kernel)(Task), int64_t rows, int of_cluster, int64_t shared, Task task,
                 void* stream) {
  const int64_t most = std::max<int64_t>(1, (int64_t{1} << 30) / task.plan.blocks);
  for (int64_t first = 0; first < rows; first += most) {
    task.plan.first_row = first;
    const auto blocks = static_cast<unsigned>(std::min(most, rows - first) * task.plan.blocks);
    launch(kernel, {blocks, task.plan.threads, of_cluster, static_cast<size_t>(shared)}, stream,
           task);
  }
}

}  // namespace klfast::cuda
