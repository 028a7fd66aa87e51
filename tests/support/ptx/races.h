// Whether accesses to memory are ordered. bar.sync orders a block's threads, bar.warp.sync of all
// lanes a warp's, a cluster's barrier those that arrived before it and waited for it; a fence and
// an atomic order a block's writes before what another does after its atomic and a fence. An
// exchange of all lanes orders what they read before what they write after it, as what is exchanged
// has been read by then, and nothing else.

#pragma once

#include "warp.h"

namespace ptx {

// Notes an access to shared memory, and fails where it races. `same`: a store of what is there.
void note_shared(Block& owner, Warp& warp, const Instruction& in, u32 lane, u64 address, u32 size,
                 bool writes, bool same);
void note_global(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 size, bool writes,
                 bool same);

// An atomic and a fence of one lane, that meet those of other blocks.
void note_fence(Warp& warp, u32 lanes);
void note_atomic(Warp& warp, u32 lane);

}  // namespace ptx
