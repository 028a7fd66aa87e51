// The pass over the tokens of most calls: log-probs of one dtype in rows without gaps, a mask of
// bools or none, and an estimator without limits, importance weights and a gradient of its own.
// Included by kernels that are compiled once per instruction set: everything here is internal.
//
// A group is loaded, evaluated and added up before the next is loaded. Buffers of whole tiles took
// as long to write and read as fp32 arithmetic takes, and bf16 words longer than their memory.

#pragma once

#include <algorithm>
#include <cmath>

#ifdef __AVX512BW__
#include <immintrin.h>
#endif

#include "device/cpu/ahead.h"
#include "device/cpu/tiles.h"
#include "penalty/cpu_kernel.h"
#include "penalty/cpu_sums.h"

namespace klfast::cpu {
namespace {

// The output that a pass stores per token.
enum class Store { kNothing, kValue, kGradient };

// Tokens of a tile: an element of each array belongs to one.
template <typename T>
struct SmoothTokens {
  const T* logprobs;
  const T* ref_logprobs;
  const Bool* mask;
  int64_t mask_step;  // 0: every group has the same mask

  KLFAST_HOST_DEVICE SmoothTokens from(int64_t first) const {
    return {logprobs + first, ref_logprobs + first, mask + first * mask_step, mask_step};
  }
};

struct SmoothOutput {
  float factor;  // of what is stored: coef, or the gradient's scale
  void* data;    // values in float, or gradients in the dtype of log-probs
};

#ifdef __AVX512BW__

KLFAST_HOST_DEVICE __m512 load_vector(const float* from) { return _mm512_loadu_ps(from); }

KLFAST_HOST_DEVICE __m512 load_vector(const BFloat16* from) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

// The log-ratios of a group, 0 where masked. Returns whether every |x| is 1 at most. GCC turns the
// loops below, which do the same, into half as many instructions again: a bf16 pass takes 1.2 times
// as long with them.
template <typename T>
KLFAST_HOST_DEVICE bool load_log_ratios(const SmoothTokens<T>& group, float* log_ratio) {
  const __m512i mask = _mm512_loadu_si512(group.mask);
  const __mmask64 kept = _mm512_test_epi8_mask(mask, mask);
  constexpr int kVector = 16;
  __mmask16 near = 0xffff;
  for (int lane = 0; lane < kLanes; lane += kVector) {
    const __m512 x = _mm512_maskz_sub_ps(static_cast<__mmask16>(kept >> lane),
                                         load_vector(group.logprobs + lane),
                                         load_vector(group.ref_logprobs + lane));
    _mm512_store_ps(log_ratio + lane, x);
    near &= _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(1), _CMP_LE_OQ);
  }
  return near == 0xffff;
}

#else

template <typename T>
KLFAST_HOST_DEVICE bool load_log_ratios(const SmoothTokens<T>& group, float* log_ratio) {
  alignas(64) int32_t kept[kLanes];
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) kept[lane] = -(group.mask[lane].byte != 0);
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const float x = convert<float>(group.logprobs[lane]) - convert<float>(group.ref_logprobs[lane]);
    log_ratio[lane] = math::bit_cast<float>(math::bit_cast<int32_t>(x) & kept[lane]);
  }
  int32_t far = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) far |= !math::is_near(log_ratio[lane]);
  return far == 0;
}

#endif

// 1, which a compiler does not know. A product with it is rounded before it is added, as it is
// where tokens have weights: without it a compiler would contract products within a value into the
// sum, and give other bits.
inline float unknown_one() {
  volatile float one = 1;
  return one;
}

