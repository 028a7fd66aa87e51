// The KL penalty on a GPU: forward and backward over a batch. No torch.

#pragma once

#include <cstdint>

#include "device/cuda/host.h"
#include "penalty/call.h"

namespace klfast::cuda {

// The number of doubles that a forward needs for the sums of its blocks; 0 if no block reads them.
int64_t partials_needed(const KlPenaltyInputs&, const KlPenaltyForward&);

// Queue the kernels and return; throw std::runtime_error if a launch fails. Values are not checked:
// the kernels stay inside of their memory whatever cu_seqlens and masks hold.
void kl_penalty_forward(const KlPenaltyInputs&, const KlPenaltyForward&, const Launch&);
void kl_penalty_backward(const KlPenaltyInputs&, const KlPenaltyBackward&, const Launch&);

// By how much a scalar reduction of values grows with each token's value: as many numbers as there
// are tokens, in arithmetic's type. The values, and what is made of them, are not looked at.
void token_weights(const KlPenaltyInputs&, void* weights, const Launch&);

// The doubles that it needs in Launch::partials.
int64_t doubles_for_token_weights(const KlPenaltyInputs&);

// x *= factor over n elements; reads the factor on the device and writes nothing if it is 1.
void scale(const Output& x, int64_t n, const View& factor, const Launch&);

}  // namespace klfast::cuda
