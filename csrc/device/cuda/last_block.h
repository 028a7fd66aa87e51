// The last block of a launch.

#pragma once

#include "device/cuda/device.h"

namespace klfast::cuda {

// True in the last block of the launch to arrive, to which everything is visible that the others
// wrote before they arrived. The counter ends at 0, for the next launch on this stream, or the next
// replay of a graph.
__device__ __forceinline__ bool arrives_last(unsigned* arrivals) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    // One thread's fences serve its block: they order what the barriers show it, too.
    __threadfence();
    is_last = atomicAdd(arrivals, 1u) == gridDim.x - 1;
    __threadfence();
    if (is_last) *arrivals = 0;
  }
  __syncthreads();
  return is_last;
}

}  // namespace klfast::cuda
