// The choice of the kernels' copy for this processor.

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "device/cpu/parallel.h"
#include "logits/cpu_kernel.h"
#include "penalty/cpu_kernel.h"
#include "rollout/cpu_kernel.h"

namespace klfast::cpu {

extern const Kernels kernels_baseline;
extern const LogitsKernels logits_kernels_baseline;
extern const RolloutKernels rollout_kernels_baseline;
#ifdef KLFAST_X86
extern const Kernels kernels_avx2;
extern const LogitsKernels logits_kernels_avx2;
extern const RolloutKernels rollout_kernels_avx2;
extern const Kernels kernels_avx512;
extern const LogitsKernels logits_kernels_avx512;
extern const RolloutKernels rollout_kernels_avx512;
#endif

namespace {

struct Choice {
  const char* instruction_set;
  const Kernels& kernels;
  const LogitsKernels& logits_kernels;
  const RolloutKernels& rollout_kernels;
};

Choice best() {
  const char* asked = std::getenv("KLFAST_CPU");
  const std::string limit = asked == nullptr ? "" : asked;
  if (limit != "" && limit != "baseline" && limit != "avx2" && limit != "avx512") {
    throw std::runtime_error("KLFAST_CPU must be 'baseline', 'avx2' or 'avx512', got '" + limit +
                             "'");
  }
  bool avx2 = false;
  bool avx512 = false;
#ifdef KLFAST_X86
  __builtin_cpu_init();
  avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");
  avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
#endif
  if ((limit == "avx512" && !avx512) || (limit == "avx2" && !avx2)) {
    throw std::runtime_error("KLFAST_CPU asks for '" + limit +
                             "', which this processor does not have");
  }
#ifdef KLFAST_X86
  if (avx512 && (limit == "" || limit == "avx512")) {
    return {"avx512", kernels_avx512, logits_kernels_avx512, rollout_kernels_avx512};
  }
  if (avx2 && limit != "baseline") {
    return {"avx2", kernels_avx2, logits_kernels_avx2, rollout_kernels_avx2};
  }
#endif
  return {"baseline", kernels_baseline, logits_kernels_baseline, rollout_kernels_baseline};
}

const Choice& chosen() {
  static const Choice choice = best();
  return choice;
}

}  // namespace

const Kernels& kernels() { return chosen().kernels; }
const LogitsKernels& logits_kernels() { return chosen().logits_kernels; }
const RolloutKernels& rollout_kernels() { return chosen().rollout_kernels; }
const char* instruction_set() { return chosen().instruction_set; }

}  // namespace klfast::cpu
