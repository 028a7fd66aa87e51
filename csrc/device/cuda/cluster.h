// Blocks of a cluster, on chips that have them: barriers between them, and each other's memory.
// Clusters lie in a row, so that a block's rank is blockIdx.x modulo their size.

#pragma once

#include "device/cuda/device.h"

namespace klfast::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasClusters = false;
#else
inline constexpr bool kHasClusters = true;
#endif

// What a thread has written or read before it arrives has happened for every thread that has
// waited. All threads of all blocks of the cluster arrive and wait in turns.
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

// Where another block of the cluster keeps what this one keeps at `own`, in shared memory. That
// block must not have ended when it is read.
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
