// Finds the bytes of an access to memory, and checks that the access is allowed.

#pragma once

#include <string>

#include "warp.h"

namespace ptx {

enum class Access : u8 { kRead, kWrite, kAtomic };

u64 address_of_lane(Warp& warp, const Address& address, u32 lane);

// The bytes of one lane's access, and a flag for each byte that says whether it was written. The
// flags are null if all bytes count as written. An invalid access or a race ends the launch.
struct Place {
  u8* bytes;
  u8* written;
  bool is_global;
};
Place place_of(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 size, Access access);

// Sets the bytes that a store is about to write: lanes that store the same bytes do not race.
void set_stored(const u8* bytes);

// Forgets all allocations, because they may have changed since the last launch.
void forget_allocations();

std::string name_of_thread(const Warp& warp, u32 lane);

}  // namespace ptx
