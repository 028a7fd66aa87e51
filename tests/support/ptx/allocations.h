// The memory that a kernel may touch: tensors, and the variables of modules.

#pragma once

#include "types.h"

namespace ptx {

struct Range {
  u64 begin = 0, end = 0;
};

void add_allocation(const void* address, u64 size);
void remove_allocation(const void* address);
// The allocation that holds an address, or that begins or ends within the same 16 bytes; empty if
// there is none. Loads may take whole vectors where an allocation begins or ends.
Range allocation_around(u64 address);

}  // namespace ptx
