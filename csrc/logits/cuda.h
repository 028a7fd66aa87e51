// The ops over logits on a GPU. No torch.

#pragma once

#include "logits/call.h"

namespace klfast::cuda {

// All queue the kernels on a cudaStream_t and return. They throw std::runtime_error if a launch
// fails. A token id that is no word has a log-prob of NaN, and is not used as an index.
void token_logprobs_forward(const TokenLogprobsForward&, void* stream);
void token_logprobs_backward(const TokenLogprobsBackward&, void* stream);
void divergence_forward(const DivergenceForward&, void* stream);
void divergence_backward(const DivergenceBackward&, void* stream);

}  // namespace klfast::cuda
