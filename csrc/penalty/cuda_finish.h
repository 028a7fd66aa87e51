// Results from the sums of segments. The block that has read a sequence of one segment finishes it.
// The last block to arrive finishes all other sequences and the batch. Sums are always added in the
// order of positions.

#pragma once

#include "device/cuda/lanes.h"
#include "device/cuda/last_block.h"
#include "penalty/cuda_sums.h"
#include "penalty/cuda_task.h"
#include "tensors/convert.h"

namespace klfast::cuda {

// It is called where it is rarely needed, so it is no part of a kernel's short path.
__device__ __noinline__ inline double read_element(const View& view, int64_t row, int64_t column) {
  // element_at() would load the data's address before it asks for the dtype.
  const int64_t at = row * view.row_stride + column * view.column_stride;
  double value = 0;
  visit_dtype(view.dtype, [&](auto zero) {
    using T = decltype(zero);
    value = convert<double>(static_cast<const T*>(view.data)[at]);
  });
  return value;
}

__device__ __forceinline__ double read_element(const View& view, int64_t index) {
  return read_element(view, 0, index);
}

// The coefficient and the normalizer of a call, read from tensors if they are given as tensors.
__device__ __forceinline__ double coef_of(const KlPenaltyInputs& in) {
  const double coef = in.coef_tensor.data == nullptr ? in.coef : read_element(in.coef_tensor, 0);
  return in.negate ? -coef : coef;
}

__device__ __forceinline__ double normalizer_of(const KlPenaltyInputs& in) {
  return in.normalizer_tensor.data == nullptr ? in.normalizer
                                              : read_element(in.normalizer_tensor, 0);
}

__device__ __forceinline__ Partials partials_of(const Task& task) {
  return {task.partials, task.grid.slots};
}

template <typename Acc>
__device__ __forceinline__ void store(void* data, int64_t index, double value) {
  static_cast<Acc*>(data)[index] = static_cast<Acc>(value);
}

// Called, because a division has many instructions.
template <typename Acc>
__device__ __noinline__ double computed_weight(const Task& task, double length, double total) {
  const KlPenaltyInputs& in = task.in;
  return static_cast<Acc>(
      sequence_weight(in.reduction, length, total, in.is_normalized(), normalizer_of(in)));
}

// The weight of a sequence's tokens. It is rounded to the precision of the arithmetic, because the
// backward reads it so.
template <typename Acc>
__device__ __forceinline__ double weight_of(const Task& task, int64_t sequence, double length,
                                            double total) {
  if (task.in.reduction.is_sum()) return 1;
  if (task.weights_known) return static_cast<const Acc*>(task.weights_out)[sequence];
  return computed_weight<Acc>(task, length, total);
}

// The weight of a sequence before its mask is summed. lengths_kernel has computed it, or it does
// not depend on lengths, or the batch is padded and has no mask.
template <typename Acc>
__device__ __forceinline__ double weight_before_sums(const Task& task, int64_t sequence) {
  const Batch& batch = task.in.batch;
  const double length = static_cast<double>(batch.width);
  const double total =
      static_cast<double>(batch.sequences) * denominator_term(task.in.reduction, length);
  return weight_of<Acc>(task, sequence, length, total);
}

template <typename Acc>
__device__ __forceinline__ void store_statistics(const Task& task, int64_t sequence,
                                                 const Sums& sums) {
#pragma unroll
  for (int i = 0; i < kStatistics; ++i) {
    store<Acc>(task.statistics, i * task.in.batch.sequences + sequence, sums.at[i]);
  }
}

// Stores the results of one sequence. Returns its term of a scalar result, without the coefficient.
template <Depth depth, typename Acc>
__device__ __forceinline__ double finish_sequence(const Task& task, int64_t sequence,
                                                  const Sums& sums, double total) {
  const KlPenaltyInputs& in = task.in;
  const double weight = weight_of<Acc>(task, sequence, sums.at[kLength], total);
  double sum = sums.at[kKl];
  if constexpr (depth == Depth::kLimited) sum = in.is_weighted() ? sums.weighted : sum;
  const double term = sums.at[kLength] > 0 ? weight * sum : 0.0;
  if (task.weights_out != nullptr) store<Acc>(task.weights_out, sequence, weight);
  if constexpr (depth != Depth::kAlways) {
    if (task.statistics != nullptr) store_statistics<Acc>(task, sequence, sums);
    // The upper bound guards against overlapping cu_seqlens, with which `sums` may be uninitialised
    // memory.
    if (task.scores.data != nullptr && sums.last_kept >= 0 && sums.last_kept < in.batch.tokens) {
      Acc* const reward = static_cast<Acc*>(task.value.data) + sums.last_kept;
      *reward += static_cast<Acc>(read_element(task.scores, sequence));
    }
  }
  if (in.reduction.result == Result::kSequence) {
    store<Acc>(task.result, sequence, coef_of(in) * term);
  }
  return term;
}

// Calls visit(sequence, sums) for the sequences of a thread, in their order. With `only_long` it
// leaves out the sequences of one segment, which their own blocks have finished. The first segments
// of several sequences are loaded together, so that the thread waits once for all of them. With
// `only_lengths` the sums have no other statistics.
template <Depth depth, typename Visitor>
__device__ __forceinline__ void for_each_sequence(const Task& task, bool only_long,
                                                  bool only_lengths, const Visitor& visit) {
  // How many sequences and later segments are loaded together; limited by registers.
  constexpr int kInFlight = depth == Depth::kAlways ? 2 : 1;
  constexpr int kTogether = depth == Depth::kAlways ? 4 : 1;
  const Batch& batch = task.in.batch;
  const auto load = [&](int64_t slot) {
    if (depth != Depth::kAlways && only_lengths) {
      return get<Depth::kAlways>(partials_of(task), slot, false);
    }
    return get<depth>(partials_of(task), slot, task.scores.data != nullptr);
  };
#pragma unroll 1
  for (int64_t begin = threadIdx.x; begin < batch.sequences; begin += kInFlight * kBlockThreads) {
    Slots slots[kInFlight];
    Sums sums[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      slots[i] = slots_of(batch, task.grid, begin + i * kBlockThreads);
      if (only_long && slots[i].count == 1) slots[i].count = 0;
      sums[i] = empty_sums();
      if (slots[i].count > 0) sums[i] = load(slots[i].first);
    }
    // The next sequence moves to the front, so that the code is there once.
#pragma unroll 1
    for (int i = 0; i < kInFlight; ++i) {
#pragma unroll 1
      for (int64_t j = 1; j < slots[0].count; j += kTogether) {
        Sums parts[kTogether];
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          parts[k] = j + k < slots[0].count ? load(slots[0].first + j + k) : empty_sums();
        }
#pragma unroll
        for (int k = 0; k < kTogether; ++k) add<depth>(sums[0], parts[k]);
      }
      if (slots[0].count > 0) visit(begin + i * kBlockThreads, sums[0]);
#pragma unroll
      for (int k = 0; k + 1 < kInFlight; ++k) {
        slots[k] = slots[k + 1];
        sums[k] = sums[k + 1];
      }
    }
  }
}

