// What totals of sequences decide for their tokens, after they are known.

#pragma once

#include "rollout/cuda_far.h"

namespace klfast::rollout::cuda {

// Zeroes `bytes` bytes; run by a warp.
__device__ __forceinline__ void zero_bytes(char* to, int64_t bytes) {
  constexpr int kVector = sizeof(uint4);
  const int lane = threadIdx.x % kWarp;
  const int64_t misfit = (kVector - reinterpret_cast<uintptr_t>(to) % kVector) % kVector;
  const int64_t head = misfit < bytes ? misfit : bytes;
  const int64_t whole = head + (bytes - head) / kVector * kVector;
  if (lane < head) to[lane] = 0;
#pragma unroll 1
  for (int64_t i = head + lane * kVector; i < whole; i += kWarp * kVector) {
    *reinterpret_cast<uint4*>(to + i) = uint4{0, 0, 0, 0};
  }
  if (lane < bytes - whole) to[whole + lane] = 0;
}

// Stores a sequence's weight at the tokens of a lane's chunk with x < infinity, else 0.
template <typename Acc, int W>
__device__ __forceinline__ void fill_chunk(const Task<Acc>& task, const Span& span, const Place& at,
                                           const Fill& fill) {
  const rollout::Inputs& in = task.call.in;
  const Acc weight = static_cast<Acc>(fill.weight);
  Chunk<Acc, W> weights;
  load_weights(in.mask, span.mask, span.size, at, weights);
#pragma unroll
  for (int i = 0; i < W; ++i) {
    weights.element[i] = weights.element[i] != Acc(0) ? weight : Acc(0);
  }
  if (!fill.all_finite) {
    Chunk<Acc, W> a, b;
    load_converted<false>(in.logprobs, span.logprobs, span.size, at, a);
    load_converted<false>(in.rollout_logprobs, span.rollout_logprobs, span.size, at, b);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const bool is_weighed = a.element[i] - b.element[i] < Acc(INFINITY);
      weights.element[i] = is_weighed ? weights.element[i] : Acc(0);
    }
  }
  store_chunk(static_cast<Acc*>(task.call.out.weights.data) + span.index + at.position,
              span.size - at.position, weights);
}

// Writes what is decided per sequence to the warp's tiles of a segment.
template <typename Acc>
__device__ __forceinline__ void fill_tiles(const Task<Acc>& task, const Span& segment,
                                           Turns turns) {
  const rollout::Inputs& in = task.call.in;
  const Output& mask = task.call.out.mask;
  const Fill fill = task.fills[segment.sequence];
  const int64_t size = element_size(mask.dtype);
  if (!in.options.weighs_sequences() && !fill.rejected) return;
#pragma unroll 1
  for (; turns.first() < segment.size; turns = turns.after()) {
    const int first = turns.first(), end = turns.end(segment.size);
    if (in.options.weighs_sequences()) {
      visit_chunks<4>(segment, first, end,
                      [&](const Span& span, const Place& at)
                          KLFAST_INLINE_LAMBDA { fill_chunk<Acc, 4>(task, span, at, fill); });
    }
    if (fill.rejected) {
      zero_bytes(static_cast<char*>(mask.data) + (segment.index + first) * size,
                 (end - first) * size);
    }
  }
}

}  // namespace klfast::rollout::cuda
