// An NVIDIA GPU as a device of the ops. Kernels run on torch's current stream, in memory of torch's
// allocator. Nothing here reads on the host what a tensor holds.

#pragma once

#include <torch/csrc/stable/accelerator.h>

#include "binding/logits_ops.h"
#include "binding/penalty_ops.h"
#include "logits/cuda.h"
#include "penalty/cuda.h"

// torch defines this function only if it was built with CUDA. It is null otherwise, and then no op
// here is called.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream)
    __attribute__((weak));

namespace klfast::binding {

#ifdef KLFAST_EMULATE_CUDA  // tests/support/emulator: there is no device to choose
struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};
#else
using torch::stable::accelerator::DeviceGuard;
#endif

inline void* current_stream(const Device& device) {
  KLFAST_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA streams");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream));
  return stream;
}

// A launch on torch's current stream, and its memory. The memory is freed when the call returns,
// because later work on the stream runs after the launch.
struct Workspace {
  cuda::Launch launch;
  OptionalTensor partials, counter;

  Workspace(int64_t doubles, const Device& device) {
    launch.stream = current_stream(device);
    if (doubles == 0) return;
    partials = empty({doubles}, ScalarType::Double, device);
    launch.partials = static_cast<double*>(partials->mutable_data_ptr());
    // A stream's counter is 0 after every launch, which saves the launch that would zero one.
    launch.arrivals = cuda::arrivals_of_stream(device.index, launch.stream);
    if (launch.arrivals != nullptr) return;
    counter = empty({1}, ScalarType::Int, device);
    launch.arrivals = static_cast<unsigned*>(counter->mutable_data_ptr());
    cuda::zero(launch.arrivals, launch.stream);
  }
};

// The ops over log-probs on a GPU.
struct Cuda {
  static constexpr bool kGradientsReadWeights = true;  // an earlier kernel stores the weights there
  static void forward(const KlPenaltyInputs& in, const KlPenaltyForward& out,
                      const Device& device) {
    check_numbers(in);
    const DeviceGuard guard(device.index);
    const Workspace workspace(cuda::partials_needed(in, out), device);
    cuda::kl_penalty_forward(in, out, workspace.launch);
  }

  static void backward(const KlPenaltyInputs& in, const KlPenaltyBackward& out,
                       const Device& device) {
    check_numbers(in);
    const DeviceGuard guard(device.index);
    const Workspace workspace(0, device);
    cuda::kl_penalty_backward(in, out, workspace.launch);
  }

  static void token_weights(const KlPenaltyInputs& in, void* weights, const Device& device) {
    check_numbers(in);
    const DeviceGuard guard(device.index);
    const Workspace workspace(cuda::doubles_for_token_weights(in), device);
    cuda::token_weights(in, weights, workspace.launch);
  }

  static void scale(const Output& x, int64_t n, const View& factor, const Device& device) {
    const DeviceGuard guard(device.index);
    const Workspace workspace(0, device);
    cuda::scale(x, n, factor, workspace.launch);
  }
};

// The ops over logits on a GPU.
struct CudaLogits {
  template <typename Call>
  static void run(const Call& call, const Device& device) {
    const DeviceGuard guard(device.index);
    cuda::run_rows(call, current_stream(device));
  }
};

}  // namespace klfast::binding
