// The CUDA ops on CPU tensors, whose kernels the interpreter runs: torch.ops.klfast_emulated.

#include "binding/cuda.h"
#include "runtime.h"

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

namespace klfast::binding {
namespace {

Tensor last_launch(Tensor like) {
  Tensor numbers = empty({4}, ScalarType::Long, device_of(like));
  ptx::last_launch(static_cast<int64_t*>(numbers.mutable_data_ptr()));
  return numbers;
}

Tensor launches(Tensor like) {
  Tensor number = empty({}, ScalarType::Long, device_of(like));
  *static_cast<int64_t*>(number.mutable_data_ptr()) = ptx::count_of_launches();
  return number;
}

STABLE_TORCH_LIBRARY_IMPL(klfast_emulated, CPU, library) {
  library.impl("last_launch", TORCH_BOX(&last_launch));
  library.impl("launches", TORCH_BOX(&launches));
  implement<Cuda>(library);
  implement_logits<CudaLogits>(library);
}

}  // namespace
}  // namespace klfast::binding
