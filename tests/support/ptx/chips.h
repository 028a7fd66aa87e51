// The chips whose limits a launch can have.

#pragma once

#include "types.h"

namespace ptx {

struct Chip {
  const char* name;
  u32 most_of_cluster;  // blocks; 1 if no larger cluster fits
  bool has_clusters;
  u32 shared_of_processor;  // bytes
  u32 processors;
  u32 threads_of_processor;
};

// KLFAST_EMULATED_CHIP, as the emulator has it, or else KLFAST_PTX_CHIP names it: its position.
int current_chip();
const Chip& chip(int index);

}  // namespace ptx
