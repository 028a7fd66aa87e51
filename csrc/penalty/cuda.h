// The KL penalty on a GPU: forward and backward over a batch. No torch.

#pragma once

#include <cstdint>

#include "device/cuda/host.h"
#include "penalty/call.h"

namespace klfast::cuda {

// The number of doubles that a forward needs for the sums of its blocks. It is 0 if no block reads
// them.
int64_t partials_needed(const KlPenaltyInputs&, const KlPenaltyForward&);

// Both queue the kernels and return. They throw std::runtime_error if a launch fails. Values are
// not checked: whatever cu_seqlens and masks hold, the kernels access only their own memory.
void kl_penalty_forward(const KlPenaltyInputs&, const KlPenaltyForward&, const Launch&);
void kl_penalty_backward(const KlPenaltyInputs&, const KlPenaltyBackward&, const Launch&);

// The derivative of a scalar reduction with respect to each token's value: a weight per token, in
// the type of the arithmetic. It does not depend on the values, or on how they are computed.
void token_weights(const KlPenaltyInputs&, void* weights, const Launch&);

// The number of doubles that token_weights needs in Launch::partials.
int64_t doubles_for_token_weights(const KlPenaltyInputs&);

// Computes x *= factor over n elements. The factor is read on the device. Nothing is written if it
// is 1.
void scale(const Output& x, int64_t n, const View& factor, const Launch&);

}  // namespace klfast::cuda
