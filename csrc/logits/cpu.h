// The ops over logits on the CPU. No torch.

#pragma once

#include "device/cpu/parallel.h"
#include "logits/call.h"

namespace klfast::cpu {

// The forwards throw std::runtime_error if a token id of a kept row is no word.
void token_logprobs_forward(const TokenLogprobsForward&, const Threads&);
void token_logprobs_backward(const TokenLogprobsBackward&, const Threads&);
void divergence_forward(const DivergenceForward&, const Threads&);
void divergence_backward(const DivergenceBackward&, const Threads&);

}  // namespace klfast::cpu
