// The KL penalty on the CPU: forward and backward over a batch. No torch.

#pragma once

#include <cstdint>

#include "device/cpu/parallel.h"
#include "penalty/call.h"

namespace klfast::cpu {

// Both throw std::runtime_error on bad cu_seqlens, before any token is read; the forward also on a
// bad mask, after all tokens are read.
void kl_penalty_forward(const KlPenaltyInputs&, const KlPenaltyForward&, const Threads&);
void kl_penalty_backward(const KlPenaltyInputs&, const KlPenaltyBackward&, const Threads&);

// By how much a scalar reduction of values grows with each token's value: as many numbers as there
// are tokens, in arithmetic's type. Throws as the forward does.
void token_weights(const KlPenaltyInputs&, void* weights, const Threads&);

// x *= factor over n elements; returns at once if factor is 1.
void scale(const Output& x, int64_t n, double factor, const Threads&);

// One element of a view with one row.
double read_element(const View&, int64_t index);

}  // namespace klfast::cpu
