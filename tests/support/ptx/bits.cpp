// Bits: logic, shifts, fields, bytes.

#include <algorithm>
#include <type_traits>

#include "table.h"

namespace ptx {
namespace {

template <typename T>
constexpr u32 kBits = 8 * sizeof(T);

template <typename T>
T and_bits(T a, T b) {
  return static_cast<T>(a & b);
}
template <typename T>
T or_bits(T a, T b) {
  return static_cast<T>(a | b);
}
template <typename T>
T xor_bits(T a, T b) {
  return static_cast<T>(a ^ b);
}
template <typename T>
T not_bits(T a) {
  return static_cast<T>(~a);
}

// A shift by more bits than there are leaves zeros, or copies of the sign.
template <typename T>
T shl(T a, u32 by) {
  return by >= kBits<T> ? T{0} : static_cast<T>(a << by);
}
template <typename T>
T shr(T a, u32 by) {
  const u32 limited = std::is_signed_v<T> ? std::min(by, kBits<T> - 1) : by;
  return limited >= kBits<T> ? T{0} : static_cast<T>(a >> limited);
}

// The two words side by side, of which a window is taken.
u64 joined(u32 low, u32 high) { return static_cast<u64>(high) << 32 | low; }
u32 shf_r_wrap(u32 a, u32 b, u32 by) { return static_cast<u32>(joined(a, b) >> (by & 31)); }
u32 shf_l_wrap(u32 a, u32 b, u32 by) { return static_cast<u32>(joined(a, b) << (by & 31) >> 32); }
u32 shf_r_clamp(u32 a, u32 b, u32 by) {
  return static_cast<u32>(joined(a, b) >> std::min(by, u32{32}));
}
u32 shf_l_clamp(u32 a, u32 b, u32 by) {
  return by >= 32 ? a : static_cast<u32>(joined(a, b) << by >> 32);
}

template <typename T>
u32 popc(T a) {
  return static_cast<u32>(__builtin_popcountll(a));
}
template <typename T>
u32 clz(T a) {
  return a == 0 ? kBits<T> : static_cast<u32>(__builtin_clzll(a)) - (64 - kBits<T>);
}
template <typename T>
T brev(T a) {
  T reversed = 0;
  for (u32 i = 0; i < kBits<T>; ++i) reversed |= static_cast<T>((a >> i & 1) << (kBits<T> - 1 - i));
  return reversed;
}
// The place of the highest bit that differs from the sign.
template <typename T>
u32 bfind(T a) {
  using U = std::make_unsigned_t<T>;
  const U bits = static_cast<U>(a < 0 ? ~a : a);
  return bits == 0 ? kNone : kBits<T> - 1 - clz(bits);
}

// Positions and lengths have 8 bits.
template <typename T>
T low_bits(u32 length) {
  return length >= kBits<T> ? static_cast<T>(~T{0}) : static_cast<T>((T{1} << length) - 1);
}
template <typename T>
T bfi(T a, T b, u32 position, u32 length) {
  position &= 255, length &= 255;
  if (position >= kBits<T>) return b;
  const T field = static_cast<T>(low_bits<T>(length) << position);
  return static_cast<T>((b & ~field) | ((a << position) & field));
}
template <typename T>
T bfe(T a, u32 position, u32 length) {
  using U = std::make_unsigned_t<T>;
  position &= 255, length &= 255;
  const auto bits = static_cast<U>(a);
  const U field = position >= kBits<T> ? U{0} : static_cast<U>(bits >> position);
  if (length >= kBits<T>) length = kBits<T>;
  const bool is_negative = std::is_signed_v<T> && length > 0 &&
                           (bits >> std::min(position + length - 1, kBits<T> - 1) & 1) != 0;
  // Bits of the field beyond the word are copies of the sign.
  const u32 there = position >= kBits<T> ? 0 : std::min(length, kBits<T> - position);
  const U mask = low_bits<U>(there);
  return static_cast<T>((field & mask) | (is_negative ? static_cast<U>(~mask) : U{0}));
}

// A byte of eight is chosen by each half-byte of the selector, or copies of its sign.
u32 prmt(u32 a, u32 b, u32 selector) {
  const u64 all = joined(a, b);
  u32 result = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 choice = selector >> (4 * i) & 15;
    u32 byte = static_cast<u32>(all >> (8 * (choice & 7))) & 255;
    if ((choice & 8) != 0) byte = (byte & 128) != 0 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}

// Any function of three bits, by its table of eight.
u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 result = 0;
  for (u32 i = 0; i < 8; ++i) {
    if ((table >> i & 1) == 0) continue;
    result |= ((i & 4) != 0 ? a : ~a) & ((i & 2) != 0 ? b : ~b) & ((i & 1) != 0 ? c : ~c);
  }
  return result;
}

template <typename U, typename S>
void add_of_size(Table& table, const std::string& bits) {
  table.add<and_bits<U>>("and.b" + bits);
  table.add<or_bits<U>>("or.b" + bits, Defined::kByAny);  // a word that is put together of parts
  table.add<xor_bits<U>>("xor.b" + bits);
  table.add<not_bits<U>>("not.b" + bits);
  table.add<shl<U>>("shl.b" + bits);
  table.add<shr<U>>("shr.b" + bits);
  table.add<shr<U>>("shr.u" + bits);
  table.add<shr<S>>("shr.s" + bits);
}

template <typename U, typename S>
void add_of_words(Table& table, const std::string& bits) {
  table.add<popc<U>>("popc.b" + bits);
  table.add<clz<U>>("clz.b" + bits);
  table.add<brev<U>>("brev.b" + bits);
  table.add<bfind<U>>("bfind.u" + bits);
  table.add<bfind<S>>("bfind.s" + bits);
  table.add<bfi<U>>("bfi.b" + bits, Defined::kByAny);
  table.add<bfe<U>>("bfe.u" + bits);
  table.add<bfe<S>>("bfe.s" + bits);
}

}  // namespace

void add_bits(Table& table) {
  add_of_size<u16, i16>(table, "16");
  add_of_size<u32, i32>(table, "32");
  add_of_size<u64, i64>(table, "64");
  add_of_words<u32, i32>(table, "32");
  add_of_words<u64, i64>(table, "64");
  table.add<shf_r_wrap>("shf.r.wrap.b32");
  table.add<shf_l_wrap>("shf.l.wrap.b32");
  table.add<shf_r_clamp>("shf.r.clamp.b32");
  table.add<shf_l_clamp>("shf.l.clamp.b32");
  table.add<prmt>("prmt.b32", Defined::kByAny);
  table.add<lop3>("lop3.b32");
}

}  // namespace ptx
