// The division of rows of logits among blocks. The order of a row's sums depends only on the
// vocabulary size and the dtypes. It never depends on the chip, on the number of rows or on how
// many blocks share a row.

#pragma once

#include <algorithm>

#include "device/cuda/launch.h"
#include "logits/call.h"

namespace klfast::cuda {

inline constexpr int kRowThreads = 256;   // of a block for one model; short rows take fewer
inline constexpr int kMostTileParts = 8;  // of its rows. Any chip with clusters has such ones.
inline constexpr int kPairThreads = 128;  // of a block for two models
inline constexpr int kMostPairParts = 16;
inline constexpr int64_t kMostPartBytes = 40 << 10;  // of two models, except in very long rows

// No GPU has run the ring (cuda_ring.h), so it is off. A build has it with -DKLFAST_RING=1, and
// takes it while the environment has KLFAST_RING=1.
#ifndef KLFAST_RING
#define KLFAST_RING 0
#endif

// A range of words in a row.
struct Part {
  int begin;
  int size;
};

__device__ __forceinline__ Part part_at(int64_t words, int part, int index) {
  const int begin = index * part;
  return {begin, max(0, min(part, static_cast<int>(words) - begin))};
}

// The plan of a kernel that sums. A row is cut into parts. Each block of a cluster sums `share`
// neighbouring parts, or one block sums all parts.
struct RowPlan {
  int blocks;  // per row. A power of 2, like `share`.
  int share;
  int threads;
  int part;               // words, a multiple of a chunk or a tile
  int64_t shared;         // bytes
  int64_t first_row = 0;  // of the launch

  __device__ __forceinline__ int64_t row_of_block() const {
    const unsigned block = in_register(blockIdx.x);  // a row held for its sums takes registers
    return first_row + (block >> (31 - __clz(static_cast<unsigned>(blocks))));
  }
  __device__ __forceinline__ int rank_of_block() const {
    return static_cast<int>(blockIdx.x & static_cast<unsigned>(blocks - 1));
  }
};

// The plan of a kernel that computes each word alone. Blocks do not depend on each other.
struct PiecePlan {
  int blocks;  // per row
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

// The number of words in a part. It is a multiple of 128 bytes, so that parts start at cache lines
// if their row does.
inline int part_of(int64_t words, int blocks, int chunk) {
  return static_cast<int>(round_up((words + blocks - 1) / blocks, 8 * chunk));
}

// True if the rows are too few to fill the chip. Each of its processors has `together` blocks at a
// time.
inline bool are_few(int64_t rows, int together, const Chip& chip) {
  return rows < static_cast<int64_t>(chip.processors) * together;
}

// A plan for rows of two models, whose words take `bytes` together. A processor has `together`
// blocks at a time. fits(plan) is true if the plan's clusters can be launched.
//
// A kernel that writes a gradient reads a part again after the sums of its row, and should find it
// in L2. An H100 or H200 has an L2 of 50 MB. With parts of kMostPartBytes its blocks read at most
// 32 MB at a time. Smaller parts would take longer: the guess, the exchange of a row's sums and its
// logarithms take a block some 7 us, whatever its part. In a simulation of both chips no other plan
// whose parts fit was faster for 4,096 to 160,000 entries in bf16. Three blocks of 256 threads on a
// processor, with parts twice as long, took 1.03 to 1.6 times as long. No GPU has run either.
template <typename Fits>
RowPlan plan_pairs(int64_t words, int64_t rows, int chunk, int64_t bytes, int together,
                   int64_t state, bool writes_gradient, const Chip& chip, const Fits& fits) {
  int parts = 1;
  while (parts < kMostPairParts && words * bytes > parts * kMostPartBytes) parts *= 2;
  RowPlan plan = {parts, 1, kPairThreads, part_of(words, parts, chunk), state};
  if (!writes_gradient && !are_few(rows, together, chip)) plan.blocks = 1;
  while (plan.blocks > 1 && !(chip.has_clusters && fits(plan))) plan.blocks /= 2;
  plan.share = parts / plan.blocks;
  return plan;
}

// A plan that reads a row by tiles. The parts are the same if one block sums them or a cluster
// does. Rows are only split if they are too few to fill the chip. A processor has `together` such
// blocks at a time.
template <typename Fits>
RowPlan plan_tiles(int64_t words, int64_t rows, int chunk, int tile, int together, int64_t state,
                   const Chip& chip, const Fits& fits) {
  constexpr int kLeastTiles = 16;  // in most parts, so that each warp has two
  const int64_t tiles = (words + tile - 1) / tile;
  int parts = 1;
  while (parts < kMostTileParts && tiles > parts * kLeastTiles) parts *= 2;
  const auto part = static_cast<int>((tiles + parts - 1) / parts * tile);
  const int64_t chunks = (words + chunk - 1) / chunk;
  const auto threads = static_cast<int>(std::min<int64_t>(kRowThreads, round_up(chunks, kWarp)));
  const RowPlan split = {parts, 1, threads, part, state};
  const bool is_split = are_few(rows, together, chip) && chip.has_clusters && fits(split);
  return is_split ? split : RowPlan{1, parts, threads, part, state};
}

// A plan of pieces of nearly one size. Each piece's constants are computed once. With many rows, a
// piece is a whole row unless the row is very long. The size of a piece is a multiple of `multiple`
// words.
inline PiecePlan plan_pieces(int64_t words, int multiple, int64_t rows, int threads,
                             const Chip& chip) {
  constexpr int kBlocksOfProcessor = 8;  // more than run at once
  const int64_t about =
      are_few(rows, kBlocksOfProcessor, chip) ? 1 << 15 : 1 << 18;  // words per block
  const int64_t pieces = std::max<int64_t>(1, words / about);
  const auto piece =
      static_cast<int>(std::min(words, round_up((words + pieces - 1) / pieces, multiple)));
  return {static_cast<int>((words + piece - 1) / piece), threads, piece};
}

// Returns a function of a plan. It is true if the plan's clusters can be launched.
template <typename Task>
auto launchable(void (*kernel)(Task)) {
  return [kernel](const RowPlan& plan) {
    const Blocks blocks = {static_cast<unsigned>(plan.blocks), plan.threads, plan.blocks,
                           static_cast<size_t>(plan.shared)};
    return plan.blocks == 1 || most_clusters(address_of_kernel(kernel), blocks) > 0;
  };
}

// Makes one batch of several, if the rows of every model have equal distances across batches.
template <typename... Models>
void join_batches(LogitsShape& shape, const Models&... models) {
  const auto is_even = [&](const Logits& logits) {
    return logits.outer_stride == shape.inner * logits.inner_stride;
  };
  if ((is_even(models) && ...)) shape = {1, shape.rows(), shape.words};
}

// Launches a kernel over all rows, in as few grids as possible.
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
