// Clusters of blocks on chips that have them: their barrier, and access to each other's shared
// memory. The blocks of a cluster are neighbours in the grid, so a block's rank is blockIdx.x
// modulo the cluster's size.

#pragma once

#include "device/cuda/device.h"

namespace klfast::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasClusters = false;
#else
inline constexpr bool kHasClusters = true;
#endif

// The two halves of a cluster's barrier. A thread that has waited sees all reads and writes that
// other threads did before they arrived. All threads of all blocks call arrive and wait
// alternately.
__device__ __forceinline__ void cluster_arrive() {
#ifdef KLFAST_EMULATE_CUDA
  cuda_emulator::cluster_arrive();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#ifdef KLFAST_EMULATE_CUDA
  cuda_emulator::cluster_wait();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// The address that `own`, an address in shared memory, has in another block of the cluster. That
// block must not have ended when the address is read.
template <typename T>
__device__ __forceinline__ const T* of_block(const T* own, int rank) {
#ifdef KLFAST_EMULATE_CUDA
  return cuda_emulator::of_block(own, rank);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const T* mapped;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(own), "r"(rank));
  return mapped;
#else
  return own;
#endif
}

}  // namespace klfast::cuda
