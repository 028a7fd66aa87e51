// As much of the CUDA runtime as the kernels' host code uses. Launches go to the interpreter,
// within the limits of a chip; memory is the host's.

#include "runtime.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "chips.h"
#include "coverage.h"
#include "options.h"
#include "warp.h"

namespace ptx {
namespace {

constexpr size_t kSharedWithoutRequest = 48 << 10;
constexpr u32 kMostThreads = 1024;
constexpr u32 kMostOfPortableCluster = 8;
constexpr u32 kMostParameterBytes = 4096;
constexpr size_t kReservedShared = 1024;  // by the system, of each block
constexpr int kCoverageInterval = 500;    // launches between two writings: a process may be killed

// A kernel that the host launches by an address.
struct HostKernel {
  std::string name;
  Kernel* kernel = nullptr;
  bool may_be_large = false;  // its clusters may have more blocks than any chip takes
};
std::map<const void*, HostKernel>& host_kernels() {
  static auto& all = *new std::map<const void*, HostKernel>;
  return all;
}
std::map<const void*, std::string>& host_variables() {
  static auto& all = *new std::map<const void*, std::string>;
  return all;
}

struct PushedCall {
  dim3 blocks, threads;
  size_t shared;
  void* stream;
};
thread_local std::vector<PushedCall> pushed;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_text = "no error";
Shape last_shape;
i64 launches = 0;
std::string folder;

cudaError_t error(cudaError_t code, const std::string& text) {
  last_error = code;
  last_text = text;
  return code;
}

void write_coverage_now() {
  if (!options().coverage.empty()) write_coverage(options().coverage);
}

void load_once() {
  static const bool done = [] {
    load_folder(folder);
    std::atexit(write_coverage_now);
    return true;
  }();
  static_cast<void>(done);
}

HostKernel& host_kernel(const void* function) {
  load_once();
  const auto found = host_kernels().find(function);
  if (found == host_kernels().end()) throw std::runtime_error("no such kernel");
  HostKernel& kernel = found->second;
  if (kernel.kernel == nullptr) kernel.kernel = find_kernel(kernel.name);
  if (kernel.kernel == nullptr) throw std::runtime_error("no PTX of " + kernel.name);
  return kernel;
}

// The first limit that a launch exceeds, or an empty text.
std::string problem_of(HostKernel& host, const Shape& shape) {
  const Chip& here = chip(current_chip());
  const Kernel& kernel = *host.kernel;
  auto exceeds = [](const char* what, size_t asked, size_t most) {
    return asked <= most
               ? std::string()
               : what + (" of " + std::to_string(asked)) + ", at most " + std::to_string(most);
  };
  for (const std::string& problem :
       {exceeds("threads", shape.threads, kMostThreads),
        exceeds("threads", shape.threads,
                kernel.most_threads == 0 ? kMostThreads : kernel.most_threads),
        exceeds("blocks", shape.blocks, 2147483647),
        exceeds("a cluster", shape.of_cluster,
                host.may_be_large ? here.most_of_cluster
                                  : std::min(here.most_of_cluster, kMostOfPortableCluster)),
        exceeds("shared memory", shape.dynamic_shared + kernel.static_shared,
                kSharedWithoutRequest),
        exceeds("parameters", kernel.parameter_bytes, kMostParameterBytes)}) {
    if (!problem.empty()) return problem;
  }
  if (shape.blocks == 0 || shape.threads == 0) return "no blocks, or no threads";
  if (shape.threads % kLanes != 0) return "threads that are no whole warps";
  if (shape.blocks % shape.of_cluster != 0) return "blocks that are no whole clusters";
  return "";
}

std::string placed(const Kernel& kernel, void** arguments) {
  std::string bytes(kernel.parameter_bytes, '\0');
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const Parameter& parameter = kernel.parameters[i];
    bytes.replace(parameter.offset, parameter.size, static_cast<const char*>(arguments[i]),
                  parameter.size);
  }
  return bytes;
}

cudaError_t launch(const void* function, const Shape& shape, void** arguments) {
  last_shape = shape;
  if (++launches % kCoverageInterval == 0) write_coverage_now();
  try {
    HostKernel& host = host_kernel(function);
    const std::string problem = problem_of(host, shape);
    if (!problem.empty()) {
      return error(cudaErrorInvalidValue, "the launch of " + host.name + " asks for " + problem);
    }
    const std::string parameters = placed(*host.kernel, arguments);
    run(*host.kernel, shape, reinterpret_cast<const u8*>(parameters.data()));
    return cudaSuccess;
  } catch (const std::exception& failure) {
    return error(cudaErrorLaunchFailure, failure.what());
  }
}

u32 cluster_of(const cudaLaunchConfig_t* config) {
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) return attribute.val.clusterDim.x;
  }
  return 1;
}

