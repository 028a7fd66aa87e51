// The direct road: the ops as plain functions of Python, without torch's dispatcher, for tensors
// and modes that py_tensor.h calls plain.

#pragma once

#include <Python.h>

namespace klfast::direct {

// Adds the functions to the module; false with a Python error set where torch has no exchange
// table.
bool add_to(PyObject* module);

}  // namespace klfast::direct
