// The KL penalty on a GPU: forward and backward over a batch. No torch.

#pragma once

#include <cstdint>
#include <string>

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

// A counter for launches on a stream (see Launch), or null if there is none to be had: then the
// caller zeroes one. Launches on one stream share a counter, as they do not overlap. What is
// captured into a graph gets one of its own, since a graph may be replayed beside anything.
unsigned* arrivals_of_stream(int device, void* stream);

// Zeroes one counter in the order of the stream.
void zero(unsigned* arrivals, void* stream);

// Why kernels cannot run on the current device (no driver, one too old, no code for its
// architecture); empty if they can.
std::string problem();

}  // namespace klfast::cuda
