// The fused pass over the tokens of a segment. setup.py compiles this file once per instruction
// set, with KLFAST_INSTRUCTION_SET naming it; everything but the table at the end is internal to
// each copy.
//
// Tokens are read in tiles, a tile in groups of kLanes (lanes.h). The last group is padded with
// masked zeros, so that every token meets the same instructions.

#include "penalty/cpu_kernel.h"

#include <algorithm>

#include "device/cpu/ahead.h"
#include "device/cpu/instruction_set_table.h"
#include "device/cpu/tiles.h"
#include "formulas/token.h"
#include "penalty/cpu_smooth.h"
#include "penalty/cpu_sums.h"

namespace klfast::cpu {
namespace {

constexpr int64_t kBuffers = 8;  // of a tile, which stay in the first-level cache

// A tile in the arithmetic's type. size is a multiple of kLanes; differences are 0 where masked.
template <typename Acc>
struct TileData {
  int64_t size;
  const Acc* log_ratio;       // logprobs - ref_logprobs
  const Acc* log_importance;  // logprobs - old_logprobs; null without
  const Acc* weight;
  bool statistics;  // whether they are wanted
  Acc coef;
  Acc grad_scale;
  Acc* value;  // null, like the next two, if not wanted
  Acc* grad;
  Acc* grad_ref;
  Ahead ahead;
};

// The value and derivative of a group of a tile.
template <typename E, Range range, Store stores, Depth depth, typename Acc>
KLFAST_HOST_DEVICE void evaluate_group(const TileData<Acc>& data, int64_t first,
                                       LaneSums<Acc>& sums) {
  const Acc* log_ratio = data.log_ratio + first;
  const Acc* weights = data.weight + first;
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const Acc weight = weights[lane];
    const Acc x = log_ratio[lane];
    const auto formula = E::template at<range>(x);
    const Acc weighted = weight * formula.value;
    if constexpr (stores == Store::kValue) data.value[first + lane] = data.coef * weighted;
    if constexpr (stores == Store::kGradient) {
      data.grad[first + lane] = data.grad_scale * (weight * formula.derivative);
    }
    add_token<depth>(sums, lane, Observation<range, Acc>{weighted, weight, x, 0});
  }
}

// A tile without limits and importance weights, with the value's own gradient. Most groups have
// every |x| <= 1 and take the shorter branch, with the same bits.
template <typename E, typename Acc, Store stores, Depth depth>
void evaluate_plain(const TileData<Acc>& data, const Limits<Acc>&, LaneSums<Acc>& sums) {
  for (int64_t first = 0; first < data.size; first += kLanes) {
    data.ahead.fetch(first / kLanes);
    const Acc* log_ratio = data.log_ratio + first;
    typename math::Constants<Acc>::Bits far = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) far |= !math::is_near(log_ratio[lane]);
    if (far) {
      evaluate_group<E, Range::kAnywhere, stores, depth>(data, first, sums);
    } else {
      evaluate_group<E, Range::kNear, stores, depth>(data, first, sums);
    }
  }
}

// Adds a group of a tile to its sums.
template <Depth depth, typename Acc>
KLFAST_HOST_DEVICE void add_group(const Acc* values, const Acc* weights, const Acc* log_ratio,
                                  const typename math::Constants<Acc>::Bits* clipped,
                                  LaneSums<Acc>& sums) {
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    add_token<depth>(sums, lane,
                     Observation<Range::kAnywhere, Acc>{values[lane], weights[lane],
                                                        log_ratio[lane], clipped[lane]});
  }
}

// The results of a group's tokens, as Token, and their importances.
template <typename Acc>
struct GroupResults {
  using Bits = typename math::Constants<Acc>::Bits;
  alignas(64) Acc values[kLanes];
  alignas(64) Acc derivatives[kLanes];
  alignas(64) Acc ref_derivatives[kLanes];
  alignas(64) Bits clipped[kLanes];
  alignas(64) Acc importances[kLanes];
  alignas(64) Bits limited[kLanes];
};

