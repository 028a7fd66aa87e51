// Names of machine types, and the generic addresses of a thread.

#pragma once

#include <cstdint>
#include <cstring>

namespace ptx {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;
using f32 = float;
using f64 = double;

constexpr u32 kLanes = 32;
constexpr u32 kAllLanes = ~u32{0};
constexpr u32 kNone = ~u32{0};

// Global memory is the host's, under the host's addresses, whose top byte is 0. In other generic
// addresses the top byte names the window. Shared memory has a block's rank above 32 bits.
constexpr u64 kSharedWindow = u64{1} << 56;
constexpr u64 kLocalWindow = u64{2} << 56;
constexpr u64 kParameterWindow = u64{3} << 56;  // of a kernel
constexpr u64 kArgumentWindow = u64{4} << 56;   // of a function that a kernel calls
constexpr u64 kWindowMask = u64{0xff} << 56;
constexpr u32 kSharedBase = 1024;  // as on sm_90, where the system has the first bytes

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline u64 round_up(u64 number, u64 to) { return (number + to - 1) / to * to; }

}  // namespace ptx
