#include "chips.h"

#include <cstdlib>
#include <iterator>
#include <stdexcept>

#include "options.h"

namespace ptx {
namespace {

constexpr u32 kKilobyte = 1 << 10;

const Chip kChips[] = {
    {"h200", 16, true, 228 * kKilobyte, 132, 2048},
    {"h100", 16, true, 228 * kKilobyte, 114, 2048},
    {"b200", 16, true, 228 * kKilobyte, 148, 2048},
    {"rtx5090", 8, true, 100 * kKilobyte, 170, 1536},
    {"a100", 1, false, 164 * kKilobyte, 108, 2048},
    {"l4", 1, false, 100 * kKilobyte, 58, 1536},
    // An instance of a chip with clusters, too small for any.
    {"mig", 1, true, 228 * kKilobyte, 16, 2048},
    // Those of tests/support/emulator.
    {"hopper", 16, true, 228 * kKilobyte, 1, 2048},
    {"ampere", 1, false, 164 * kKilobyte, 1, 2048},
    {"small", 8, true, 16 * kKilobyte, 1, 2048},
    {"slice", 2, true, 228 * kKilobyte, 1, 2048},
};

}  // namespace

int current_chip() {
  const char* const named = std::getenv("KLFAST_EMULATED_CHIP");
  const std::string name = named != nullptr ? named : options().chip;
  for (size_t i = 0; i < std::size(kChips); ++i) {
    if (name == kChips[i].name) return static_cast<int>(i);
  }
  throw std::runtime_error("no such chip: " + name);
}

const Chip& chip(int index) { return kChips[index]; }

}  // namespace ptx
