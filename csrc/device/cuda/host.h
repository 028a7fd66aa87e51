// Functions of a device that can be called without CUDA headers. No torch.

#pragma once

#include <string>

namespace klfast::cuda {

// The reason why kernels cannot run on the current device: no driver, an old driver, or no code for
// its architecture. Empty if they can run.
std::string problem();

// A counter at 0 for launches on a stream, or null if none is left. In that case the caller zeroes
// a counter of its own. Launches on one stream do not overlap, so they share a counter. A launch
// that is captured into a graph gets its own counter, because a graph may be replayed beside any
// other work. Two replays of one graph must not overlap: they share the counter and the memory of
// its launches.
unsigned* arrivals_of_stream(int device, void* stream);

// Zeroes a counter in the order of the stream.
void zero(unsigned* arrivals, void* stream);

// The stream and the memory of a launch.
struct Launch {
  void* stream = nullptr;        // cudaStream_t
  double* partials = nullptr;    // as many doubles as the call's *_needed() says
  unsigned* arrivals = nullptr;  // one counter at 0, unused by launches that may overlap
};

}  // namespace klfast::cuda
