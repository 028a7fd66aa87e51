// The pass over smooth tokens. Most tokens are smooth. Their log-probs have one dtype and are
// in rows without gaps. Their mask is absent, or has only zeros and ones, in any dtype. Kernels
// that are compiled once per instruction set include this file. Everything here is internal to each
// copy.
//
// A group is loaded, evaluated and added up before the next group is loaded. Buffers of whole tiles
// between these three steps would take as long as the arithmetic in fp32.

#pragma once

#include <algorithm>
#include <cmath>

#include "device/cpu/ahead.h"
#include "penalty/cpu_evaluate.h"
#include "penalty/cpu_kernel.h"

namespace klfast::cpu {
namespace {

// Tokens, one per element of each array.
template <typename T>
struct SmoothTokens {
  const T* logprobs;
  const T* ref_logprobs;
  const T* old_logprobs;  // or null
  const Bool* mask;       // null until a tile's mask is read

  // The tokens from `first` on. The mask is given from there on.
  KLFAST_HOST_DEVICE SmoothTokens from(int64_t first, const Bool* mask_from_first) const {
    return {logprobs + first, ref_logprobs + first,
            old_logprobs == nullptr ? nullptr : old_logprobs + first, mask_from_first};
  }
  KLFAST_HOST_DEVICE SmoothTokens from(int64_t first) const { return from(first, mask + first); }

  KLFAST_HOST_DEVICE void fetch() const {
    fetch_group(logprobs);
    fetch_group(ref_logprobs);
    if (old_logprobs != nullptr) fetch_group(old_logprobs);
    fetch_group(mask);
  }
};

// The mask of a segment, as bools.
class SmoothMask {
 public:
  SmoothMask(const KlPenaltyInputs& in, const Segment& segment)
      : mask_(in.mask),
        first_(in.batch.row(segment.sequence) * in.mask.row_stride +
               in.batch.column(segment.sequence, segment.position)) {}

  // Returns the bools of tokens [first, first + n), which are in one tile. They are valid until the
  // next call. Returns null if a weight is neither 0 nor 1.
  __attribute__((noinline)) const Bool* read(int64_t first, int64_t n) {
    if (mask_.data == nullptr) return kOnes.mask;
    const Bool* bools = nullptr;
    visit_dtype(mask_.dtype, [&](auto zero) {
      using From = decltype(zero);
      const From* const from = static_cast<const From*>(mask_.data) + first_ + first;
      if constexpr (std::is_same_v<From, Bool>) {
        bools = from;
      } else {
        bools = copy(from, n) ? buffer_ : nullptr;
      }
    });
    return bools;
  }

 private:
  const View mask_;
  const int64_t first_;
  alignas(64) Bool buffer_[kTileTokens];

  template <typename From>
  bool copy(const From* from, int64_t n) {
    using Number = std::conditional_t<std::is_arithmetic_v<From>, From, float>;
    uint8_t others = 0;
    for (int64_t first = 0; first < n; first += kLanes) {
      fetch_group(from + first + kTileTokens);
      const int64_t end = std::min(n, first + kLanes);
#pragma GCC ivdep
      for (int64_t i = first; i < end; ++i) {
        const Number weight = convert<Number>(from[i]);
        buffer_[i].byte = weight != Number(0);
        others |= (weight != Number(0)) & (weight != Number(1));
      }
    }
    return others == 0;
  }
};

// The tokens after the last whole group of a segment, padded with masked zeros, and the memory for
// their outputs.
template <typename T>
struct LastGroup {
  T logprobs[kLanes], ref_logprobs[kLanes], old_logprobs[kLanes];
  Bool mask[kLanes];
  float value[kLanes];
  T grad[kLanes], grad_ref[kLanes];

  SmoothTokens<T> read(const SmoothTokens<T>& from, int64_t n) {
    const auto fill = [&](const auto* of, auto* group) {
      if (of == nullptr) return;
      std::copy_n(of, n, group);
      std::fill(group + n, group + kLanes, std::remove_pointer_t<decltype(group)>{});
    };
    fill(from.logprobs, logprobs);
    fill(from.ref_logprobs, ref_logprobs);
    fill(from.old_logprobs, old_logprobs);
    fill(from.mask, mask);
    return {logprobs, ref_logprobs, from.old_logprobs == nullptr ? nullptr : old_logprobs, mask};
  }

  Outputs<float, T> outputs(const Outputs<float, T>& to) {
    return {to.coef, to.grad_scale, to.value == nullptr ? nullptr : value,
            to.grad == nullptr ? nullptr : grad, to.grad_ref == nullptr ? nullptr : grad_ref};
  }

