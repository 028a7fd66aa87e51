// The CUDA runtime that the kernels' host code is linked with, seen from outside.

#pragma once

#include <string>

#include "types.h"

namespace ptx {

// Loads the PTX of the kernels, once, before the first launch.
void set_folder(const std::string& folder);

// Of the last kernel: blocks, threads of each, blocks of a cluster, bytes of dynamic shared memory.
void last_launch(i64* to);
// How many kernels and memsets have been launched since the process began.
i64 count_of_launches();

}  // namespace ptx
