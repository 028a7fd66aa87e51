// CUDA, or the emulation of it on the host, with which tests compile the kernels.

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

// The dynamic shared memory of a block, 16-byte aligned. The launch sets its size.
__device__ __forceinline__ char* dynamic_shared() {
#ifdef KLFAST_EMULATE_CUDA
  return cuda_emulator::dynamic_shared();
#else
  extern __shared__ __align__(16) char memory[];
  return memory;
#endif
}

// The same value, unknown to the compiler. Without this a switch over dtypes in a loop computes the
// addresses of every case before the loop, in registers that only one case uses.
__device__ __forceinline__ int64_t opaque(int64_t value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+l"(value));
#endif
  return value;
}

// The same value, kept in a register: the compiler does not compute it from the parameters again.
__device__ __forceinline__ unsigned in_register(unsigned value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(value));
#endif
  return value;
}

__device__ __forceinline__ int in_register(int value) {
  return static_cast<int>(in_register(static_cast<unsigned>(value)));
}

// The same object in shared memory, unknown to the compiler, so that it is read where it is used
// and not before.
template <typename T>
__device__ __forceinline__ const T& opaque(const T* value) {
  int offset = 0;  // an opaque pointer would not be known to point to shared memory
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(offset));
#endif
  return value[offset];
}

}  // namespace klfast::cuda
