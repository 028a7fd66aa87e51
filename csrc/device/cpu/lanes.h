// Sums by lane. Word or token t of a row is always added to lane t % kLanes, so a sum depends only
// on its own terms. Loops over lanes have a constant length, and compilers vectorise them
// completely. Kernels that are compiled once per instruction set include this file. Everything here
// is inlined into them.

#pragma once

#include <algorithm>
#include <cstdint>

#include "device/cpu/intrinsics.h"
#include "math/combine.h"
#include "tensors/convert.h"

namespace klfast::cpu {
namespace {

constexpr int64_t kLanes = 64;  // four vectors of AVX-512, which are enough independent sums

// True if every |x| of a group is at most `range`. It is false if an x is NaN or `range` is
// negative. Magnitudes are compared as integers, so NaN is the greatest. This takes two
// instructions per vector. GCC makes three of a comparison of floats on x86, and eight on aarch64.
template <typename Acc>
KLFAST_HOST_DEVICE bool are_within(const Acc* x, Acc range) {
  using Bits = typename math::Constants<Acc>::Bits;
  Bits greatest = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    greatest = std::max(greatest, math::magnitude_bits(x[lane]));
  }
  return greatest <= math::bit_cast<Bits>(range);
}

#ifdef __AVX512F__
constexpr int64_t kVector = 16;  // floats

KLFAST_HOST_DEVICE __m512 load_vector(const float* from) { return _mm512_loadu_ps(from); }

KLFAST_HOST_DEVICE __m512 load_vector(const BFloat16* from) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

KLFAST_HOST_DEVICE __mmask16 are_within(__m512 x, float range) {
  return _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(range), _CMP_LE_OQ);
}

// GCC collects the comparisons of the loop above in a vector. It then needs ten instructions to
// make one number of the vector.
KLFAST_HOST_DEVICE bool are_within(const float* x, float range) {
  __mmask16 within = 0xffff;
  for (int64_t lane = 0; lane < kLanes; lane += kVector) {
    within &= are_within(_mm512_loadu_ps(x + lane), range);
  }
  return within == 0xffff;
}
#endif

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
