// Chooses the copy of the kernels for this processor.

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
#ifdef KLFAST_HAS_AVX2
extern const Kernels kernels_avx2;
extern const LogitsKernels logits_kernels_avx2;
extern const RolloutKernels rollout_kernels_avx2;
#endif
#ifdef KLFAST_HAS_AVX512
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

// The instruction sets of this build, best first.
const Choice kChoices[] = {
#ifdef KLFAST_HAS_AVX512
    {"avx512", kernels_avx512, logits_kernels_avx512, rollout_kernels_avx512},
#endif
#ifdef KLFAST_HAS_AVX2
    {"avx2", kernels_avx2, logits_kernels_avx2, rollout_kernels_avx2},
#endif
    {"baseline", kernels_baseline, logits_kernels_baseline, rollout_kernels_baseline},
};

bool processor_has(const std::string& name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi2");
  if (name == "avx2") return has_avx2;
  if (name == "avx512") {
    return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  }
#endif
  return name == "baseline";
}

const Choice& best() {
  const char* variable = std::getenv("KLFAST_CPU");
  const std::string asked = variable == nullptr ? "" : variable;
  if (asked != "" && asked != "baseline" && asked != "avx2" && asked != "avx512") {
    throw std::runtime_error("KLFAST_CPU must be 'baseline', 'avx2' or 'avx512', got '" + asked +
                             "'");
  }
  if (asked != "" && !processor_has(asked)) {
    throw std::runtime_error("KLFAST_CPU asks for '" + asked +
                             "', which this processor does not have");
  }
  for (const Choice& choice : kChoices) {
    const std::string name = choice.instruction_set;
    if (asked == "" ? processor_has(name) : name == asked) return choice;
  }
  throw std::runtime_error("KLFAST_CPU asks for '" + asked +
                           "', which this build does not have: build klfast again with "
                           "KLFAST_INSTRUCTION_SETS=all");
}

const Choice& chosen() {
  static const Choice& choice = best();
  return choice;
}

}  // namespace

const Kernels& kernels() { return chosen().kernels; }
const LogitsKernels& logits_kernels() { return chosen().logits_kernels; }
const RolloutKernels& rollout_kernels() { return chosen().rollout_kernels; }
const char* instruction_set() { return chosen().instruction_set; }

}  // namespace klfast::cpu
