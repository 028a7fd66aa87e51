#include "coverage.h"

#include <unistd.h>

#include <fstream>

#include "program.h"

namespace ptx {

void write_coverage(const std::string& beginning) {
  std::ofstream file(beginning + "." + std::to_string(getpid()));
  for (const Kernel* kernel : parsed_kernels()) {
    std::string digits;
    for (const u8 has_run : kernel->has_run) digits += has_run != 0 ? '1' : '0';
    file << kernel->name << ' ' << digits << '\n';
  }
}

}  // namespace ptx
