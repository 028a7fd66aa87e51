// The ops over logits on the CPU. No torch.

#pragma once

#include "device/cpu/parallel.h"
#include "logits/call.h"

namespace klfast::cpu {

// Runs the kernels of a call. A forward throws std::runtime_error if a token id of a kept row is no
// word.
void run_rows(const TokenLogprobsForward&, const Threads&);
void run_rows(const TokenLogprobsBackward&, const Threads&);
void run_rows(const DivergenceForward&, const Threads&);
void run_rows(const DivergenceBackward&, const Threads&);

}  // namespace klfast::cpu
