// Which copy of the kernels serves this processor.

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kl_penalty.h"
#include "kl_penalty_kernel.h"

namespace klfast::cpu {

extern const Kernels kernels_baseline;
#ifdef KLFAST_X86
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

namespace {

const Kernels& best() {
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
  if (avx512 && (limit == "" || limit == "avx512")) return kernels_avx512;
  if (avx2 && limit != "baseline") return kernels_avx2;
#endif
  return kernels_baseline;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = best();
  return chosen;
}

const char* instruction_set() { return kernels().instruction_set; }

}  // namespace klfast::cpu