  void store(const Outputs<float, T>& to, int64_t n) const {
    if (to.value != nullptr) std::copy_n(value, n, to.value);
    if (to.grad != nullptr) std::copy_n(grad, n, to.grad);
    if (to.grad_ref != nullptr) std::copy_n(grad_ref, n, to.grad_ref);
  }
};

// Evaluates a smooth group. Plain is for groups without options, and Any is for all others.
template <typename E, Store stores, Depth depth, typename T>
KLFAST_HOST_DEVICE void add_group(const SmoothTokens<T>& group, const Outputs<float, T>& outputs,
                                  Plain<E, stores, depth>& evaluation) {
  alignas(64) float log_ratio[kLanes];
  const bool is_near =
      load_difference(group.logprobs, group.ref_logprobs, group.mask, 1, log_ratio);
  evaluation.add(is_near, log_ratio, group.mask, outputs);
}

template <typename E, Depth depth, typename T>
KLFAST_HOST_DEVICE void add_group(const SmoothTokens<T>& group, const Outputs<float, T>& outputs,
                                  Any<E, depth, float>& evaluation) {
  alignas(64) float log_ratio[kLanes];
  alignas(64) float log_importance[kLanes];
  alignas(64) float weights[kLanes];
  const bool weighs = group.old_logprobs != nullptr;
  const auto write = [&](int64_t lane, auto, auto kept)
                         KLFAST_INLINE_LAMBDA { store(kept.of(1), weights + lane); };
  load_difference(group.logprobs, group.ref_logprobs, group.mask, 1, log_ratio, write);
  if (weighs) {
    load_difference(group.logprobs, group.old_logprobs, group.mask, 1, log_importance);
  }
  evaluation.add({log_ratio, weighs ? log_importance : nullptr, weights}, outputs);
}

static_assert(kSegmentTokens % kTileTokens == 0);

// Adds the tokens of a segment to its sums. Returns false if the mask has a weight that is neither
// 0 nor 1. The sums and outputs are then unfinished.
template <typename Evaluation, typename T>
bool run_tiles(const SmoothTokens<T>& segment, SmoothMask& mask, int64_t size,
               const Outputs<float, T>& outputs, const Limits<float>& limits,
               LaneSums<double>& of_segment) {
  alignas(64) LaneSums<float> sums;
  clear<Evaluation::kDepth>(sums);
  Evaluation evaluation(limits, sums);
  LastGroup<T> last;
  for (int64_t first = 0; first < size; first += kTileTokens) {
    const int64_t n = std::min(kTileTokens, size - first);
    const Bool* const bools = mask.read(first, n);
    if (bools == nullptr) return false;
    const SmoothTokens<T> tile = segment.from(first, bools);
    for (int64_t i = 0; i < n; i += kLanes) {
      SmoothTokens<T> group = tile.from(i);
      Outputs<float, T> to = outputs.from(first + i);
      group.from(kTileTokens).fetch();
      to.from(kTileTokens).fetch();
      const bool is_whole = i + kLanes <= n;
      if (!is_whole) {
        group = last.read(group, n - i);
        to = last.outputs(to);
      }
      add_group(group, to, evaluation);
      if (!is_whole) last.store(outputs.from(first + i), n - i);
    }
    evaluation.finish();
    flush<Evaluation::kDepth>(sums, of_segment);
  }
  return true;
}

template <typename T>
using RunTiles = bool (*)(const SmoothTokens<T>&, SmoothMask&, int64_t size,
                          const Outputs<float, T>&, const Limits<float>&, LaneSums<double>&);

template <typename E, Store stores, typename T>
RunTiles<T> choose_plain(const SegmentTask& task) {
  return task.want_statistics ? run_tiles<Plain<E, stores, Depth::kWanted>, T>
                              : run_tiles<Plain<E, stores, Depth::kAlways>, T>;
}

template <typename E, typename T>
RunTiles<T> choose_tiles(const SegmentTask& task) {
  const KlPenaltyInputs& in = *task.inputs;
  const bool stores_value = task.value.data != nullptr;
  const bool stores_gradient = task.grad_logprobs.data != nullptr;
  const bool is_plain = !in.options.has_limits() && in.old_logprobs.data == nullptr &&
                        task.grad_ref_logprobs.data == nullptr &&
                        !(stores_gradient && in.options.gradient == Gradient::kK2);
  if (is_plain && !stores_value && !stores_gradient) {
    return choose_plain<E, Store::kNothing, T>(task);
  }
  if (is_plain && !stores_value) return choose_plain<E, Store::kGradient, T>(task);
  if (is_plain && !stores_gradient) return choose_plain<E, Store::kValue, T>(task);
  return task.want_statistics ? run_tiles<Any<E, Depth::kLimited, float>, T>
                              : run_tiles<Any<E, Depth::kAlways, float>, T>;
}

// True if a task's log-probs and outputs fit smooth tokens. The weights of the mask are not read.
bool are_smooth(const SegmentTask& task) {
  const KlPenaltyInputs& in = *task.inputs;
  const DType dtype = in.logprobs.dtype;
  const auto is_smooth = [&](const View& view) {
    return view.column_stride == 1 && view.dtype == dtype;
  };
  const auto is_own = [&](const Output& output) {
    return output.data == nullptr || output.dtype == dtype;
  };
  return (dtype == DType::kFloat32 || dtype == DType::kBFloat16) && !in.is_double &&
         !in.is_weighted() && (in.mask.data == nullptr || in.mask.column_stride == 1) &&
         is_smooth(in.logprobs) && in.ref_logprobs.data != nullptr && is_smooth(in.ref_logprobs) &&
         (in.old_logprobs.data == nullptr || is_smooth(in.old_logprobs)) &&
         is_own(task.grad_logprobs) && is_own(task.grad_ref_logprobs) &&
         task.grad_out.data == nullptr && std::isfinite(static_cast<float>(task.grad_scale));
}

// The index of the last kept token among the first n, or -1.
int64_t last_kept(SmoothMask& mask, int64_t n) {
  for (int64_t first = (n - 1) / kTileTokens * kTileTokens; first >= 0; first -= kTileTokens) {
    const int64_t size = std::min(kTileTokens, n - first);
    const Bool* const kept = mask.read(first, size);
    for (int64_t i = size - 1; i >= 0; --i) {
      if (kept[i].byte != 0) return first + i;
    }
  }
  return -1;
}

// The number of kept tokens in a tile. Lanes count in bytes.
int64_t count_kept(const Bool* mask, int64_t n) {
  alignas(64) uint8_t lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) count_group(mask + i, lanes);
  int64_t count = 0;
  for (const uint8_t of_lane : lanes) count += of_lane;
  for (; i < n; ++i) count += mask[i].byte != 0;
  return count;
}

// The number of kept tokens in a segment. It is -1 if the mask has gaps, or a weight that is
// neither 0 nor 1.
int64_t read_smooth_mask(const KlPenaltyInputs& in, const Segment& segment) {
  if (in.mask.column_stride != 1) return -1;
  SmoothMask mask(in, segment);
  int64_t count = 0;
  for (int64_t first = 0; first < segment.length; first += kTileTokens) {
    const int64_t n = std::min(kTileTokens, segment.length - first);
    const Bool* const kept = mask.read(first, n);
    if (kept == nullptr) return -1;
    count += count_kept(kept, n);
  }
  return count;
}

// Returns false if the segment's mask has a weight that is neither 0 nor 1. Its outputs are then
// unfinished.
template <typename T>
bool run_smooth(const SegmentTask& task, const Segment& segment, Partial& partial) {
  const KlPenaltyInputs& in = *task.inputs;
  const int64_t row = in.batch.row(segment.sequence);
  const int64_t column = in.batch.column(segment.sequence, segment.position);
  const int64_t index = in.batch.start(segment.sequence) + segment.position;
  const auto input = [&](const View& view) {
    const T* const data = static_cast<const T*>(view.data);
    return data == nullptr ? nullptr : data + row * view.row_stride + column;
  };
  const auto output = [&](const Output& output, auto zero) {
    auto* const data = static_cast<decltype(zero)*>(output.data);
    return data == nullptr ? nullptr : data + index;
  };
  const SmoothTokens<T> tokens = {input(in.logprobs), input(in.ref_logprobs),
                                  input(in.old_logprobs), nullptr};
  const Outputs<float, T> outputs = {
      static_cast<float>(in.coef), static_cast<float>(task.grad_scale), output(task.value, float()),
      output(task.grad_logprobs, T()), output(task.grad_ref_logprobs, T())};
  RunTiles<T> run = nullptr;
  visit_row(estimators::EstimatorTable(), in.options.estimator,
            [&](auto estimator) { run = choose_tiles<decltype(estimator), T>(task); });
  SmoothMask mask(in, segment);
  alignas(64) LaneSums<double> sums;
  clear(task, sums);
  if (!run(tokens, mask, segment.length, outputs, limits_of<float>(in.options), sums)) return false;
  add_up(task, sums, partial);
  if (task.want_last_kept) {
    const int64_t last = last_kept(mask, segment.length);
    if (last >= 0) partial.last_kept = index + last;
  }
  return true;
}

bool run_smooth(const SegmentTask& task, const Segment& segment, Partial& partial) {
  if (!are_smooth(task)) return false;
  return task.inputs->logprobs.dtype == DType::kFloat32
             ? run_smooth<float>(task, segment, partial)
             : run_smooth<BFloat16>(task, segment, partial);
}

}  // namespace
}  // namespace klfast::cpu
