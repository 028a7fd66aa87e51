// The properties of the current device, asked once.

#include <mutex>
#include <unordered_map>

#include "device/cuda/launch.h"

namespace klfast::cuda {
namespace {

// An empty kernel, compiled for the same architectures as all others.
__global__ void probe() {}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check_launch(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

Chip ask(int device) {
  // PTX of an older architecture runs on a chip with clusters, but cannot use them.
  cudaFuncAttributes compiled;
  check_launch(ask_kernel(compiled));
  return {attribute(cudaDevAttrClusterLaunch, device) != 0 && compiled.ptxVersion >= 90,
          attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
          attribute(cudaDevAttrMultiProcessorCount, device)};
}

}  // namespace

cudaError_t ask_kernel(cudaFuncAttributes& attributes) {
  return cudaFuncGetAttributes(&attributes, probe);
}

Chip this_chip() {
  static std::mutex mutex;
  static std::unordered_map<int, Chip> known;
  int device = 0;
  check_launch(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  return found != known.end() ? found->second : known.emplace(device, ask(device)).first->second;
}

}  // namespace klfast::cuda
