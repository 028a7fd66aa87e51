// Sums by lane. Word or token t of a row is always added to lane t % kLanes, so a sum depends only
// on its own terms. Loops over lanes have a constant length, and compilers vectorise them
// completely. Kernels that are compiled once per instruction set include this file. Everything here
// is inlined into them.

#pragma once

#include <algorithm>
#include <cstdint>

#include "device/cpu/simd.h"
#include "math/combine.h"

namespace klfast::cpu {
namespace {

constexpr int64_t kLanes = 64;  // four vectors of AVX-512, which are enough independent sums

// The part of a group that is in registers at a time.
template <typename Acc>
using Part = Block<Acc, 4>;

// True if every |x| is at most `range`. It is false if an x is NaN or `range` is negative.
template <typename T, int N>
KLFAST_HOST_DEVICE bool are_within(const Block<T, N>& x, T range) {
  return range >= 0 && !any_beyond(math::magnitude(x), math::magnitude(range));  // it may be -0
}

// The same for a group.
template <typename Acc>
KLFAST_HOST_DEVICE bool are_within(const Acc* x, Acc range) {
  bool within = true;
  for (int64_t lane = 0; lane < kLanes; lane += Part<Acc>::kSize) {
    within &= are_within(load<Part<Acc>>(x + lane), range);
  }
  return within;
}

// Writes x = a - b for a group, and 0 where masked. Returns true if every |x| is at most `range`.
// Calls visit(lane, part of a, kept) for each part of the group.
template <typename T, typename Visit>
KLFAST_HOST_DEVICE bool load_difference(const T* a, const T* b, const Bool* mask, float range,
                                        float* x, const Visit& visit) {
  using B = Part<float>;
  bool within = true;
  for (int64_t lane = 0; lane < kLanes; lane += B::kSize) {
    const Kept<B::kVectors> kept(mask + lane);
    const B first = load_in_order<B>(a + lane);
    const B difference = kept.of(first - load_in_order<B>(b + lane));
    store(difference, x + lane);
    visit(lane, first, kept);
    within &= are_within(difference, range);
  }
  return within;
}
template <typename T>
KLFAST_HOST_DEVICE bool load_difference(const T* a, const T* b, const Bool* mask, float range,
                                        float* x) {
  return load_difference(a, b, mask, range, x, [](int64_t, auto, auto) KLFAST_INLINE_LAMBDA {});
}

// Adds a tile's sums to the sums in double, and empties the tile's sums. The sums of one tile have
// few terms, so the arithmetic's type is exact enough for them.
template <typename Combination = math::Sum, typename Acc>
KLFAST_HOST_DEVICE void flush(Acc* lanes, double* wide) {
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    wide[lane] = Combination::combine(wide[lane], static_cast<double>(lanes[lane]));
    lanes[lane] = Acc(Combination::kEmpty);
  }
}

template <typename Combination>
KLFAST_HOST_DEVICE double combine_lanes(double* lanes) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC ivdep
    for (int64_t lane = 0; lane < half; ++lane) {
      lanes[lane] = Combination::combine(lanes[lane], lanes[lane + half]);
    }
  }
  return lanes[0];
}

KLFAST_HOST_DEVICE double add_lanes(double* lanes) { return combine_lanes<math::Sum>(lanes); }

}  // namespace
}  // namespace klfast::cpu
