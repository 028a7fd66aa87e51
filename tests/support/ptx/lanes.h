// Functions of one lane's values, applied to the lanes of a warp.

#pragma once

#include <string>

#include "program.h"
#include "warp.h"

namespace ptx {

template <typename T>
T* values(Warp& warp, const Operand& operand) {
  return reinterpret_cast<T*>(warp.registers + operand.offset);
}

// The mask of the lanes in which a predicate is true.
inline u32& predicate(Warp& warp, const Operand& operand) { return *values<u32>(warp, operand); }
inline void set_predicate(Warp& warp, const Operand& operand, u32 lanes, u32 value) {
  u32& all = predicate(warp, operand);
  all = (all & ~lanes) | (value & lanes);
}

// The loop over all 32 is the one that the compiler makes vector instructions of.
template <typename F>
inline __attribute__((always_inline)) void each_lane(u32 lanes, F function) {
  if (lanes == kAllLanes) {
#pragma GCC ivdep
    for (u32 i = 0; i < kLanes; ++i) function(i);
  } else {
    for (u32 rest = lanes; rest != 0; rest &= rest - 1) function(__builtin_ctz(rest));
  }
}

template <typename T>
constexpr char letter_of() {
  return sizeof(T) == 2 ? 'h' : sizeof(T) == 4 ? 'w' : 'q';
}

template <typename Function, Function F>
struct LanesOf;

template <typename D, typename A, D (*F)(A)>
struct LanesOf<D (*)(A), F> {
  static std::string signature() { return {letter_of<D>(), letter_of<A>()}; }
  static void run(Warp& warp, const Instruction& in, u32 lanes) {
    D* const d = values<D>(warp, in.d);
    const A* const a = values<A>(warp, in.a);
    each_lane(lanes, [=](u32 i) { d[i] = F(a[i]); });
  }
};

template <typename D, typename A, typename B, D (*F)(A, B)>
struct LanesOf<D (*)(A, B), F> {
  static std::string signature() { return {letter_of<D>(), letter_of<A>(), letter_of<B>()}; }
  static void run(Warp& warp, const Instruction& in, u32 lanes) {
    D* const d = values<D>(warp, in.d);
    const A* const a = values<A>(warp, in.a);
    const B* const b = values<B>(warp, in.b);
    each_lane(lanes, [=](u32 i) { d[i] = F(a[i], b[i]); });
  }
};

template <typename D, typename A, typename B, typename C, D (*F)(A, B, C)>
struct LanesOf<D (*)(A, B, C), F> {
  static std::string signature() {
    return {letter_of<D>(), letter_of<A>(), letter_of<B>(), letter_of<C>()};
  }
  static void run(Warp& warp, const Instruction& in, u32 lanes) {
    D* const d = values<D>(warp, in.d);
    const A* const a = values<A>(warp, in.a);
    const B* const b = values<B>(warp, in.b);
    const C* const c = values<C>(warp, in.c);
    each_lane(lanes, [=](u32 i) { d[i] = F(a[i], b[i], c[i]); });
  }
};

template <typename D, typename A, typename B, typename C, typename E, D (*F)(A, B, C, E)>
struct LanesOf<D (*)(A, B, C, E), F> {
  static std::string signature() {
    return {letter_of<D>(), letter_of<A>(), letter_of<B>(), letter_of<C>(), letter_of<E>()};
  }
  static void run(Warp& warp, const Instruction& in, u32 lanes) {
    D* const d = values<D>(warp, in.d);
    const A* const a = values<A>(warp, in.a);
    const B* const b = values<B>(warp, in.b);
    const C* const c = values<C>(warp, in.c);
    const E* const e = values<E>(warp, in.e);
    each_lane(lanes, [=](u32 i) { d[i] = F(a[i], b[i], c[i], e[i]); });
  }
};

// Comparisons write a predicate.
template <typename A, typename B, bool (*F)(A, B)>
struct LanesOf<bool (*)(A, B), F> {
  static std::string signature() { return {'p', letter_of<A>(), letter_of<B>()}; }
  static void run(Warp& warp, const Instruction& in, u32 lanes) {
    const A* const a = values<A>(warp, in.a);
    const B* const b = values<B>(warp, in.b);
    u32 result = 0;
#pragma GCC ivdep
    for (u32 i = 0; i < kLanes; ++i) result |= static_cast<u32>(F(a[i], b[i])) << i;
    set_predicate(warp, in.d, lanes, result);
  }
};

}  // namespace ptx
