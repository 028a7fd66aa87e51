// The direct road: the ops as plain functions of Python, without torch's dispatcher.
//
// For plain tensors in eager mode alone: are_plain says which those are. Tensors are read and made
// through the DLPack exchange table of torch.Tensor (torch 2.10 and later), which accepts negated
// and functional tensors and hands out memory that does not hold their values: hence are_plain.

#pragma once

#include <Python.h>

namespace klfast::direct {

// Adds the functions to the module; false with a Python error set where this torch has no table.
bool add_to(PyObject* module);

}  // namespace klfast::direct
