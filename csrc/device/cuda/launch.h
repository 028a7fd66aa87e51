// Launches, and the limits that the current device sets them.

#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "device/cuda/device.h"

namespace klfast::cuda {

inline void check_launch(cudaError_t error) {
  if (error != cudaSuccess) {
    cudaGetLastError();  // told here, not at the next launch
    throw std::runtime_error(std::string("a CUDA kernel did not launch: ") +
                             cudaGetErrorString(error));
  }
}

// The attributes that every kernel of this build has in common, on the current device.
cudaError_t ask_kernel(cudaFuncAttributes& attributes);

// The properties of the current device on which the reading of a row depends.
struct Chip {
  bool has_clusters;  // and this build has code for them
  int64_t shared_of_block;
  int64_t shared_of_processor;
  int processors;
};

Chip this_chip();

// The blocks of a launch.
struct Blocks {
  unsigned count;
  int threads;
  int of_cluster = 1;
  size_t shared = 0;  // bytes of dynamic shared memory, each
};

// A launch in CUDA's own words. It points into itself.
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

// The bytes of static shared memory that a kernel with dynamic shared memory may have.
inline constexpr size_t kStaticShared = 1 << 10;

// Lets a kernel that needs these bytes of dynamic shared memory have as much as the current device
// has. Asked for once, as a limit per launch could be lowered by another thread before the launch.
void grant_shared(const void* kernel, size_t bytes);

// Whether such clusters can ever run on what this process has of the current device: under MIG or
// MPS it may have too few processors that are neighbours. Asked once.
bool can_cluster(const void* kernel, const Blocks& blocks);

template <typename... Parameters>
const void* address_of_kernel(void (*kernel)(Parameters...)) {
  return reinterpret_cast<const void*>(kernel);
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const Blocks& blocks, void* stream,
            const Arguments&... arguments) {
  grant_shared(address_of_kernel(kernel), blocks.shared);
  const Configuration launch(blocks, stream);
  check_launch(cudaLaunchKernelEx(&launch.config, kernel, arguments...));
}

}  // namespace klfast::cuda
