// Combines the numbers of a warp's lanes, or of a block's threads, into one.

#pragma once

#include "device/cuda/device.h"
#include "math/combine.h"

namespace klfast::cuda {

// The combination of the values of all lanes of a warp, in every lane.
template <typename Combination, typename T>
__device__ __forceinline__ T combine_lanes(T value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = Combination::combine(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  return value;
}

template <typename T>
__device__ __forceinline__ T add_lanes(T value) {
  return combine_lanes<math::Sum>(value);
}

// The sum over the threads of a block, in every thread.
__device__ __forceinline__ double add_block(double value) {
  __shared__ double of_warp[kWarps];
  // A loop, because each shuffle of a double is twelve instructions.
#pragma unroll 1
  for (int step = kWarp / 2; step > 0; step /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, step);
  __syncthreads();  // the last use of of_warp is over
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  double sum = of_warp[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) sum += of_warp[warp];
  return sum;
}

}  // namespace klfast::cuda
