// Far tokens, one at a time after the near tokens of a tile: they are read again, by every formula.
// The token alone decides that it is far.

#pragma once

#include "rollout/cuda_near.h"

namespace klfast::rollout::cuda {

// Element `index` of an input that is a T.
template <typename T>
__device__ __forceinline__ auto read(const View& view, int64_t index) {
  using Acc = typename Source<T>::Acc;
  if constexpr (std::is_same_v<T, typename Source<T>::Element>) {
    return convert<Acc>(static_cast<const T*>(view.data)[index]);
  } else {
    Acc number = 0;
    visit_dtype(view.dtype, [&](auto zero) {
      using From = decltype(zero);
      if constexpr (is_floating<From>) {
        number = convert<Acc>(static_cast<const From*>(view.data)[index]);
      }
    });
    return number;
  }
}

// The dtype of a mask. kBools: it is known to be of bools, so that no other dtype has code.
template <bool kBools>
__device__ __forceinline__ DType mask_dtype(DType dtype) {
  return kBools ? DType::kBool : dtype;
}

// A token's weight in the mask, 1 without one.
template <typename Acc, bool kBools>
__device__ __forceinline__ Acc read_mask(const View& mask, int64_t index) {
  Acc weight = 1;
  if (mask.data == nullptr) return weight;
  visit_dtype(mask_dtype<kBools>(mask.dtype), [&](auto zero) {
    using From = decltype(zero);
    weight = convert<Acc>(static_cast<const From*>(mask.data)[index]);
  });
  return weight;
}

template <bool kBools = false>
__device__ __forceinline__ void store_zero(const Output& output, int64_t index) {
  if (output.data == nullptr) return;
  visit_dtype(mask_dtype<kBools>(output.dtype), [&](auto zero) {
    using To = decltype(zero);
    static_cast<To*>(output.data)[index] = To{};
  });
}

// The position in a segment of the first token that has a bit, of a tile from `first` on.
template <typename T>
__device__ __forceinline__ int position_of(int first, unsigned bits) {
  constexpr int W = kWidth<T>;
  const int bit = __popc((bits & -bits) - 1);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  return first + (bit / W * kWarp + lane) * W + bit % W;
}

template <typename Acc>
__device__ __forceinline__ void add_extremes(Extreme least, Acc number, LaneSums<Acc>& sums) {
  sums.extremes[least] = least_number(sums.extremes[least], number);
  sums.extremes[least + 1] = greatest_number(sums.extremes[least + 1], number);
}

// Adds a kept token, and returns its weight: 0 if it is not counted.
template <typename Acc>
__device__ __forceinline__ Acc add_far_token(const TokenBounds<Acc>& bounds, Acc logprob, Acc x,
                                             Acc m, LaneSums<Acc>& sums) {
  sums.at[kFarLength] += m;
  if (!(magnitude(x) < Acc(INFINITY))) {
    sums.at[kFarNumbers] += numbers<Acc>(1, 1);
    if (x < Acc(0)) sums.at[kFarExcluded] += m;
    return 0;
  }
  const Exponentials<Acc> e = exponentials_of<Range::kAnywhere>(x);
  const TokenWeight<Acc> weight = token_weight(bounds, x, e);
  const FarToken<Acc> token = {logprob, x, e, weight};
  for_each_row(statistics::Sums(), [&](auto row) KLFAST_INLINE_LAMBDA {
    using Row = decltype(row);
    sums.at[far_lane_of<Row>()] += m * Row::far(token);
  });
  sums.at[kFarNumbers] += numbers<Acc>(1, 0);
  sums.at[kFarCounted] += m;
  sums.at[kFarBelowAbove] += numbers<Acc>(weight.below, weight.above);
  if (weight.outside) {
    add_extremes(kLeastOutside, x, sums);
  } else {
    add_extremes(kLeastInside, x, sums);
  }
  return weight.value;
}

// Adds the far tokens of a tile, whose first token is at `first` in the segment, and stores their
// weights.
template <typename T, bool kBools, typename Acc>
__device__ __forceinline__ void add_far(const Task<Acc>& task, const Span& span, int first,
                                        LaneSums<Acc>& sums) {
  const Call& call = task.call;
  const rollout::Inputs& in = call.in;
#pragma unroll 1
  for (unsigned bits = sums.far; bits != 0; bits &= bits - 1) {
    const int position = position_of<T>(first, bits);
    const Acc a = read<T>(in.logprobs, span.logprobs + position * in.logprobs.column_stride);
    const Acc b = read<T>(in.rollout_logprobs,
                          span.rollout_logprobs + position * in.rollout_logprobs.column_stride);
    const Acc m = read_mask<Acc, kBools>(in.mask, span.mask + position * in.mask.column_stride);
    const Acc x = a - b;
    const Acc weight = add_far_token(task.bounds, a, x, m, sums);
    const int64_t index = span.index + position;
    if (in.options.weight == Weight::kToken)
      static_cast<Acc*>(call.out.weights.data)[index] = weight;
    if (!(magnitude(x) < Acc(INFINITY))) store_zero<kBools>(call.out.mask, index);
  }
}

}  // namespace klfast::rollout::cuda
