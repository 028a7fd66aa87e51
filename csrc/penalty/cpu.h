// The KL penalty on the CPU: forward and backward over a batch. No torch.

#pragma once

#include <cstdint>

#include "device/cpu/parallel.h"
#include "penalty/call.h"

namespace klfast::cpu {

// Both throw std::runtime_error on bad cu_seqlens before they read any token. The forward also
// throws on a bad mask, after it has read all tokens.
void kl_penalty_forward(const KlPenaltyInputs&, const KlPenaltyForward&, const Threads&);
void kl_penalty_backward(const KlPenaltyInputs&, const KlPenaltyBackward&, const Threads&);

// The derivative of a scalar reduction with respect to each token's value: a weight per token, in
// the type of the arithmetic. Throws as the forward does.
void token_weights(const KlPenaltyInputs&, void* weights, const Threads&);

// Computes x *= factor over n elements. Returns at once if factor is 1.
void scale(const Output& x, int64_t n, double factor, const Threads&);

// One element of a view with one row.
double read_element(const View&, int64_t index);

}  // namespace klfast::cpu
