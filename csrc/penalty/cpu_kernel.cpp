// The fused pass over the tokens of a segment. setup.py compiles this file once per instruction
// set, and KLFAST_INSTRUCTION_SET names the set. Only the table at the end is visible outside of a
// copy.
//
// Tokens are evaluated in groups of kLanes (lanes.h). Most tokens are smooth (cpu_smooth.h). Other
// tokens may have any dtype and stride, and are read in tiles. The last group of a tile is padded
// with masked zeros, so that every token takes the same instructions.

#include "penalty/cpu_kernel.h"

#include <algorithm>

#include "device/cpu/ahead.h"
#include "device/cpu/instruction_set_table.h"
#include "device/cpu/segment_tiles.h"
#include "penalty/cpu_evaluate.h"
#include "penalty/cpu_smooth.h"

namespace klfast::cpu {
namespace {

constexpr int64_t kBuffers = 9;  // buffers of a tile, which stay in the first-level cache

// A tile in the arithmetic's type. size is a multiple of kLanes.
template <typename Acc>
struct TileData {
  int64_t size;
  Group<Acc> groups;  // begins at the first group
  Outputs<Acc> outputs;
  Ahead ahead;
};

template <typename Acc>
using RunTile = void (*)(const TileData<Acc>&, const Limits<Acc>&, LaneSums<double>&);

template <typename E, Depth depth, typename Acc>
void run_tile(const TileData<Acc>& data, const Limits<Acc>& limits, LaneSums<double>& sums) {
  alignas(64) LaneSums<Acc> of_tile;
  clear<depth>(of_tile);
  Any<E, depth, Acc> evaluation(limits, of_tile);
  for (int64_t first = 0; first < data.size; first += kLanes) {
    data.ahead.fetch(first / kLanes);
    evaluation.add(data.groups.from(first), data.outputs.from(first));
  }
  flush<depth>(of_tile, sums);
}

template <typename Acc>
RunTile<Acc> choose_tile(const SegmentTask& task) {
  RunTile<Acc> run = nullptr;
  visit_row(estimators::EstimatorTable(), task.inputs->options.estimator, [&](auto estimator) {
    using E = decltype(estimator);
    run =
        task.want_statistics ? run_tile<E, Depth::kLimited, Acc> : run_tile<E, Depth::kAlways, Acc>;
  });
  return run;
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

// a - b where the weight is not 0, and 0 elsewhere. Masked elements are loaded and then replaced by
// 0, so a NaN in them has no effect. An absent b is 0.
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
  const Acc* loaded = load(a, tile, difference);
  const Acc* other = buffer;
  if (b.data != nullptr) {
    other = load(b, tile, buffer);
  } else {
    std::fill(buffer, buffer + tile.padded, Acc(0));
  }
  subtract(loaded, other, weights, tile.padded, difference);
}

// grad *= factor where the weight is not 0. Elsewhere grad becomes exactly 0, even from a NaN.
template <typename Acc>
KLFAST_HOST_DEVICE void multiply_kept(Acc* grad, const Acc* factor, const Acc* weights, int64_t n) {
  if (grad == nullptr) return;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    grad[i] = math::select(weights[i] != Acc(0), grad[i] * factor[i], Acc(0));
  }
}

// Multiplies values and gradients by the weights of a call, and adds the values to `lanes`. A
// weight counts as 0 where the mask is 0. Returns true if a weight is negative.
template <typename Acc>
KLFAST_HOST_DEVICE bool weigh(const View& weighting, const Tile& tile, const Acc* mask,
                              const Outputs<Acc>& outputs, Acc* weights, Acc* lanes) {
  const Acc* const loaded = load(weighting, tile, weights);
  int negative = 0;
#pragma GCC ivdep
  for (int64_t i = 0; i < tile.padded; ++i) {
    weights[i] = math::select(mask[i] != Acc(0), loaded[i], Acc(0));
    negative |= weights[i] < Acc(0);
  }
  for (Acc* const output : {outputs.value, outputs.grad, outputs.grad_ref}) {
    multiply_kept(output, weights, weights, tile.padded);
  }
  for (int64_t i = 0; i < tile.padded; i += kLanes) {
#pragma GCC ivdep
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += outputs.value[i + lane];
  }
  return negative != 0;
}

// The memory of the next tile.
Ahead ahead_of(const SegmentTask& task, const Tile& tile) {
  Ahead ahead;
  const KlPenaltyInputs& in = *task.inputs;
  for (const View* view : {&in.logprobs, &in.ref_logprobs, &in.mask, &in.old_logprobs}) {
    ahead.add(*view, tile.row, tile.column + kTileTokens);
  }
  ahead.add(task.value, tile.index + kTileTokens);
  ahead.add(task.grad_logprobs, tile.index + kTileTokens);
  ahead.add(task.grad_ref_logprobs, tile.index + kTileTokens);
  return ahead;
}

template <typename Acc>
Partial run_segment(const SegmentTask& task, const Segment& segment) {
  const KlPenaltyInputs& in = *task.inputs;
  const Limits<Acc> limits = limits_of<Acc>(in.options);
  const RunTile<Acc> run = choose_tile<Acc>(task);
  const bool check_mask = can_be_bad(in.mask);
  // Buffers a whole page apart would alias in the cache.
  alignas(64) Acc buffers[kBuffers][kTileTokens + kLanes];
  alignas(64) LaneSums<double> sums;
  clear(task, sums);
  alignas(64) Acc weighted[kLanes] = {};
  alignas(64) double wide_weighted[kLanes] = {};
  Partial partial;

  for (int64_t done = 0; done < segment.length; done += kTileTokens) {
    const Tile tile = tile_of(in.batch, segment, done);
    const int64_t n = tile.size, index = tile.index;
    const Acc* const weights = load_weights(in.mask, tile, buffers[0]);
    load_difference(in.logprobs, in.ref_logprobs, tile, weights, buffers[1], buffers[7]);
    const bool weighs = in.old_logprobs.data != nullptr;
    if (weighs) {
      load_difference(in.logprobs, in.old_logprobs, tile, weights, buffers[2], buffers[7]);
    }
    const auto to = [&](const Output& output, Acc* buffer, bool is_wanted) {
      return is_wanted ? output_tile(output, index, n, tile.padded, buffer) : nullptr;
    };
    const auto is_stored = [](const Output& output) { return output.data != nullptr; };
    // As on a GPU, the weights of a call come before other factors, with which the largest numbers
    // may overflow.
    const Acc coef = static_cast<Acc>(in.coef), grad_scale = static_cast<Acc>(task.grad_scale);
    const Outputs<Acc> outputs = {
        in.is_weighted() ? Acc(1) : coef, in.is_weighted() ? Acc(1) : grad_scale,
        to(task.value, buffers[3], is_stored(task.value) || in.is_weighted()),
        to(task.grad_logprobs, buffers[4], is_stored(task.grad_logprobs)),
        to(task.grad_ref_logprobs, buffers[5], is_stored(task.grad_ref_logprobs))};
    run({tile.padded,
         {buffers[1], weighs ? buffers[2] : nullptr, weights},
         outputs,
         ahead_of(task, tile)},
        limits, sums);

    const Acc* kept = weights;
    const auto scale_gradients = [&](const Acc* factors) {
      multiply_kept(outputs.grad, factors, kept, tile.padded);
      multiply_kept(outputs.grad_ref, factors, kept, tile.padded);
    };
    const auto filled = [&](Acc factor) {
      std::fill(buffers[6], buffers[6] + tile.padded, factor);
      return buffers[6];
    };
    if (in.is_weighted()) {
      Tile at = tile;
      at.row = segment.sequence;  // a packed batch too may have one weight for each sequence
      partial.bad_weights |= weigh(in.weighting, at, weights, outputs, buffers[8], weighted);
      flush(weighted, wide_weighted);
      kept = buffers[8];
      multiply_kept(outputs.value, filled(coef), kept, tile.padded);
      scale_gradients(filled(grad_scale));
    }
    if (task.grad_out.data != nullptr) {
      scale_gradients(load(task.grad_out, tile, buffers[6]));
    } else if (!std::isfinite(outputs.grad_scale)) {  // 0 * infinity is NaN where masked
      scale_gradients(filled(Acc(1)));
    }
    store_tile(task.value, index, n, outputs.value);
    store_tile(task.grad_logprobs, index, n, outputs.grad);
    store_tile(task.grad_ref_logprobs, index, n, outputs.grad_ref);
    if (check_mask) partial.bad_mask |= any_bad(weights, n);
    if (task.want_last_kept) {
      for (int64_t i = n - 1; i >= 0; --i) {
        if (weights[i] == Acc(0)) continue;
        partial.last_kept = index + i;
        break;
      }
    }
  }
  add_up(task, sums, partial);
  if (in.is_weighted()) partial.weighted = add_lanes(wide_weighted);
  return partial;
}

Partial run_segment(const SegmentTask& task, const Segment& segment) {
  if (Partial partial; run_smooth(task, segment, partial)) return partial;
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
  if (const int64_t count = read_smooth_mask(in, segment); count >= 0) {
    Partial partial;
    partial.at[kLength] = static_cast<double>(count);
    return partial;
  }
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
        // 0 stays 0, because a masked token has no gradient, even if the factor is infinite.
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
