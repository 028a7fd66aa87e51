// Bulk copies into shared memory, on chips of compute capability 9.0 and later. Kernels for older
// chips must not call these functions.
//
// A barrier in shared memory counts the bytes of copies. A phase of it ends after one expect() and
// when the expected bytes have come. The first phase has parity 0, the next one 1, and so on.
//
//   init_barrier     is run by one thread. Others may use the barrier after a barrier of theirs.
//   is_elected       is true in one lane of a warp. All lanes call it.
//   start_copy       copies whole vectors of 16 bytes, all aligned. No thread may still read the
//                    target, and only copies have written it.
//   wait_for_copies  returns after the end of the phase with this parity.

#pragma once

#include "device/cuda/device.h"

namespace klfast::cuda {

using CopyBarrier = uint64_t;

#ifdef KLFAST_EMULATE_CUDA
using cuda_emulator::expect;
using cuda_emulator::init_barrier;
using cuda_emulator::is_elected;
using cuda_emulator::start_copy;
using cuda_emulator::wait_for_copies;
#else
__device__ __forceinline__ unsigned in_shared(const void* place) {
  return static_cast<unsigned>(__cvta_generic_to_shared(place));
}

__device__ __forceinline__ void init_barrier(CopyBarrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(in_shared(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ bool is_elected() {
  unsigned elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, -1;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

__device__ __forceinline__ void expect(CopyBarrier* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_shared(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void start_copy(void* to, const void* from, unsigned bytes,
                                           CopyBarrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(in_shared(to)),
      "l"(from), "r"(bytes), "r"(in_shared(barrier))
      : "memory");
}

__device__ __forceinline__ void wait_for_copies(CopyBarrier* barrier, unsigned parity) {
  unsigned has_ended;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(has_ended)
        : "r"(in_shared(barrier)), "r"(parity)
        : "memory");
  } while (has_ended == 0);
}
#endif

}  // namespace klfast::cuda
