// rollout_correction on the CPU. No torch.

#pragma once

#include "device/cpu/parallel.h"
#include "rollout/call.h"

namespace klfast::cpu {

// Throws std::runtime_error on bad cu_seqlens, before any token is read, and on a bad mask, after
// all tokens are read.
void rollout_correction(const rollout::Call&, const Threads&);

}  // namespace klfast::cpu
