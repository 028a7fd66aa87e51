// rollout_correction on a GPU. No torch.

#pragma once

#include <cstdint>

#include "device/cuda/host.h"
#include "rollout/call.h"

namespace klfast::cuda {

// The number of doubles that a call needs in Launch::partials.
int64_t rollout_doubles_needed(const rollout::Inputs&);

// Queues one kernel, or two where totals of sequences decide, and returns; throws
// std::runtime_error if a launch fails. Values are not checked: the kernels stay inside of their
// memory whatever cu_seqlens and masks hold.
void rollout_correction(const rollout::Call&, const Launch&);

}  // namespace klfast::cuda
