// Marks of functions that host compilers and nvcc both compile.

#pragma once

#ifdef __clang__  // it knows neither `#pragma GCC ivdep` nor all warnings of GCC. `|` has no branch
#pragma clang diagnostic ignored "-Wunknown-pragmas"
#pragma clang diagnostic ignored "-Wunknown-warning-option"
#pragma clang diagnostic ignored "-Wbitwise-instead-of-logical"
#endif

#ifdef __CUDACC__
#define KLFAST_HOST_DEVICE __host__ __device__ __forceinline__
#define KLFAST_INLINE_LAMBDA
#else
#define KLFAST_HOST_DEVICE inline __attribute__((always_inline))
#define KLFAST_INLINE_LAMBDA __attribute__((always_inline))
#endif
