// Python bindings: the interpreter's functions that tests call.

#include <pybind11/pybind11.h>

#include "allocations.h"
#include "runtime.h"
#include "torch_memory.h"
#include "warp.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("set_folder", &ptx::set_folder);
  module.def("watch_torch", &ptx::watch_torch);
  module.def("count_of_instructions", &ptx::count_of_instructions);
  // Memory of tensors that torch has not allocated.
  module.def("add_allocation", [](uint64_t address, uint64_t size) {
    ptx::add_allocation(reinterpret_cast<const void*>(address), size);
  });
  module.def("remove_allocation", [](uint64_t address) {
    ptx::remove_allocation(reinterpret_cast<const void*>(address));
  });
}