// The sum of visit(sequence, sums, total) over the sequences of the batch, computed by all threads
// of a block. `total` is that of the denominator, or 0 if it is not used. A pass of its own adds
// it.
template <Depth depth, typename Visitor>
__device__ __forceinline__ double add_sequences(const Task& task, bool only_long,
                                                const Visitor& visit) {
  const KlPenaltyInputs& in = task.in;
  const bool uses_total = in.reduction.uses_total(in.is_normalized()) && !task.weights_known;
  double sum = 0;
#pragma unroll 1
  for (int pass = uses_total ? 0 : 1; pass < 2; ++pass) {
    const double total = sum;
    sum = 0;
    const auto add = [&](int64_t sequence, const Sums& sums) {
      sum += pass == 0 ? denominator_term(in.reduction, sums.at[kLength])
                       : visit(sequence, sums, total);
    };
    for_each_sequence<depth>(task, pass == 1 && only_long, pass == 0, add);
    if (pass == 0 || in.reduction.result == Result::kScalar) sum = add_block(sum);
  }
  return sum;
}

// Stores the results of the batch, except for sequences that their own block has finished. Run by
// all threads of the last block.
template <Depth depth, typename Acc>
__device__ __forceinline__ void finish_batch(const Task& task) {
  const bool scalar = task.in.reduction.result == Result::kScalar;
  const double result =
      add_sequences<depth>(task, !scalar, [&](int64_t sequence, const Sums& sums, double total) {
        return finish_sequence<depth, Acc>(task, sequence, sums, total);
      });
  if (scalar && threadIdx.x == 0) store<Acc>(task.result, 0, coef_of(task.in) * result);
}

// Finishes the sequence of a segment, or leaves the segment's sums to the last block. Run by one
// thread of the block that has read the segment.
template <Depth depth, typename Acc>
__device__ __forceinline__ void finish_segment(const Task& task, const Segment& segment,
                                               const Sums& sums) {
  const bool is_sequence = segments_of(task.grid, segment.length) == 1;
  if (task.in.reduction.result != Result::kScalar && is_sequence) {
    finish_sequence<depth, Acc>(task, segment.sequence, sums, 0);
  } else {
    put<depth>(partials_of(task), segment.slot, sums, task.scores.data != nullptr);
  }
}

}  // namespace klfast::cuda
