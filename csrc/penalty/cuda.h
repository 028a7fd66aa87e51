// The KL penalty on a GPU: forward and backward over a batch. No torch.

#pragma once

#include <cstdint>

#include "device/cuda/host.h"
#include "penalty/call.h"

namespace klfast::cuda {

// A place to run, and memory to run in.
struct Launch {
  void* stream = nullptr;        // cudaStream_t
  double* partials = nullptr;    // as many as partials_needed says
  unsigned* arrivals = nullptr;  // one counter at 0, that no launch which may overlap this one uses
};

// How many doubles a forward leaves for its last block to add; 0 where every block finishes alone.
int64_t partials_needed(const KlPenaltyInputs&, const KlPenaltyForward&);

// Queue the kernels and return; throw std::runtime_error if a launch fails. What the tensors hold
// is not checked: the kernels stay inside their bounds whatever it is.
void kl_penalty_forward(const KlPenaltyInputs&, const KlPenaltyForward&, const Launch&);
void kl_penalty_backward(const KlPenaltyInputs&, const KlPenaltyBackward&, const Launch&);

// x *= factor over n elements; reads the factor on the device and writes nothing if it is 1.
void scale(const Output& x, int64_t n, const View& factor, const Launch&);

}  // namespace klfast::cuda