// Evaluates a group and adds it to the sums, but for the statistics that are known from others.
template <typename E, Range range, Store stores, Depth depth, typename To>
KLFAST_HOST_DEVICE void evaluate_smooth(const float* log_ratio, const Bool* mask, float one,
                                        float factor, To* stored, LaneSums<float>& sums) {
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const float x = log_ratio[lane];
    const auto formula = E::template at<range>(x);
    const float value = one * formula.value;
    if constexpr (stores == Store::kValue) stored[lane] = factor * value;
    if constexpr (stores == Store::kGradient) {
      const float weight = mask[lane].byte != 0 ? 1.0f : 0.0f;
      stored[lane] = convert<To>(factor * (weight * formula.derivative));
    }
    const Observation<range, float> token = {value, one, x, 0};
    add_token<depth, E>(sums, lane, token);
  }
}

// Apart from the loop over groups: constants of the longer formula would take its registers.
template <typename E, Store stores, Depth depth, typename To>
__attribute__((noinline)) void evaluate_far(const float* log_ratio, const Bool* mask, float one,
                                            float factor, To* stored, LaneSums<float>& sums) {
  evaluate_smooth<E, Range::kAnywhere, stores, depth>(log_ratio, mask, one, factor, stored, sums);
}

// A group at the end of a segment, filled up with masked zeros.
template <typename T>
struct LastGroup {
  T logprobs[kLanes];
  T ref_logprobs[kLanes];
  Bool mask[kLanes];

  SmoothTokens<T> copy(const SmoothTokens<T>& from, int64_t n) {
    *this = {};
    std::copy_n(from.logprobs, n, logprobs);
    std::copy_n(from.ref_logprobs, n, ref_logprobs);
    std::copy_n(from.mask, n, mask);
    return {logprobs, ref_logprobs, mask, 0};
  }
};

// Adds the tokens of a segment to its sums.
template <typename E, Store stores, Depth depth, typename T>
void run_groups(const SmoothTokens<T>& segment, int64_t size, const SmoothOutput& output,
                LaneSums<double>& of_segment) {
  using To = std::conditional_t<stores == Store::kGradient, T, float>;
  alignas(64) float log_ratio[kLanes];
  alignas(64) To rest[kLanes];
  LastGroup<T> last;
  const float one = unknown_one();
  for (int64_t tile = 0; tile < size; tile += kTileTokens) {
    alignas(64) LaneSums<float> sums;
    alignas(64) uint8_t kept[kLanes] = {};  // tokens of a lane
    clear<depth>(sums);
    const int64_t end = std::min(size, tile + kTileTokens);
    for (int64_t first = tile; first < end; first += kLanes) {
      SmoothTokens<T> group = segment.from(first);
      To* to = static_cast<To*>(output.data) + first;
      fetch_group(group.logprobs + kTileTokens);
      fetch_group(group.ref_logprobs + kTileTokens);
      fetch_group(group.mask + kTileTokens * group.mask_step);
      if constexpr (stores != Store::kNothing) fetch_group(to + kTileTokens);
      const int64_t n = end - first;
      if (n < kLanes) {
        group = last.copy(group, n);
        to = rest;
      }
      if (load_log_ratios(group, log_ratio)) {
        evaluate_smooth<E, Range::kNear, stores, depth>(log_ratio, group.mask, one, output.factor,
                                                        to, sums);
      } else {
        evaluate_far<E, stores, depth>(log_ratio, group.mask, one, output.factor, to, sums);
      }
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        kept[lane] = static_cast<uint8_t>(kept[lane] + (group.mask[lane].byte != 0));
      }
      if constexpr (stores != Store::kNothing) {
        if (n < kLanes) std::copy_n(rest, n, static_cast<To*>(output.data) + first);
      }
    }
    add_derived<depth, E>(kept, sums);
    flush<depth>(sums, of_segment);
  }
}

template <typename T>
using RunGroups = void (*)(const SmoothTokens<T>&, int64_t size, const SmoothOutput&,
                           LaneSums<double>&);

template <typename T, Store stores>
RunGroups<T> choose_groups(const SegmentTask& task) {
  RunGroups<T> chosen = nullptr;
  visit_row(estimators::Table(), task.inputs->options.estimator, [&](auto estimator) {
    using E = decltype(estimator);
    chosen = task.want_statistics ? run_groups<E, stores, Depth::kWanted, T>
                                  : run_groups<E, stores, Depth::kAlways, T>;
  });
  return chosen;
}

