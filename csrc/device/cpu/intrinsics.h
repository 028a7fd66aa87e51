// The intrinsics of x86, without the warnings that GCC 12 gives for its own header: the header
// leaves values undefined on purpose.

#pragma once

#include "math/host_device.h"

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
