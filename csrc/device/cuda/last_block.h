// Finds the last block of a launch.

#pragma once

#include "device/cuda/device.h"

namespace klfast::cuda {

// True in the last block of the launch to arrive. That block sees everything that the others wrote
// before they arrived. The counter ends at 0, ready for the next launch on this stream or the next
// replay of a graph.
__device__ __forceinline__ bool arrives_last(unsigned* arrivals) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    // The fences of one thread serve its block: they also order what the barriers show to this
    // thread.
    __threadfence();
    is_last = atomicAdd(arrivals, 1u) == gridDim.x - 1;
    __threadfence();
    if (is_last) *arrivals = 0;
  }
  __syncthreads();
  return is_last;
}

}  // namespace klfast::cuda
