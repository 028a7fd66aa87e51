// Parses the text of a kernel into instructions.

#pragma once

#include "program.h"

namespace ptx {

// Fills in a kernel whose name is set. Throws unknown text, with its line.
void parse_kernel(const Module& module, Kernel& kernel);

}  // namespace ptx
