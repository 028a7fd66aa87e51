// The reason why this build cannot run on a machine.

#include "device/cuda/host.h"
#include "device/cuda/launch.h"

namespace klfast::cuda {
namespace {

std::string version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

}  // namespace

std::string problem() {
  cudaFuncAttributes attributes;
  const cudaError_t error = ask_kernel(attributes);
  cudaGetLastError();  // reported here, not at the next launch
  if (error == cudaSuccess) return "";
  int driver = 0;
  cudaDriverGetVersion(&driver);
  return std::string("the CUDA kernels cannot run: ") + cudaGetErrorString(error) +
         " (built with CUDA " + version(CUDART_VERSION) + ", the driver offers " + version(driver) +
         "); build again with a toolkit that fits";
}

}  // namespace klfast::cuda
