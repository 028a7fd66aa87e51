// The properties of the current device and of kernels on it. Each is queried once.

#include <map>
#include <mutex>
#include <tuple>

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
          attribute(cudaDevAttrMultiProcessorCount, device)};
}

int this_device() {
  int device = 0;
  check_launch(cudaGetDevice(&device));
  return device;
}

int ask_clusters(const void* kernel, const Blocks& blocks) {
  constexpr int kMostOnAnyChip = 8;
  if (blocks.of_cluster > kMostOnAnyChip) {  // an error means that no such cluster fits
    cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  const Configuration launch(blocks, nullptr);
  int clusters = 0;
  const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config);
  cudaGetLastError();  // clears the error, which means that no cluster fits
  return error == cudaSuccess ? clusters : 0;
}

}  // namespace

cudaError_t ask_kernel(cudaFuncAttributes& attributes) {
  return cudaFuncGetAttributes(&attributes, probe);
}

Chip this_chip() {
  static std::mutex mutex;
  static std::map<int, Chip> known;
  const int device = this_device();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  return found != known.end() ? found->second : known.emplace(device, ask(device)).first->second;
}

int most_clusters(const void* kernel, const Blocks& blocks) {
  using Key = std::tuple<int, const void*, int, int, size_t>;
  static std::mutex mutex;
  static std::map<Key, int> known;
  const Key key = {this_device(), kernel, blocks.of_cluster, blocks.threads, blocks.shared};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key);
  return found != known.end() ? found->second
                              : known.emplace(key, ask_clusters(kernel, blocks)).first->second;
}

}  // namespace klfast::cuda