// The largest |x|, and |log w| of importance weights w, up to which no limit of an estimator acts:
// 1 at most, or negative where a limit may act on any token.
// An estimator is at its largest at an end of [-1, 1].
template <typename E, typename Acc>
Acc free_range(const Limits<Acc>& limit) {
  using std::min;
  const Acc of_x = min(min(-limit.low, limit.high), limit.tail);
  const Acc range = min(min(of_x, limit.log_cap), Acc(1));
  const Acc most_weight = limit.clip_weighted ? Acc(3) : Acc(1);  // e at most
  for (const Acc x : {Acc(-1), Acc(1)}) {
    const Acc value = E::template at<Range::kNear>(x).value;
    if (!(math::magnitude(value) * most_weight < limit.kl_clip)) return -1;
  }
  return range;
}

template <typename Acc>
KLFAST_HOST_DEVICE bool are_within(const Acc* x, Acc range) {
  typename math::Constants<Acc>::Bits beyond = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) beyond |= !(math::magnitude(x[lane]) <= range);
  return beyond == 0;
}

// The results of a group on which no limit acts: the bits of evaluate_far_group() from a third of
// its work. Derivatives are computed where they are wanted.
template <typename E, bool differentiates, typename Acc>
KLFAST_HOST_DEVICE void evaluate_near_group(const Limits<Acc>& limit, const Acc* log_ratio,
                                            const Acc* log_importance, const Acc* weights,
                                            GroupResults<Acc>& results) {
  const bool k2_gradient = limit.k2_gradient, detached = limit.detached,
             clip_weighted = limit.clip_weighted;
  if (log_importance == nullptr) {
#pragma GCC ivdep
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const Acc x = log_ratio[lane];
      const auto formula = E::template at<Range::kNear>(x);
      results.values[lane] = weights[lane] * formula.value;
      if constexpr (differentiates) {
        results.derivatives[lane] =
            weights[lane] * math::select(k2_gradient, x, formula.derivative);
      }
    }
    if constexpr (differentiates) {
      std::copy(results.derivatives, results.derivatives + kLanes, results.ref_derivatives);
    }
    return;
  }
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const Acc x = log_ratio[lane];
    const Acc weight = weights[lane];
    const auto formula = E::template at<Range::kNear>(x);
    const Acc importance = math::exp<Range::kNear>(log_importance[lane]);
    const Acc scale = weight * importance;
    results.values[lane] =
        math::select(clip_weighted, weight * (importance * formula.value), scale * formula.value);
    if constexpr (differentiates) {
      const auto k2 = estimators::k2::at(x);
      const Acc df = math::select(k2_gradient, k2.derivative, formula.derivative);
      const Acc both =
          math::select(k2_gradient, k2.value_plus_derivative, formula.value_plus_derivative);
      results.derivatives[lane] = scale * math::select(detached, df, both);
      results.ref_derivatives[lane] = scale * df;
    }
  }
}

