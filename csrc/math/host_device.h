// The mark of functions that host compilers and nvcc both compile.

#pragma once

#ifdef __CUDACC__
#define KLFAST_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KLFAST_HOST_DEVICE inline __attribute__((always_inline))
#endif
