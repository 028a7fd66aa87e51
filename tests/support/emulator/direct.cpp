// The direct road to the emulated ops: the functions of the module that is built of this folder.

#include "binding/direct.cpp"

#include <pybind11/pybind11.h>

#include "binding/py_tensor.cpp"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  if (!klfast::direct::add_to(module.ptr())) throw pybind11::error_already_set();
}