// The results of any group. In fp32 a weighted token with an extreme ratio is computed again in
// fp64; the token alone decides that.
template <typename E, typename Acc>
__attribute__((noinline)) void evaluate_far_group(const Limits<Acc>& limit, const Acc* log_ratio,
                                           const Acc* log_importances, const Acc* weights,
                                           GroupResults<Acc>& results) {
  const bool weighs = log_importances != nullptr;
  typename math::Constants<Acc>::Bits extreme = 0;
  if (weighs) {
#pragma GCC ivdep
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const Importance<Acc> importance = importance_of<Acc>(limit, log_importances[lane]);
      results.importances[lane] = importance.weight;
      results.limited[lane] = importance.limited;
      extreme |= is_extreme(log_ratio[lane]) | is_extreme(log_importances[lane]);
    }
  }
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const Acc weight = weights[lane];
    const Importance<Acc> importance = {results.importances[lane], results.limited[lane]};
    const Token<Acc> token =
        evaluate_token<E>(limit, weighs, weight != Acc(0), weight, log_ratio[lane], importance);
    results.values[lane] = token.value;
    results.derivatives[lane] = token.derivative;
    results.ref_derivatives[lane] = token.ref_derivative;
    results.clipped[lane] = token.clipped;
  }
  if constexpr (std::is_same_v<Acc, float>) {
    for (int64_t lane = 0; extreme && lane < kLanes; ++lane) {
      const Acc x = log_ratio[lane];
      if (!is_extreme(x) && !is_extreme(log_importances[lane])) continue;
      const Token<double> token =
          evaluate_token<E, Acc, double>(limits_as<double>(limit), weighs, weights[lane] != Acc(0),
                                         weights[lane], x, log_importances[lane]);
      results.values[lane] = static_cast<Acc>(token.value);
      results.derivatives[lane] = static_cast<Acc>(token.derivative);
      results.ref_derivatives[lane] = static_cast<Acc>(token.ref_derivative);
      results.clipped[lane] = static_cast<typename math::Constants<Acc>::Bits>(token.clipped);
    }
  }
}

// to = factor * from, for a group of an output that is wanted.
template <typename Acc>
KLFAST_HOST_DEVICE void store_group(Acc factor, const Acc* from, Acc* to) {
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) to[lane] = factor * from[lane];
}

// A tile with any options, and gradients to both log-probs. Code that not every call needs, or that
// is the same for every estimator, has a loop of its own.
template <typename E, typename Acc>
void evaluate_any(const TileData<Acc>& data, const Limits<Acc>& limits, LaneSums<Acc>& sums) {
  const bool weighs = data.log_importance != nullptr;
  const bool differentiates = data.grad != nullptr || data.grad_ref != nullptr;
  const Limits<Acc> limit = limits;
  const Acc range = free_range<E>(limit);
  GroupResults<Acc> results;
  std::fill(results.importances, results.importances + kLanes, Acc(1));
  std::fill(results.limited, results.limited + kLanes, 0);
  for (int64_t first = 0; first < data.size; first += kLanes) {
    data.ahead.fetch(first / kLanes);
    const Acc* log_ratio = data.log_ratio + first;
    const Acc* log_importances = weighs ? data.log_importance + first : nullptr;
    const Acc* weights = data.weight + first;
    if (are_within(log_ratio, range) && (!weighs || are_within(log_importances, range))) {
      if (differentiates) {
        evaluate_near_group<E, true>(limit, log_ratio, log_importances, weights, results);
      } else {
        evaluate_near_group<E, false>(limit, log_ratio, log_importances, weights, results);
      }
      std::fill(results.clipped, results.clipped + kLanes, 0);
    } else {
      evaluate_far_group<E>(limit, log_ratio, log_importances, weights, results);
    }
    if (data.value != nullptr) store_group(data.coef, results.values, data.value + first);
    if (data.grad != nullptr) store_group(data.grad_scale, results.derivatives, data.grad + first);
    if (data.grad_ref != nullptr) {
      store_group(-data.grad_scale, results.ref_derivatives, data.grad_ref + first);
    }
    if (data.statistics) {
      add_group<Depth::kLimited>(results.values, weights, log_ratio, results.clipped, sums);
    } else {
      add_group<Depth::kAlways>(results.values, weights, log_ratio, results.clipped, sums);
    }
  }
}

template <typename Acc>
using Evaluate = void (*)(const TileData<Acc>&, const Limits<Acc>&, LaneSums<Acc>&);

template <typename E, typename Acc, Store stores>
Evaluate<Acc> choose_plain(bool statistics) {
  return statistics ? evaluate_plain<E, Acc, stores, Depth::kWanted>
                    : evaluate_plain<E, Acc, stores, Depth::kAlways>;
}

