// Where an access to memory goes, and whether it may.

#pragma once

#include <string>

#include "warp.h"

namespace ptx {

enum class Access : u8 { kRead, kWrite, kAtomic };

u64 address_of_lane(Warp& warp, const Address& address, u32 lane);

// The bytes of one lane's access, and whether each has been written: null where all count as
// written. Fails where the access is wrong, and where it races with another.
struct Place {
  u8* bytes;
  u8* written;
  bool is_global;
};
Place place_of(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 size, Access access);

// What a store is about to write, so that lanes which store the same are no race.
void set_stored(const u8* bytes);

// Forgets what is known of allocations, which may have changed since the last launch.
void forget_allocations();

std::string name_of_thread(const Warp& warp, u32 lane);

}  // namespace ptx
