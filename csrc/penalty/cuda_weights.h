// The weights of tokens in a scalar result: the derivatives of the result with respect to the
// tokens' values.

#pragma once

#include "penalty/cuda_finish.h"

namespace klfast::cuda {

// The sequence that holds a token, or S if no sequence holds it.
__device__ __forceinline__ int64_t sequence_of_token(const Batch& batch, int64_t token) {
  if (!batch.packed()) return token / batch.width;
  int64_t low = -1;
  int64_t high = batch.sequences + 1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (start_of(batch, middle) <= token ? low : high) = middle;
  }
  if (low < 0 || low == batch.sequences) return batch.sequences;
  const Sequence sequence = sequence_at(batch, low);
  return token < sequence.start + sequence.length ? low : batch.sequences;
}

// The factor of a token: the same for all, or multiplied by the weight of its sequence in
// task.weights_out.
struct TokenFactors {
  double of_all;
  bool have_weights;
};

template <typename Acc, typename Mask>
__device__ __forceinline__ Acc weight_of_token(const Task& task, const TokenFactors& factors,
                                               int64_t token) {
  const Batch& batch = task.in.batch;
  const View& mask = task.in.mask;
  const int64_t sequence = sequence_of_token(batch, token);
  if (sequence == batch.sequences) return Acc(0);
  Acc own = Acc(1);
  const int64_t column = batch.packed() ? token : token - sequence * batch.width;
  if (mask.data != nullptr) {
    const int64_t at = batch.row(sequence) * mask.row_stride + column * mask.column_stride;
    own = convert<Acc>(static_cast<const Mask*>(mask.data)[at]);
  }
  if (task.in.is_weighted() && own != Acc(0)) {
    own *= static_cast<Acc>(read_element(task.in.weighting, sequence, column));
  }
  double factor = factors.of_all;
  if (factors.have_weights) factor *= static_cast<const Acc*>(task.weights_out)[sequence];
  // 0 stays 0, even if the factor is infinite.
  return own != Acc(0) ? own * static_cast<Acc>(factor) : Acc(0);
}

// Stores the weights of the tokens first, first + step, and so on in task.grad_logprobs. With
// kBools a mask has bools.
template <typename Acc, bool kBools>
__device__ __forceinline__ void store_token_weights(const Task& task, const TokenFactors& factors,
                                                    int64_t first, int64_t step) {
  constexpr int kLoadsInFlight = 8;  // loads on their way before the first store
  const int64_t tokens = task.in.batch.tokens;
  Acc* const to = static_cast<Acc*>(task.grad_logprobs.data);
  const auto store_all = [&](auto zero) {
    using Mask = decltype(zero);
    for (int64_t begin = first; begin < tokens; begin += kLoadsInFlight * step) {
      Acc weights[kLoadsInFlight];
#pragma unroll
      for (int k = 0; k < kLoadsInFlight; ++k) {
        const int64_t token = begin + k * step;
        if (token < tokens) {
          weights[k] = weight_of_token<Acc, Mask>(task, factors, token);
        }
      }
#pragma unroll
      for (int k = 0; k < kLoadsInFlight; ++k) {
        const int64_t token = begin + k * step;
        if (token < tokens) to[token] = weights[k];
      }
    }
  };
  if constexpr (kBools) return store_all(Bool());
  visit_dtype(task.in.mask.dtype, store_all);
}

// The end of a pass over lengths. The last block stores the weights of all sequences, and the
// weights of tokens if they are wanted.
template <typename Acc, bool kBools>
__device__ __forceinline__ void finish_lengths(const Task& task) {
  if (!arrives_last(task.arrivals)) return;
  add_sequences<Depth::kAlways>(task, false, [&](int64_t sequence, const Sums& sums, double total) {
    store<Acc>(task.weights_out, sequence, weight_of<Acc>(task, sequence, sums.at[kLength], total));
    return 0.0;
  });
  if (task.grad_logprobs.data == nullptr) return;
  __syncthreads();
  store_token_weights<Acc, kBools>(task, {coef_of(task.in), true}, threadIdx.x, kBlockThreads);
}

}  // namespace klfast::cuda
