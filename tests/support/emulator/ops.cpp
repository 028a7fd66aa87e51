// The CUDA ops on CPU tensors: torch.ops.klfast_emulated.

#include "binding/cuda.h"
#include "cuda_emulator.h"

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

namespace klfast::binding {
namespace {

// Blocks, threads per block, blocks per cluster and bytes of dynamic shared memory of the last
// kernel.
Tensor last_launch(Tensor like) {
  const cuda_emulator::Launch& launch = cuda_emulator::last_launch;
  Tensor numbers = empty({4}, ScalarType::Long, device_of(like));
  auto* const to = static_cast<int64_t*>(numbers.mutable_data_ptr());
  to[0] = launch.blocks;
  to[1] = launch.threads;
  to[2] = launch.of_cluster;
  to[3] = static_cast<int64_t>(launch.shared);
  return numbers;
}

// How many kernels and memsets have been launched since the process began.
Tensor launches(Tensor like) {
  Tensor number = empty({}, ScalarType::Long, device_of(like));
  *static_cast<int64_t*>(number.mutable_data_ptr()) = cuda_emulator::launches;
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
