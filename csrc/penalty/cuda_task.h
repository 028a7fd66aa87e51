// The single argument of a kernel over log-probs.

#pragma once

#include "device/cuda/segments.h"
#include "formulas/token.h"
#include "penalty/call.h"

namespace klfast::cuda {

// The results that a call stores for each token.
enum Stored : unsigned {
  kStoresValue = 1,
  kStoresGradient = 2,
  kStoresRefGradient = 4,
  kTimesGradOut = 8,  // each gradient is multiplied by the token's own grad_out
  kNotesLastKept = 16
};

struct Task {
  KlPenaltyInputs in;
  Grid grid;
  Output grad_logprobs;
  Output grad_ref_logprobs;
  bool backward = false;
  unsigned stored = 0;  // for each token, as bits of Stored
  // Forward.
  Output value;  // per token: coef * weighted value
  View scores;
  bool weights_known = false;  // written by a pass over the lengths
  void* result = nullptr;      // null for a result per token
  void* weights_out = nullptr;
  void* statistics = nullptr;
  double* partials = nullptr;
  unsigned* arrivals = nullptr;  // if null, every block finishes its own sequences
  // Backward.
  View grad_out;
  View weights;
};

// If the incoming gradient is the same for all tokens of a sequence, it is part of the sequence's
// factor.
inline unsigned stored_by(const Task& task) {
  const bool of_tokens = task.in.reduction.result == Result::kToken;
  const bool has_own = task.backward && of_tokens && task.grad_out.column_stride != 0;
  return (task.value.data != nullptr ? kStoresValue : 0u) |
         (task.grad_logprobs.data != nullptr ? kStoresGradient : 0u) |
         (task.grad_ref_logprobs.data != nullptr ? kStoresRefGradient : 0u) |
         (has_own ? kTimesGradOut : 0u) | (task.scores.data != nullptr ? kNotesLastKept : 0u);
}

}  // namespace klfast::cuda
