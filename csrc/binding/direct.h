// The direct road: the ops as plain functions of Python, without torch's dispatcher, for tensors
// and modes that py_tensor.h calls plain.

#pragma once

#include <Python.h>

#include <cstddef>
#include <map>
#include <string>

namespace klfast::direct {

// Adds the functions to the module; false with a Python error set if torch lacks what they need.
bool add_to(PyObject* module);

// How many arguments each op takes, by its name.
const std::map<std::string, std::size_t>& arities();

}  // namespace klfast::direct
