// Which instructions have run.

#pragma once

#include <string>

namespace ptx {

// A line per kernel: its name, and a 0 or 1 for each instruction. The file's name is `beginning`, a
// dot and the process's number.
void write_coverage(const std::string& beginning);

}  // namespace ptx
