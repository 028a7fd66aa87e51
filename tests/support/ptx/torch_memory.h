// The memory of torch's tensors, as the interpreter must know it.

#pragma once

namespace ptx {

// From now on, what torch allocates on the CPU is what kernels may touch.
void watch_torch();

}  // namespace ptx