// Only fp32 arithmetic has plain passes; fp64 is for checking, not for speed.
template <typename E, typename Acc>
Evaluate<Acc> choose(bool plain, Store stores, bool statistics) {
#ifndef NOPLAIN
  if constexpr (std::is_same_v<Acc, float>) {
    if (plain && stores == Store::kNothing)
      return choose_plain<E, Acc, Store::kNothing>(statistics);
    if (plain && stores == Store::kValue) return choose_plain<E, Acc, Store::kValue>(statistics);
    if (plain) return choose_plain<E, Acc, Store::kGradient>(statistics);
  }
#endif
  return evaluate_any<E, Acc>;
}

template <typename Acc>
Evaluate<Acc> choose(const SegmentTask& task) {
  const KlPenaltyInputs& inputs = *task.inputs;
  const EstimatorOptions& options = inputs.options;
  const bool stores_value = task.value.data != nullptr;
  const bool stores_gradient = task.grad_logprobs.data != nullptr;
  const bool plain = !options.has_limits() && options.gradient != Gradient::kK2 &&
                     inputs.old_logprobs.data == nullptr &&
                     task.grad_ref_logprobs.data == nullptr && !(stores_value && stores_gradient);
  const Store stores = stores_value      ? Store::kValue
                       : stores_gradient ? Store::kGradient
                                         : Store::kNothing;
  Evaluate<Acc> evaluate = nullptr;
  visit_row(estimators::Table(), options.estimator, [&](auto estimator) {
    evaluate = choose<decltype(estimator), Acc>(plain, stores, task.want_statistics);
  });
  return evaluate;
}

// The place of a tile in the inputs.
struct Tile {
  int64_t row;
  int64_t column;
  int64_t size;
  int64_t padded;  // size rounded up to whole groups
};

// The weights of a tile: the mask, or ones; zeros beyond its size.
template <typename Acc>
KLFAST_HOST_DEVICE const Acc* load_weights(const View& mask, const Tile& tile, Acc* buffer) {
  if (mask.data != nullptr) {
    return load_tile(mask, tile.row, tile.column, tile.size, tile.padded, buffer);
  }
  std::fill(buffer, buffer + tile.size, Acc(1));
  std::fill(buffer + tile.size, buffer + tile.padded, Acc(0));
  return buffer;
}

template <typename Acc, typename From>
KLFAST_HOST_DEVICE void subtract(const From* a, const From* b, const Acc* weights, int64_t n,
                                 Acc* difference) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    difference[i] =
        math::select(weights[i] != Acc(0), convert<Acc>(a[i]) - convert<Acc>(b[i]), Acc(0));
  }
}

// a - b where the weight is not 0, else 0. Masked elements are loaded and selected away, so NaN in
// them has no effect. b is 0 where absent.
template <typename Acc>
KLFAST_HOST_DEVICE void load_difference(const View& a, const View& b, const Tile& tile,
                                        const Acc* weights, Acc* difference, Acc* buffer) {
  std::fill(difference + tile.size, difference + tile.padded, Acc(0));
  if (b.data != nullptr && a.dtype == b.dtype && a.column_stride == 1 && b.column_stride == 1) {
    visit_dtype(a.dtype, [&](auto zero) __attribute__((always_inline)) {
      using From = decltype(zero);
      if constexpr (is_floating<From>) {
        subtract(static_cast<const From*>(a.data) + tile.row * a.row_stride + tile.column,
                 static_cast<const From*>(b.data) + tile.row * b.row_stride + tile.column, weights,
                 tile.size, difference);
      }
    });
    return;
  }
  const Acc* loaded = load_tile(a, tile.row, tile.column, tile.size, tile.padded, difference);
  const Acc* other = buffer;
  if (b.data != nullptr) {
    other = load_tile(b, tile.row, tile.column, tile.size, tile.padded, buffer);
  } else {
    std::fill(buffer, buffer + tile.padded, Acc(0));
  }
  subtract(loaded, other, weights, tile.padded, difference);
}

