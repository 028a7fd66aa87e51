// The ops over logits on a GPU. No torch.

#pragma once

#include "logits/call.h"

namespace klfast::cuda {

// Queues the kernels of a call on a cudaStream_t and returns. Throws std::runtime_error if a launch
// fails. A token id that is no word has a log-prob of NaN, and is not used as an index.
void run_rows(const TokenLogprobsForward&, void* stream);
void run_rows(const TokenLogprobsBackward&, void* stream);
void run_rows(const DivergenceForward&, void* stream);
void run_rows(const DivergenceBackward&, void* stream);

}  // namespace klfast::cuda
