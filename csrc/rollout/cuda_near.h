// Near tokens: those with |x| <= 1 on which no bound on a weight acts, under a mask of zeros and
// ones. Most are. A lane adds each to few sums, from which all others follow.

#pragma once

#include "device/cuda/smooth.h"
#include "rollout/cuda_sums.h"

namespace klfast::rollout::cuda {

// The tokens that a lane computes at a time, 0 where they are not kept or not near.
template <typename Acc, int n>
struct Tokens {
  Acc logprob[n];
  Acc x[n];
  Acc squared[n];  // x^2
};

// Which tokens of a lane are kept: a bit each.
struct KeptBits {
  unsigned bits;

  __device__ __forceinline__ bool has(int i) const { return (bits >> i & 1u) != 0; }
  __device__ __forceinline__ void drop(int i) { bits &= ~(1u << i); }
  __device__ __forceinline__ int count() const { return __popc(bits); }

  // The number where kept, else 0, or NaN.
  template <typename Acc>
  __device__ __forceinline__ Acc or_zero(int i, Acc number) const {
    return select(has(i), number, Acc(0));
  }
  template <typename Acc>
  __device__ __forceinline__ Acc or_nan(int i, Acc number) const {
    return select(has(i), number, Acc(NAN));
  }
};

// The same of `n` chunks under a mask of bools.
template <int W, int n>
struct KeptChunks {
  Kept<W> of[n];

  __device__ __forceinline__ bool has(int i) const { return of[i / W].has(i % W); }
  __device__ __forceinline__ void drop(int i) {
    of[i / W].words[i % W / 4] &= ~(0x80u << (8 * (i % 4)));
  }
  __device__ __forceinline__ int count() const {
    int count = 0;
#pragma unroll
    for (int c = 0; c < n; ++c) count += of[c].count();
    return count;
  }
  __device__ __forceinline__ uint32_t bits_of(int i) const {
    return of[i / W].template bits_of_word<4>(i % W);
  }
  __device__ __forceinline__ float or_zero(int i, float number) const {
    return bit_cast<float>(bit_cast<uint32_t>(number) & bits_of(i));
  }
  __device__ __forceinline__ float or_nan(int i, float number) const {
    return bit_cast<float>(bit_cast<uint32_t>(number) | ~bits_of(i));
  }
};

// Whether any x^2 is not less than a limit. Squares are not negative, and so ordered as integers,
// where NaN is greater than all.
template <int n>
__device__ __forceinline__ bool any_far(const float (&squared)[n], float limit) {
  unsigned greatest = bit_cast<unsigned>(squared[0]);
  const auto bits = [&](int i) { return i < n ? bit_cast<unsigned>(squared[i]) : 0u; };
#pragma unroll
  for (int i = 1; i < n; i += 2) greatest = __vimax3_u32(greatest, bits(i), bits(i + 1));
  return greatest >= bit_cast<unsigned>(limit);
}
template <int n>
__device__ __forceinline__ bool any_far(const double (&squared)[n], double limit) {
  bool any = false;
#pragma unroll
  for (int i = 0; i < n; ++i) any |= !(squared[i] < limit);
  return any;
}

// Takes the far tokens out. Returns a bit for each that is kept.
template <typename Acc, int n, typename KeptTokens>
__device__ __forceinline__ unsigned drop_far(Acc limit, Tokens<Acc, n>& tokens, KeptTokens& kept) {
  unsigned far = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (!(tokens.squared[i] < limit)) {
      if (kept.has(i)) far |= 1u << i;
      kept.drop(i);
      tokens.logprob[i] = tokens.x[i] = tokens.squared[i] = 0;
    }
  }
  return far;
}

__device__ __forceinline__ float least_number(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ double least_number(double a, double b) { return fmin(a, b); }
__device__ __forceinline__ float greatest_number(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double greatest_number(double a, double b) { return fmax(a, b); }

// Adds near tokens, but for their number; weights[i] is e^x, 0 where a token is not kept.
template <typename Acc, int n, typename KeptTokens>
__device__ __forceinline__ void add_near(const Tokens<Acc, n>& tokens, const KeptTokens& kept,
                                         LaneSums<Acc>& sums, Acc (&weights)[n]) {
  Acc& least = sums.extremes[kLeastInside];
  Acc& greatest = sums.extremes[kGreatestInside];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const Acc x = tokens.x[i], squared = tokens.squared[i];
    const NearExponentials<Acc> e = near_exponentials_of(x);
    weights[i] = kept.or_zero(i, Acc(1) + e.growth);
    const NearToken<Acc> token = {tokens.logprob[i], x, squared, e};
    for_each_row(statistics::OfNear(), [&](auto row) KLFAST_INLINE_LAMBDA {
      using Row = decltype(row);
      Acc& sum = sums.at[near_lane_of<Row>];
      if constexpr (std::is_same_v<Row, statistics::error>) {
        sum =
            fma(squared, e.rest_of_error(x), sum);  // e^|x| - 1 - |x|: the sum of |x| has the rest
      } else {
        sum += Row::near(token);
      }
    });
    sums.at[kNearGrowthSquares] = fma(e.growth, e.growth, sums.at[kNearGrowthSquares]);
    const Acc number = kept.or_nan(i, x);  // which is less than none
    least = least_number(least, number);
    greatest = greatest_number(greatest, number);
  }
}

}  // namespace klfast::rollout::cuda
