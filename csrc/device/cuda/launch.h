// Launches, and the limits that the current device sets for them.

#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "device/cuda/device.h"

namespace klfast::cuda {

inline void check_launch(cudaError_t error) {
  if (error != cudaSuccess) {
    cudaGetLastError();  // reported here, not at the next launch
    throw std::runtime_error(std::string("a CUDA kernel did not launch: ") +
                             cudaGetErrorString(error));
  }
}

// The attributes that all kernels of this build share on the current device.
cudaError_t ask_kernel(cudaFuncAttributes& attributes);

// The properties of the current device that decide how a row is read.
struct Chip {
  bool has_clusters;  // the chip has clusters, and this build has code for them
  int processors;
};

Chip this_chip();

// The bytes of shared memory, static and dynamic, that any kernel may have without a request.
inline constexpr int64_t kMostShared = 48 << 10;

// The blocks of a launch.
struct Blocks {
  unsigned count;
  int threads;
  int of_cluster = 1;
  size_t shared = 0;  // bytes of dynamic shared memory of each
};

// A launch as CUDA describes it. It points into itself.
struct Configuration {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute cluster = {};

  Configuration(const Blocks& blocks, void* stream) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(blocks.of_cluster);
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
    config.gridDim = dim3(blocks.count);
    config.blockDim = dim3(static_cast<unsigned>(blocks.threads));
    config.dynamicSmemBytes = blocks.shared;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &cluster;
    config.numAttrs = blocks.of_cluster > 1 ? 1 : 0;
  }
  Configuration(const Configuration&) = delete;
  Configuration& operator=(const Configuration&) = delete;
};

// How many such clusters can run at once on the current device. A process under MIG or MPS may have
// too few neighbouring processors for any. The answer is queried once. More than eight blocks are
// allowed by this query, so it must come before their launch.
int most_clusters(const void* kernel, const Blocks& blocks);

template <typename... Parameters>
const void* address_of_kernel(void (*kernel)(Parameters...)) {
  return reinterpret_cast<const void*>(kernel);
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const Blocks& blocks, void* stream,
            const Arguments&... arguments) {
  const Configuration launch(blocks, stream);
  check_launch(cudaLaunchKernelEx(&launch.config, kernel, arguments...));
}

}  // namespace klfast::cuda