Shape shape_of(const cudaLaunchConfig_t* config) {
  return {config->gridDim.x, config->blockDim.x, cluster_of(config), config->dynamicSmemBytes};
}

}  // namespace

void set_folder(const std::string& path) { folder = path; }

void last_launch(i64* to) {
  to[0] = last_shape.blocks;
  to[1] = last_shape.threads;
  to[2] = last_shape.of_cluster;
  to[3] = static_cast<i64>(last_shape.dynamic_shared);
}
i64 count_of_launches() { return launches; }

}  // namespace ptx

using ptx::chip;
using ptx::current_chip;
using ptx::error;
using ptx::host_kernel;

extern "C" {

// Functions that nvcc's code calls when a module is loaded.
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  ptx::host_kernels()[host].name = name;
}
void __cudaRegisterVar(void**, char* host, char*, const char* name, int, size_t, int, int) {
  ptx::host_variables()[host] = name;
}

// And at a launch written <<<...>>>.
unsigned __cudaPushCallConfiguration(dim3 blocks, dim3 threads, size_t shared, void* stream) {
  ptx::pushed.push_back({blocks, threads, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* blocks, dim3* threads, size_t* shared, void* stream) {
  const ptx::PushedCall call = ptx::pushed.back();
  ptx::pushed.pop_back();
  *blocks = call.blocks;
  *threads = call.threads;
  *shared = call.shared;
  *static_cast<void**>(stream) = call.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 blocks, dim3 threads, void** arguments,
                               size_t shared, cudaStream_t) {
  return ptx::launch(kernel, {blocks.x, threads.x, 1, shared}, arguments);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 blocks, dim3 threads, void** arguments,
                             size_t shared, cudaStream_t) {
  return ptx::launch(function, {blocks.x, threads.x, 1, shared}, arguments);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  return ptx::launch(function, ptx::shape_of(config), arguments);
}

cudaError_t cudaGetLastError() { return std::exchange(ptx::last_error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t) { return ptx::last_text.c_str(); }

cudaError_t cudaGetDevice(int* device) {
  *device = current_chip();
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  const ptx::Chip& here = chip(device);
  switch (which) {
    case cudaDevAttrClusterLaunch:
      *value = here.has_clusters;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = static_cast<int>(here.processors);
      return cudaSuccess;
    default:
      return error(cudaErrorInvalidValue, "an attribute that the interpreter's chips lack");
  }
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  *attributes = {};
  attributes->ptxVersion = attributes->binaryVersion = ptx::options().arch;
  attributes->sharedSizeBytes = host_kernel(function).kernel->static_shared;
  attributes->maxThreadsPerBlock = ptx::kMostThreads;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute which, int value) {
  if (which != cudaFuncAttributeNonPortableClusterSizeAllowed) {
    return error(cudaErrorInvalidValue, "an attribute that the interpreter's kernels lack");
  }
  host_kernel(function).may_be_large = value != 0;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* function,
                                           const cudaLaunchConfig_t* config) {
  const ptx::Chip& here = chip(current_chip());
  const ptx::Shape shape = ptx::shape_of(config);
  *clusters = 0;
  if (!here.has_clusters || shape.of_cluster > here.most_of_cluster) return cudaSuccess;
  const std::string problem = ptx::problem_of(host_kernel(function), shape);
  if (!problem.empty()) return error(cudaErrorInvalidValue, problem);
  const size_t shared = shape.dynamic_shared + ptx::kReservedShared;
  const auto blocks = std::min(here.shared_of_processor / static_cast<ptx::u32>(shared),
                               here.threads_of_processor / shape.threads);
  // A chip with one processor, such as the emulator's, runs a cluster too.
  *clusters = static_cast<int>(
      std::max(blocks * here.processors / shape.of_cluster, here.processors == 1 ? 1u : 0u));
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  ptx::load_once();
  const auto found = ptx::host_variables().find(symbol);
  *address = found == ptx::host_variables().end() ? nullptr : ptx::find_variable(found->second);
  return *address != nullptr ? cudaSuccess : error(cudaErrorInvalidSymbol, "no such variable");
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<uintptr_t>(stream);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t) {
  ++ptx::launches;
  std::memset(to, value, size);
  return cudaSuccess;
}
}