// grad *= factor where the weight is not 0, else exactly 0, whatever grad and factor hold there.
template <typename Acc>
KLFAST_HOST_DEVICE void multiply_kept(Acc* grad, const Acc* factor, const Acc* weights, int64_t n) {
  if (grad == nullptr) return;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    grad[i] = math::select(weights[i] != Acc(0), grad[i] * factor[i], Acc(0));
  }
}

bool can_be_bad(const View& mask) {
  return mask.data != nullptr && mask.dtype != DType::kBool && mask.dtype != DType::kUInt8;
}

template <typename Acc>
KLFAST_HOST_DEVICE bool any_bad(const Acc* weights, int64_t n) {
  int bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= !(weights[i] >= Acc(0) && weights[i] < Acc(INFINITY));
  return bad != 0;
}

Tile tile_of(const Batch& batch, const Segment& segment, int64_t done) {
  const int64_t size = std::min(kTileTokens, segment.length - done);
  return {batch.row(segment.sequence), batch.column(segment.sequence, segment.position + done),
          size, (size + kLanes - 1) / kLanes * kLanes};
}

// The memory of the next tile, where this one begins at `index` in the outputs.
Ahead ahead_of(const SegmentTask& task, const Tile& tile, int64_t index) {
  Ahead ahead;
  const KlPenaltyInputs& in = *task.inputs;
  for (const View* view : {&in.logprobs, &in.ref_logprobs, &in.mask, &in.old_logprobs}) {
    ahead.add(*view, tile.row, tile.column + kTileTokens);
  }
  ahead.add(task.value, index + kTileTokens);
  ahead.add(task.grad_logprobs, index + kTileTokens);
  ahead.add(task.grad_ref_logprobs, index + kTileTokens);
  return ahead;
}

template <typename Acc>
Partial run_segment(const SegmentTask& task, const Segment& segment) {
  const KlPenaltyInputs& in = *task.inputs;
  const Limits<Acc> limits = limits_of<Acc>(in.options);
  const Evaluate<Acc> evaluate = choose<Acc>(task);
  const bool check_mask = can_be_bad(in.mask);
  const int64_t first_index = in.batch.start(segment.sequence) + segment.position;
  alignas(64) Acc
      buffers[kBuffers][kTileTokens + kLanes];  // not a page apart, which would alias in the cache
  alignas(64) LaneSums<Acc> of_tile;
  alignas(64) LaneSums<double> of_segment;
  clear<Depth::kLimited>(of_tile);
  clear<Depth::kLimited>(of_segment);
  Partial partial;

  for (int64_t done = 0; done < segment.length; done += kTileTokens) {
    const Tile tile = tile_of(in.batch, segment, done);
    const int64_t n = tile.size;
    const int64_t index = first_index + done;
    TileData<Acc> data;
    data.size = tile.padded;
    data.ahead = ahead_of(task, tile, index);
    data.weight = load_weights(in.mask, tile, buffers[0]);
    load_difference(in.logprobs, in.ref_logprobs, tile, data.weight, buffers[1], buffers[7]);
    data.log_ratio = buffers[1];
    data.log_importance = nullptr;
    if (in.old_logprobs.data != nullptr) {
      load_difference(in.logprobs, in.old_logprobs, tile, data.weight, buffers[2], buffers[7]);
      data.log_importance = buffers[2];
    }
    data.statistics = task.want_statistics;
    data.coef = static_cast<Acc>(in.coef);
    data.grad_scale = static_cast<Acc>(task.grad_scale);
    const auto to = [&](const Output& output, Acc* buffer) {
      const bool is_wanted = output.data != nullptr;
      return is_wanted ? output_tile(output, index, n, tile.padded, buffer) : nullptr;
    };
    data.value = to(task.value, buffers[3]);
    data.grad = to(task.grad_logprobs, buffers[4]);
    data.grad_ref = to(task.grad_ref_logprobs, buffers[5]);
    evaluate(data, limits, of_tile);

    if (task.grad_out.data != nullptr) {
      const Acc* grad_out =
          load_tile(task.grad_out, tile.row, tile.column, n, tile.padded, buffers[6]);
      multiply_kept(data.grad, grad_out, data.weight, tile.padded);
      multiply_kept(data.grad_ref, grad_out, data.weight, tile.padded);
    } else if (!std::isfinite(static_cast<Acc>(task.grad_scale))) {  // 0 * infinity where masked
      std::fill(buffers[6], buffers[6] + tile.padded, Acc(1));
      multiply_kept(data.grad, buffers[6], data.weight, tile.padded);
      multiply_kept(data.grad_ref, buffers[6], data.weight, tile.padded);
    }
    store_tile(task.value, index, n, data.value);
    store_tile(task.grad_logprobs, index, n, data.grad);
    store_tile(task.grad_ref_logprobs, index, n, data.grad_ref);
    if (check_mask) partial.bad_mask |= any_bad(data.weight, n);
    if (task.want_last_kept) {
      for (int64_t i = n - 1; i >= 0; --i) {
        if (data.weight[i] == Acc(0)) continue;
        partial.last_kept = index + i;
        break;
      }
    }
    if (task.want_statistics) {
      flush<Depth::kLimited>(of_tile, of_segment);
    } else {
      flush<Depth::kAlways>(of_tile, of_segment);
    }
  }
  if (task.want_statistics) {
    add_up<Depth::kLimited>(of_segment, partial);
  } else {
    add_up<Depth::kAlways>(of_segment, partial);
  }
  return partial;
}

