// The CUDA ops on CPU tensors: torch.ops.klfast_emulated.

#include "../../csrc/cuda/ops.cpp"

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

namespace klfast::rim {
namespace {

STABLE_TORCH_LIBRARY(klfast_emulated, library) { define(library); }
STABLE_TORCH_LIBRARY_IMPL(klfast_emulated, CPU, library) { implement<Cuda>(library); }

}  // namespace
}  // namespace klfast::rim
