// The memory of torch's tensors, as the interpreter must know it.

#pragma once

namespace ptx {

// Lets kernels touch torch's later allocations on the CPU.
void watch_torch();

}  // namespace ptx