template <typename T>
RunGroups<T> choose_groups(const SegmentTask& task) {
  if (task.value.data != nullptr) return choose_groups<T, Store::kValue>(task);
  if (task.grad_logprobs.data != nullptr) return choose_groups<T, Store::kGradient>(task);
  return choose_groups<T, Store::kNothing>(task);
}

// Whether run_smooth() can do a task.
bool is_smooth(const SegmentTask& task) {
  const KlPenaltyInputs& in = *task.inputs;
  const auto is_dense = [](const View& view, DType dtype) {
    return view.data != nullptr && view.dtype == dtype && view.column_stride == 1;
  };
  const DType dtype = in.logprobs.dtype;
  const bool reads_dense = (dtype == DType::kFloat32 || dtype == DType::kBFloat16) &&
                           is_dense(in.logprobs, dtype) && is_dense(in.ref_logprobs, dtype) &&
                           (in.mask.data == nullptr || is_dense(in.mask, DType::kBool));
  const bool differentiates = task.grad_logprobs.data != nullptr;
  const bool is_plain = !in.options.has_limits() && in.old_logprobs.data == nullptr &&
                        !(differentiates && in.options.gradient == Gradient::kK2);
  const bool is_scaled = task.grad_out.data == nullptr && task.grad_logprobs.dtype == dtype &&
                         std::isfinite(static_cast<float>(task.grad_scale));
  const bool stores_one = task.grad_ref_logprobs.data == nullptr &&
                          (!differentiates || (is_scaled && task.value.data == nullptr));
  return !in.is_double && reads_dense && is_plain && stores_one;
}

// The index of the last kept of n tokens, or -1.
KLFAST_HOST_DEVICE int64_t last_kept_of(const Bool* mask, int64_t step, int64_t n) {
  int64_t i = n - 1;
  while (i >= 0 && mask[i * step].byte == 0) --i;
  return i;
}

template <typename T>
Partial run_smooth(const SegmentTask& task, const Segment& segment) {
  static const LastGroup<T> whole = [] {
    LastGroup<T> group = {};
    std::fill_n(group.mask, kLanes, Bool{1});
    return group;
  }();
  const KlPenaltyInputs& in = *task.inputs;
  const int64_t row = in.batch.row(segment.sequence);
  const int64_t column = in.batch.column(segment.sequence, segment.position);
  const int64_t index = in.batch.start(segment.sequence) + segment.position;
  const auto at = [&](const View& view, auto zero) {
    return static_cast<const decltype(zero)*>(view.data) + row * view.row_stride + column;
  };
  const bool is_masked = in.mask.data != nullptr;
  const SmoothTokens<T> tokens = {at(in.logprobs, T()), at(in.ref_logprobs, T()),
                                  is_masked ? at(in.mask, Bool()) : whole.mask,
                                  is_masked ? 1 : 0};
  SmoothOutput output = {};
  if (task.value.data != nullptr) {
    output = {static_cast<float>(in.coef), static_cast<float*>(task.value.data) + index};
  } else if (task.grad_logprobs.data != nullptr) {
    output = {static_cast<float>(task.grad_scale), static_cast<T*>(task.grad_logprobs.data) + index};
  }
  alignas(64) LaneSums<double> sums;
  clear<Depth::kLimited>(sums);
  choose_groups<T>(task)(tokens, segment.length, output, sums);
  Partial partial;
  if (task.want_statistics) {
    add_up<Depth::kLimited>(sums, partial);
  } else {
    add_up<Depth::kAlways>(sums, partial);
  }
  if (task.want_last_kept) {
    const int64_t last = last_kept_of(tokens.mask, tokens.mask_step, segment.length);
    if (last >= 0) partial.last_kept = index + last;
  }
  return partial;
}

}  // namespace
}  // namespace klfast::cpu
