// Finds accesses to memory that are not ordered. bar.sync orders a block's threads. bar.warp.sync
// of all lanes orders a warp's threads. A cluster's barrier orders the threads that arrived at it
// and waited for it. A fence and an atomic order a block's writes before the accesses that another
// block makes after its own atomic and fence. An exchange of all lanes orders their reads before
// their later writes, because the exchanged values have been read. It orders nothing else. A
// barrier in shared memory orders the bulk copies of a phase before the threads that have waited
// for it.

#pragma once

#include "warp.h"

namespace ptx {

// Notes an access to shared memory, and fails if it races. `same` is true for a store that changes
// nothing.
void note_shared(Block& owner, Warp& warp, const Instruction& in, u32 lane, u64 address, u32 size,
                 bool writes, bool same);
// A bulk copy to [address, address + size) is requested. It writes after a thread's stores there
// only if that thread has done a fence between its stores and copies.
void check_stores_before_copy(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 size);
// Notes after note_shared() that the bytes come in this phase of a barrier. A thread may use them
// if it has waited for the phase, or follows a thread that has.
void note_bulk_copy(Block& owner, u64 address, u32 size, const CopyBarrier& barrier);
// The time of a lane's next access.
Stamp stamp_of(const Warp& warp, u32 lane);
void note_global(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 size, bool writes,
                 bool same);

// Notes an atomic or a fence of one lane, to order it with other blocks.
void note_fence(Warp& warp, u32 lanes);
void note_atomic(Warp& warp, u32 lane);

}  // namespace ptx
