// The allocator of tests under compute-sanitizer. It adds no cache, so that every tensor has bounds
// of its own. It rounds sizes up to 16 bytes, because kernels read whole vectors: the last vector
// of an unaligned row may end behind the row (csrc/device/cuda/load.h). Such a vector never crosses
// a page.

#include <cuda_runtime.h>

#include <cstddef>

extern "C" void* allocate(std::ptrdiff_t bytes, int, cudaStream_t) {
  constexpr std::ptrdiff_t kVector = 16;
  void* memory = nullptr;
  const auto error = cudaMalloc(&memory, (bytes + kVector - 1) / kVector * kVector);
  return error == cudaSuccess ? memory : nullptr;
}

extern "C" void release(void* memory, std::ptrdiff_t, int, cudaStream_t) { cudaFree(memory); }
