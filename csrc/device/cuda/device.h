// What the kernels take from CUDA; tests compile them against an emulation of it on the host.

#pragma once

#include <cstdint>

#ifdef KLFAST_EMULATE_CUDA
#include "cuda_emulator.h"
#else
#include <cuda_runtime.h>
#endif

namespace klfast::cuda {

inline constexpr int kWarp = 32;                      // lanes
inline constexpr int kWarps = 8;                      // of a block
inline constexpr int kBlockThreads = kWarp * kWarps;  // threads

// Memory that the threads of a block share, as much as its launch asked for; 16-byte aligned.
__device__ __forceinline__ char* dynamic_shared() {
#ifdef KLFAST_EMULATE_CUDA
  return cuda_emulator::dynamic_shared();
#else
  extern __shared__ __align__(16) char memory[];
  return memory;
#endif
}

// The same value, of which the compiler knows nothing more. Where a switch over dtypes stands in a
// loop, this keeps it from preparing addresses for each of them before the loop, in registers that
// all but one case leave unused.
__device__ __forceinline__ int64_t opaque(int64_t value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+l"(value));
#endif
  return value;
}

// The same for what a warp keeps in shared memory: read when it is used, not before.
template <typename T>
__device__ __forceinline__ const T& opaque(const T* value) {
  int offset = 0;  // not the pointer, which would no longer be known to point to shared memory
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(offset));
#endif
  return value[offset];
}

}  // namespace klfast::cuda
