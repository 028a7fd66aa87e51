// The division of rows of logits among blocks. It depends on the vocabulary, the dtypes and the
// chip alone, never on the number of rows, and so does the order of a row's sums.

#pragma once

#include <algorithm>

#include "device/cuda/launch.h"
#include "logits/call.h"

namespace klfast::cuda {

inline constexpr int kMostThreads = 512;
inline constexpr int kPieceThreads = 256;
inline constexpr int kMostBlocksOfRow = 8;  // of a cluster, on any chip that has them

// A range of a row's words.
struct Part {
  int64_t begin;
  int64_t size;
};

__device__ __forceinline__ Part part_at(int64_t words, int64_t part, int64_t index) {
  const int64_t begin = index * part;
  const int64_t rest = words - begin;
  return {begin, rest < 0 ? 0 : (rest < part ? rest : part)};
}

// The plan of a kernel that sums: a row is cut into one part per block, and its blocks form a
// cluster.
struct RowPlan {
  int blocks;
  int threads;
  int64_t part;           // words of a block; a multiple of a chunk's words
  bool is_staged;         // in shared memory, from the first read on
  int64_t shared;         // bytes
  int64_t first_row = 0;  // of the launch

  __device__ __forceinline__ int64_t row_of_block() const {
    return first_row + blockIdx.x / static_cast<unsigned>(blocks);
  }
  __device__ __forceinline__ int rank_of_block() const {
    return static_cast<int>(blockIdx.x % static_cast<unsigned>(blocks));
  }
};

// The plan of a kernel that treats each word alone: blocks do not depend on each other.
struct PiecePlan {
  int blocks;  // of a row
  int threads;
  int64_t piece;  // words
  int64_t first_row = 0;

  __device__ __forceinline__ int64_t row_of_block() const {
    return first_row + blockIdx.x / static_cast<unsigned>(blocks);
  }
  __device__ __forceinline__ Part part_of_block(int64_t words) const {
    return part_at(words, piece, blockIdx.x % static_cast<unsigned>(blocks));
  }
};

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// The words of a part: a multiple of 128 bytes, so that parts start at cache lines if their row
// does.
inline int64_t part_of(int64_t words, int blocks, int chunk) {
  return round_up((words + blocks - 1) / blocks, 8 * chunk);
}

inline int threads_for(int64_t words, int chunk, int most) {
  const int64_t chunks = (words + chunk - 1) / chunk;
  return static_cast<int>(std::min<int64_t>(most, round_up(chunks, kWarp)));
}

// A plan that reads a row from memory in every pass. A block has at most `threads` threads and
// needs `state` bytes of shared memory.
inline RowPlan plan_read(int64_t words, int chunk, int threads, int64_t state, const Chip& chip) {
  constexpr int64_t kMostWords = 1 << 16;  // of a block, if the row can have more blocks
  int blocks = 1;
  while (chip.has_clusters && blocks < kMostBlocksOfRow && words > blocks * kMostWords) blocks *= 2;
  const int64_t part = part_of(words, blocks, chunk);
  return {blocks, threads_for(std::min(part, words), chunk, threads), part, false, state};
}

// A plan that stages a row in shared memory and reads it once; a word takes `bytes` for all models.
// A row gets as few blocks as leave room for two rows on a processor, so that one is read while
// another is summed or written, or else as many as it needs. A row too large for that is not
// staged.
inline RowPlan plan_staged(int64_t words, int chunk, int64_t bytes, int threads, int64_t state,
                           const Chip& chip) {
  constexpr int64_t kReserved = 1024;  // of a block, by CUDA
  for (int blocks = 1; chip.has_clusters && blocks <= kMostBlocksOfRow; blocks *= 2) {
    const int64_t part = part_of(words, blocks, chunk);
    const int64_t shared = state + bytes * round_up(std::min(part, words), kWarp * chunk);
    const int64_t most = blocks == kMostBlocksOfRow ? chip.shared_of_block
                                                    : chip.shared_of_processor / 2 - kReserved;
    if (shared > std::min(most, chip.shared_of_block)) continue;
    return {blocks, threads_for(std::min(part, words), chunk, threads), part, true, shared};
  }
  return plan_read(words, chunk, threads, state, chip);
}

inline PiecePlan plan_pieces(int64_t words, int chunk) {
  constexpr int64_t kLeast = 1 << 14;  // words of a block
  constexpr int64_t kMostBlocks = 1 << 20;
  const int64_t piece = std::min(words, std::max(kLeast, round_up(words / kMostBlocks, chunk)));
  return {static_cast<int>((words + piece - 1) / piece), threads_for(piece, chunk, kPieceThreads),
          piece};
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
