// Integer arithmetic.

#include <type_traits>

#include "table.h"

namespace ptx {
namespace {

template <typename T>
T add(T a, T b) {
  return static_cast<T>(a + b);
}
template <typename T>
T sub(T a, T b) {
  return static_cast<T>(a - b);
}
template <typename T>
T mul_lo(T a, T b) {
  return static_cast<T>(static_cast<u64>(a) * static_cast<u64>(b));
}
template <typename T>
T mad_lo(T a, T b, T c) {
  return static_cast<T>(mul_lo(a, b) + c);
}
template <typename T>
T neg(T a) {
  return static_cast<T>(u64{0} - static_cast<u64>(a));
}
template <typename T>
T abs(T a) {
  return a < 0 ? neg(a) : a;
}
template <typename T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
T max(T a, T b) {
  return a > b ? a : b;
}
// A division by 0 gives all ones, as it does on a device; its remainder, the dividend.
template <typename T>
T div(T a, T b) {
  if (b == 0) return static_cast<T>(~T{0});
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return neg(a);
  return static_cast<T>(a / b);
}
template <typename T>
T rem(T a, T b) {
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
  return static_cast<T>(a % b);
}

template <typename D, typename T>
D mul_wide(T a, T b) {
  return static_cast<D>(static_cast<D>(a) * static_cast<D>(b));
}
template <typename D, typename T>
D mad_wide(T a, T b, D c) {
  return static_cast<D>(static_cast<u64>(mul_wide<D>(a, b)) + static_cast<u64>(c));
}
template <typename D, typename T>
T mul_hi(T a, T b) {
  return static_cast<T>((static_cast<D>(a) * static_cast<D>(b)) >> (8 * sizeof(T)));
}

// Signed or not alike: the bits are the same.
template <typename T>
void add_of_bits(Table& table, const std::string& type) {
  table.add<add<T>>("add." + type);
  table.add<sub<T>>("sub." + type);
  table.add<mul_lo<T>>("mul.lo." + type);
  table.add<mad_lo<T>>("mad.lo." + type);
  table.add<neg<T>>("neg." + type);
}

template <typename T>
void add_of_numbers(Table& table, const std::string& type) {
  table.add<min<T>>("min." + type);
  table.add<max<T>>("max." + type);
  table.add<div<T>>("div." + type);
  table.add<rem<T>>("rem." + type);
}

template <typename U, typename S>
void add_of_size(Table& table, const std::string& bits) {
  add_of_bits<U>(table, "u" + bits);
  add_of_bits<U>(table, "s" + bits);
  add_of_bits<U>(table, "b" + bits);
  add_of_numbers<U>(table, "u" + bits);
  add_of_numbers<S>(table, "s" + bits);
  table.add<abs<S>>("abs.s" + bits);
}

}  // namespace

void add_integers(Table& table) {
  add_of_size<u16, i16>(table, "16");
  add_of_size<u32, i32>(table, "32");
  add_of_size<u64, i64>(table, "64");
  table.add<mul_wide<u32, u16>>("mul.wide.u16");
  table.add<mul_wide<i32, i16>>("mul.wide.s16");
  table.add<mul_wide<u64, u32>>("mul.wide.u32");
  table.add<mul_wide<i64, i32>>("mul.wide.s32");
  table.add<mad_wide<u32, u16>>("mad.wide.u16");
  table.add<mad_wide<i32, i16>>("mad.wide.s16");
  table.add<mad_wide<u64, u32>>("mad.wide.u32");
  table.add<mad_wide<i64, i32>>("mad.wide.s32");
  table.add<mul_hi<u32, u16>>("mul.hi.u16");
  table.add<mul_hi<i32, i16>>("mul.hi.s16");
  table.add<mul_hi<u64, u32>>("mul.hi.u32");
  table.add<mul_hi<i64, i32>>("mul.hi.s32");
  __extension__ using u128 = unsigned __int128;
  __extension__ using i128 = __int128;
  table.add<mul_hi<u128, u64>>("mul.hi.u64");
  table.add<mul_hi<i128, i64>>("mul.hi.s64");
}

}  // namespace ptx
