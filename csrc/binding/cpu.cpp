// The ops on the CPU.

#include "binding/cpu.h"

namespace klfast::binding {
namespace {

STABLE_TORCH_LIBRARY_IMPL(klfast, CPU, library) {
  implement<Cpu>(library);
  implement_logits<CpuLogits>(library);
  implement_rollout<CpuRollout>(library);
}

}  // namespace
}  // namespace klfast::binding
