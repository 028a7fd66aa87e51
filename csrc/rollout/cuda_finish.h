// Results from the totals of sequences: one of one segment is finished by the warp that has added
// it, all others by the last block to arrive, in the order of positions.

#pragma once

#include "rollout/cuda_sums.h"

namespace klfast::rollout::cuda {

// Stores the statistics of a sequence, and what the second kernel fills in.
template <typename Acc>
__device__ __forceinline__ void finish_sequence(const Task<Acc>& task, int64_t sequence,
                                                const double* totals) {
  const rollout::Inputs& in = task.call.in;
  const Decision decision = judge(in.options, totals);
  Acc* const column = static_cast<Acc*>(task.call.out.table) + sequence;
  store_statistics(in.options, totals, decision, [&](int row, double value) {
    column[row * in.batch.sequences] = static_cast<Acc>(value);
  });
  if (task.fills != nullptr) task.fills[sequence] = fill_of(totals, decision);
}

// Leaves the totals of a segment for the last block; run by one warp.
template <typename Acc>
__device__ __forceinline__ void put(const Task<Acc>& task, int64_t slot, const double* totals) {
  const int rows = rows_of_totals(task.call.in.options.rules_count);
#pragma unroll 1
  for (int row = threadIdx.x % kWarp; row < rows; row += kWarp) {
    task.partials[slot * rows + row] = totals[row];
  }
}

// Combines row `row` of a sequence's segments in place, in that of the first.
__device__ __forceinline__ void combine_segments(double* first, int row, int rows,
                                                 int64_t segments) {
  const How how = how_of(row);
  double total = __ldcg(first + row);  // past the first-level cache, which may be stale
#pragma unroll 4
  for (int64_t i = 1; i < segments; ++i) {
    total = combine(how, total, __ldcg(first + i * rows + row));
  }
  first[row] = total;
}

// Finishes the sequences of several segments; run by all threads of the last block. The fewer
// sequences, the more lanes each has for its rows.
template <typename Acc>
__device__ __forceinline__ void finish_batch(const Task<Acc>& task) {
  const Batch& batch = task.call.in.batch;
  const int rows = rows_of_totals(task.call.in.options.rules_count);
  int lanes = 1;  // of a sequence
  while (lanes < kWarp && lanes * batch.sequences < kBlockThreads) lanes *= 2;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int step = kBlockThreads / lanes;
#pragma unroll 1
  for (int64_t begin = 0; begin < batch.sequences; begin += step) {
    const int64_t sequence = begin + static_cast<int>(threadIdx.x) / lanes;
    const bool exists = sequence < batch.sequences;
    const int64_t segments = exists ? segments_of(sequence_at(batch, sequence).length) : 1;
    const int64_t slot = exists ? first_slot(batch, task.grid, sequence) : 0;
    double* const totals = task.partials + slot * rows;
    // Only cu_seqlens that decrease could lead beyond the slots.
    const int64_t there = segments < task.grid.slots - slot ? segments : task.grid.slots - slot;
    if (segments > 1) {
#pragma unroll 1
      for (int row = lane; row < rows; row += lanes) combine_segments(totals, row, rows, there);
    }
    __syncwarp();
    if (segments > 1 && lane == 0) finish_sequence(task, sequence, totals);
  }
}

}  // namespace klfast::rollout::cuda
