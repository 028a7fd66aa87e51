// klfast._C says what this build contains. Importing it implements the ops of
// klfast/ops/schemas.py.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "binding/penalty_ops.h"
#include "binding/places.h"
#include "device/cpu/parallel.h"
#include "formulas/divergences.h"
#include "formulas/estimators.h"
#include "formulas/rollout.h"
#include "formulas/statistics.h"
#include "rollout/statistics.h"
#ifdef KLFAST_CUDA
#include "penalty/cuda.h"
// binding/cuda.h explains this declaration.
extern "C" int aoti_torch_get_current_cuda_stream(int32_t device, void** stream)
    __attribute__((weak));
#endif

namespace py = pybind11;

namespace {

std::string cuda_problem() {
#ifdef KLFAST_CUDA
  if (aoti_torch_get_current_cuda_stream == nullptr) return "this torch has no CUDA streams";
  return klfast::cuda::problem();
#else
  return "the extension was built without CUDA kernels; set CUDA_HOME to a CUDA toolkit and build "
         "it again";
#endif
}

// klfast/ops/load.py compares these tables with Python's.
py::dict tables() {
  py::dict tables;
  tables["estimators"] = names_of(klfast::estimators::EstimatorTable());
  tables["divergences"] = names_of(klfast::divergences::DivergenceTable());
  tables["statistics"] = names_of(klfast::statistics::StatisticTable());
  tables["rollout statistics"] = klfast::rollout::kRolloutStatistics;
  tables["statistics of rules"] = klfast::rollout::RuleTable::kSize;
  tables["choices"] = int{klfast::binding::PenaltyChoice::kCount};
  tables["numbers"] = int{klfast::binding::PenaltyNumber::kCount};
  tables["rollout choices"] = int{klfast::binding::RolloutChoice::kCount};
  tables["rollout numbers"] = int{klfast::binding::RolloutNumber::kCount};
  tables["choices of a rule"] = int{klfast::binding::RuleChoice::kCount};
  tables["bounds of a rule"] = int{klfast::binding::RuleBound::kCount};
  tables["arguments of ops"] = klfast::binding::arities();
  return tables;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Compiled kernels of klfast; importing registers torch.ops.klfast.";
  module.attr("TABLES") = tables();
  module.def("cuda_problem", &cuda_problem,
             "Why the CUDA kernels cannot run on the current device; empty if they can.");
  module.def("instruction_set", &klfast::cpu::instruction_set,
             "The instruction set that the CPU kernels use here; KLFAST_CPU limits it.");
}
