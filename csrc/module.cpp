// klfast._C: what was built. Importing it registers the ops of ops.cpp.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "cpu/kl_penalty.h"
#include "estimators.h"
#ifdef KLFAST_CUDA
#include "cuda/kl_penalty.h"
#endif

namespace py = pybind11;

namespace {

std::string cuda_problem([[maybe_unused]] int device) {
#ifdef KLFAST_CUDA
  return klfast::cuda::problem(device);
#else
  return "the extension was built without CUDA kernels; set CUDA_HOME to a CUDA toolkit and build "
         "it again";
#endif
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Compiled kernels of klfast; importing registers torch.ops.klfast.";
  module.def(
      "estimator_names",
      [] {
        return std::vector<std::string>(std::begin(klfast::estimators::kNames),
                                        std::end(klfast::estimators::kNames));
      },
      "Names of the estimators that the kernels know.");
  module.def("cuda_problem", &cuda_problem, py::arg("device"),
             "Why the CUDA kernels cannot run on a device; empty if they can.");
  module.def("instruction_set", &klfast::cpu::instruction_set,
             "The instruction set that the CPU kernels use here; KLFAST_CPU limits it.");
}
