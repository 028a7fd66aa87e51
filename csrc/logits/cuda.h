// The ops over logits on a GPU. No torch.

#pragma once

#include "logits/call.h"

namespace klfast::cuda {

// Queue the kernels on a cudaStream_t and return; throw std::runtime_error if a launch fails. A
// token id that is no word gives a log-prob of NaN, and no memory is read by it.
void token_logprobs_forward(const TokenLogprobsForward&, void* stream);
void token_logprobs_backward(const TokenLogprobsBackward&, void* stream);
void divergence_forward(const DivergenceForward&, void* stream);
void divergence_backward(const DivergenceBackward&, void* stream);

}  // namespace klfast::cuda