Partial run_segment(const SegmentTask& task, const Segment& segment) {
  if (is_smooth(task)) {
    return task.inputs->logprobs.dtype == DType::kBFloat16 ? run_smooth<BFloat16>(task, segment)
                                                           : run_smooth<float>(task, segment);
  }
  return task.inputs->is_double ? run_segment<double>(task, segment)
                                : run_segment<float>(task, segment);
}

// The sum of the weights, in the order in which run_segment adds them.
template <typename Acc>
Partial read_mask(const KlPenaltyInputs& in, const Segment& segment) {
  alignas(64) Acc buffer[kTileTokens];
  alignas(64) Acc lanes[kLanes] = {};
  alignas(64) double wide[kLanes] = {};
  Partial partial;
  for (int64_t done = 0; done < segment.length; done += kTileTokens) {
    const Tile tile = tile_of(in.batch, segment, done);
    const Acc* weights = load_weights(in.mask, tile, buffer);
    for (int64_t i = 0; i < tile.padded; i += kLanes) {
#pragma GCC ivdep
      for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += weights[i + lane];
    }
    if (can_be_bad(in.mask)) partial.bad_mask |= any_bad(weights, tile.size);
    flush(lanes, wide);
  }
  partial.at[kLength] = add_lanes(wide);
  return partial;
}

Partial read_mask(const KlPenaltyInputs& in, const Segment& segment) {
  return in.is_double ? read_mask<double>(in, segment) : read_mask<float>(in, segment);
}

void scale(const Output& output, int64_t n, double factor) {
  visit_dtype(output.dtype, [&](auto zero) __attribute__((always_inline)) {
    using T = decltype(zero);
    using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
    T* data = static_cast<T*>(output.data);
    if constexpr (is_floating<T>) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        // 0 stays 0: a masked token has no gradient, even if the factor is infinite.
        const Acc value = convert<Acc>(data[i]);
        const Acc scaled = value * static_cast<Acc>(factor);
        data[i] = convert<T>(math::select(value != Acc(0), scaled, value));
      }
    }
  });
}

}  // namespace

KLFAST_TABLE(Kernels, kernels) = {run_segment, read_mask, scale};

}  // namespace klfast::cpu
