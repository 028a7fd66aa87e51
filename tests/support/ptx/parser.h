// From the text of a kernel to instructions.

#pragma once

#include "program.h"

namespace ptx {

// Fills in a kernel, of which the name is known. Throws what is not understood, with its line.
void parse_kernel(const Module& module, Kernel& kernel);

}  // namespace ptx
