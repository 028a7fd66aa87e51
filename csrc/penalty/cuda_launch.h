// Launches of the kernels over log-probs.

#pragma once

#include "device/cuda/host.h"
#include "device/cuda/launch.h"
#include "penalty/cuda_task.h"

namespace klfast::cuda {

inline void launch(void (*kernel)(Task), const Task& task, const Launch& on) {
  launch(kernel, {task.grid.blocks, kBlockThreads}, on.stream, task);
}

// True if the kernels of plain calls (cuda_plain.h) serve a call. A forward has no grad_out.
bool has_plain_kernel(const KlPenaltyInputs& in, const View& grad_out);
Grid plain_grid_of(const KlPenaltyInputs& in, int processors);
void launch_plain(const Task& task, const Launch& on);

// The same for the lengths of sequences, which the mask alone decides.
bool has_plain_mask(const View& mask);
Grid lengths_grid_of(const Batch& batch, int processors);
void launch_plain_lengths(const Task& task, const Launch& on);

}  // namespace klfast::cuda
