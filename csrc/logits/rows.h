// The numbers of rows that kernels read and write besides logits, on the CPU and on GPUs. Kernels
// that are compiled once per instruction set include this file, so everything here is inlined into
// them.

#pragma once

#include "formulas/divergences.h"
#include "logits/call.h"

namespace klfast {

// Stores a result, if it is wanted.
template <typename Acc>
KLFAST_HOST_DEVICE void store_number(void* data, int64_t index, double value) {
  if (data != nullptr) static_cast<Acc*>(data)[index] = static_cast<Acc>(value);
}

template <typename Acc>
KLFAST_HOST_DEVICE double number_at(const void* data, int64_t index) {
  return data == nullptr ? 0.0 : static_cast<double>(static_cast<const Acc*>(data)[index]);
}

// A number of the picks' log-probs, of their gradients, or of the log-sum-exp's gradient.
template <typename Acc>
KLFAST_HOST_DEVICE double number_of_pick(const RowInputs& in, const void* data, int64_t index) {
  return in.has_double_picks() ? number_at<double>(data, index) : number_at<Acc>(data, index);
}

// True if a row has an incoming gradient that is not 0. Otherwise its gradient is 0, whatever the
// row holds.
template <typename Acc>
KLFAST_HOST_DEVICE bool has_incoming(const TokenLogprobsBackward& call, int64_t index) {
  const int64_t first = index * call.in.picks;
  bool some = number_at<Acc>(call.grad_entropy, index) != 0 ||
              number_of_pick<Acc>(call.in, call.grad_lse, index) != 0;
  for (int64_t i = first; !some && i < first + call.in.picks; ++i) {
    some = number_of_pick<Acc>(call.in, call.grad_logprobs, i) != 0;
  }
  return some;
}

template <typename Acc>
KLFAST_HOST_DEVICE bool has_incoming(const DivergenceBackward& call, int64_t index) {
  return number_at<Acc>(call.grad_rows, index) != 0 ||
         number_at<Acc>(call.grad_logprobs, index) != 0 ||
         number_at<Acc>(call.grad_ref_logprobs, index) != 0 ||
         number_at<Acc>(call.grad_entropy, index) != 0 ||
         number_at<Acc>(call.grad_lse, index) != 0 || number_at<Acc>(call.grad_ref_lse, index) != 0;
}

// Saves a row's results for the backward.
KLFAST_HOST_DEVICE void save_row(const DivergenceForward& call, int64_t index,
                                 const divergences::PairRow& row, double slope) {
  const int64_t rows = call.in.rows.shape.rows();
  call.saved[Saved::kLse * rows + index] = row.lse;
  call.saved[Saved::kShift * rows + index] = row.shift;
  call.saved[Saved::kSlope * rows + index] = slope;
  call.saved[Saved::kFirstOrigin * rows + index] = row.origins.first;
  call.saved[Saved::kSecondOrigin * rows + index] = row.origins.second;
}

template <typename Acc>
KLFAST_HOST_DEVICE divergences::RowState state_of(const DivergenceBackward& call, int64_t index) {
  const int64_t rows = call.in.rows.shape.rows();
  const double scale = call.in.rows.scale(index);
  return {number_at<Acc>(call.rows, index),
          call.saved[Saved::kLse * rows + index],
          call.saved[Saved::kShift * rows + index],
          call.saved[Saved::kSlope * rows + index],
          {call.saved[Saved::kFirstOrigin * rows + index],
           call.saved[Saved::kSecondOrigin * rows + index]},
          number_at<Acc>(call.grad_rows, index) * scale,
          number_at<Acc>(call.grad_logprobs, index) * scale,
          number_at<Acc>(call.grad_ref_logprobs, index) * scale,
          number_at<Acc>(call.grad_lse, index) * scale,
          number_at<Acc>(call.grad_ref_lse, index) * scale};
}

}  // namespace klfast
