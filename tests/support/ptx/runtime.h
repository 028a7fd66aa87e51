// The CUDA runtime that the kernels' host code is linked with, seen from outside.

#pragma once

#include <string>

#include "types.h"

namespace ptx {

// Loads the PTX of the kernels, once, before the first launch.
void set_folder(const std::string& folder);

// Blocks, threads per block, blocks per cluster and dynamic shared bytes of the last kernel.
void last_launch(i64* to);
// How many kernels and memsets have been launched since the process began.
i64 count_of_launches();

}  // namespace ptx
