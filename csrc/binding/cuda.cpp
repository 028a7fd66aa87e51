// The ops on NVIDIA GPUs.

#include "binding/cuda.h"

namespace klfast::binding {
namespace {

STABLE_TORCH_LIBRARY_IMPL(klfast, CUDA, library) {
  implement<Cuda>(library);
  implement_logits<CudaLogits>(library);
}

}  // namespace
}  // namespace klfast::binding
