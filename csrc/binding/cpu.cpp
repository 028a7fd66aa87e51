// The ops on the CPU.

#include "binding/cpu.h"

#include "binding/rollout_ops.h"

namespace klfast::binding {
namespace {

STABLE_TORCH_LIBRARY_IMPL(klfast, CPU, library) {
  implement<Cpu>(library);
  implement_logits<CpuLogits>(library);
  add<&rollout_correction>(library, "rollout_correction");
}

}  // namespace
}  // namespace klfast::binding
