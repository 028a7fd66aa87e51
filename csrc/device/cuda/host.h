// Functions of a device that need no CUDA headers to call. No torch.

#pragma once

#include <string>

namespace klfast::cuda {

// Why kernels cannot run on the current device (no driver, one too old, no code for its
// architecture); empty if they can.
std::string problem();

// A counter at 0 for launches on a stream, or null if there is none: the caller then zeroes one of
// its own. Launches on one stream share a counter, as they do not overlap. A launch that is
// captured into a graph gets a counter of its own, since a graph may be replayed beside anything,
// but for itself: its counter and the memory that its launches share belong to one replay at a
// time.
unsigned* arrivals_of_stream(int device, void* stream);

// Zeroes one counter in the order of the stream.
void zero(unsigned* arrivals, void* stream);

// The stream and the memory of a launch.
struct Launch {
  void* stream = nullptr;        // cudaStream_t
  double* partials = nullptr;    // as many as the call's *_needed() says
  unsigned* arrivals = nullptr;  // one counter at 0, that no launch which may overlap this one uses
};

}  // namespace klfast::cuda
