// The single argument of the kernels between sampler and trainer, and where their tokens lie.

#pragma once

#include "device/cuda/tokens.h"
#include "rollout/token_bounds.h"
#include "rollout/totals.h"

namespace klfast::rollout::cuda {

using namespace klfast::cuda;

template <typename Acc>
struct Task {
  Call call;
  TokenBounds<Acc> bounds;
  Acc far_squares;  // a token is far if its x^2 is not less
  Grid grid;
  double* partials;    // [slots, rows_of_totals], of sequences of several segments
  Fill* fills;         // [S], for the second kernel; null if there is none
  unsigned* arrivals;  // null if every sequence has one segment
};

// The tokens of a segment.
struct Span {
  int64_t index;  // of the first among all tokens
  int64_t sequence;
  int size;
  bool is_smooth;
  // The offset of the first in each input, in elements.
  int64_t logprobs;
  int64_t rollout_logprobs;
  int64_t mask;
  int64_t advantages;
};

// The tokens of a lane's chunk. Which lane has a token depends on its position alone.
template <typename T>
inline constexpr int kWidth = kSmoothWidth<T>;

template <typename T>
inline constexpr bool kHasSmooth = std::is_same_v<T, typename Source<T>::Element> && sizeof(T) <= 4;

template <typename T, typename Acc>
__device__ __forceinline__ Span span_of(const Task<Acc>& task, const Segment& segment) {
  const rollout::Inputs& in = task.call.in;
  Span span;
  span.index = segment.start + segment.position;
  span.sequence = segment.sequence;
  span.size = static_cast<int>(segment.size);
  span.logprobs = offset_of(in.logprobs, in.batch, segment);
  span.rollout_logprobs = offset_of(in.rollout_logprobs, in.batch, segment);
  span.mask = offset_of(in.mask, in.batch, segment);
  span.advantages = in.has_advantage_per_token ? offset_of(in.advantages, in.batch, segment)
                                               : segment.sequence * in.advantages.column_stride;
  const bool has_bools =
      in.mask.data == nullptr || (in.mask.dtype == DType::kBool && in.mask.column_stride == 1);
  span.is_smooth = kHasSmooth<T> && has_bools && in.logprobs.column_stride == 1 &&
                   in.rollout_logprobs.column_stride == 1;
  return span;
}

// Where a lane's tokens of a tile have their bits, from the warp's position in the segment on.
__device__ __forceinline__ int first_bit(int position) {
  return position % static_cast<int>(kTileTokens) / kWarp;
}

}  // namespace klfast::rollout::cuda
