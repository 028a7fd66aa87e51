// The allocator of tests under compute-sanitizer. It adds no cache, so that every tensor has bounds
// of its own. It rounds sizes up to 16 bytes, because kernels read whole vectors: the last vector
// of an unaligned row may end behind the row (csrc/device/cuda/load.h). Such a vector never crosses
// a page.

#include <cuda_runtime.h>

#include <cstddef>

extern "C" void* allocate(std::ptrdiff_t bytes, int, cudaStream_t) {
  constexpr std::ptrdiff_t kVector = 16;
  void* memory = nullptr;
  const std::ptrdiff_t rounded = (bytes + kVector - 1) / kVector * kVector;
  if (cudaMalloc(&memory, rounded) != cudaSuccess) return nullptr;
  // Or initcheck would report the bytes behind the row.
  if (rounded > bytes) cudaMemset(static_cast<char*>(memory) + bytes, 0, rounded - bytes);
  return memory;
}

extern "C" void release(void* memory, std::ptrdiff_t, int, cudaStream_t) { cudaFree(memory); }
