// rollout_correction on a GPU: kernels and launches.
//
// One kernel reads every token once: it writes weights and masks as far as tokens decide them, and
// the totals of sequences, from which the statistics follow. Where totals decide, a second kernel
// writes what they decide for tokens.

#include "device/cuda/last_block.h"
#include "device/cuda/launch.h"
#include "rollout/cuda.h"
#include "rollout/cuda_fill.h"
#include "rollout/cuda_finish.h"
#include "rollout/cuda_run.h"

namespace klfast::rollout::cuda {
namespace {

// The flag is that of arrives_last.
static_assert(kWarps * (sizeof(Segment) + sizeof(Span)) + sizeof(bool) <= kStaticShared);

using Place = WarpPlace<Span>;

template <typename T, typename Acc>
__device__ __forceinline__ Place place_of(const Task<Acc>& task) {
  return place_of_warp<Span>(task.call.in.batch, task.grid,
                             [&](const Segment& segment) { return span_of<T>(task, segment); });
}

// Zeroes the outputs of tokens that belong to no sequence.
template <typename Acc>
__device__ __forceinline__ void store_zeros(const Task<Acc>& task, const Place& place) {
#pragma unroll 1
  for (int i = place.warp * kWarp + threadIdx.x % kWarp; i < place.span.size;
       i += place.warps * kWarp) {
    store_zero(task.call.out.weights, place.span.index + i);
    store_zero(task.call.out.mask, place.span.index + i);
  }
}

// The blocks on a processor: as many as registers allow without spills. Of kernels with rules, two
// would leave one register less than the binary divergences take.
template <typename Acc, bool kRules>
inline constexpr int kBlocksPerProcessor = sizeof(Acc) == 8 || kRules ? 1 : 2;

template <typename T, bool kRules, typename Acc = typename Source<T>::Acc>
__global__ void __launch_bounds__(kBlockThreads, kBlocksPerProcessor<Acc, kRules>)
    rollout_kernel(const __grid_constant__ Task<Acc> task) {
  const Batch& batch = task.call.in.batch;
  const int rules = kRules ? task.call.in.options.rules_count : 0;
  const Place place = place_of<T>(task);
  const bool follows = place.segment.sequence == batch.sequences;
  SegmentSums<Acc, kRules> sums(rules, place.warps, place.group, place.warp);
  if (follows) {
    store_zeros(task, place);
    sums.end({});
  } else {
    run_tiles<T, kRules>(task, place.span, Turns{place.warp, place.warps}, sums);
  }
  if (place.segment.exists && place.warp == 0) {
    const int tiles =
        (place.span.size + static_cast<int>(kTileTokens) - 1) / static_cast<int>(kTileTokens);
    double* const totals = sums.finish(tiles);
    const bool is_whole = segments_of(place.segment.length) == 1;
    if (threadIdx.x % kWarp == 0) {
      write_totals(task.bounds, sums, totals);
      if (is_whole) finish_sequence(task, place.segment.sequence, totals);
    }
    __syncwarp();
    if (!is_whole) put(task, place.segment.slot, totals);
  }
  if (task.arrivals != nullptr && arrives_last(task.arrivals)) finish_batch(task);
}

template <typename Acc>
__global__ void __launch_bounds__(kBlockThreads, 1)  // without the 1 it spills on sm_120
    fill_kernel(const __grid_constant__ Task<Acc> task) {
  const Place place = place_of<AnyDtype<Acc>>(task);
  if (place.segment.sequence == task.call.in.batch.sequences || place.span.size == 0) return;
  fill_tiles(task, place.span, Turns{place.warp, place.warps});
}

bool has_mixed_dtypes(const rollout::Inputs& in) {
  return in.logprobs.dtype != in.rollout_logprobs.dtype;
}

bool fills(const Options& options) {
  return options.weighs_sequences() || options.judges_sequences();
}

// Shared memory has no room for the tiles of fp64: a warp then reads a segment alone, as on a
// device that is full.
Grid grid_of(const rollout::Inputs& in) {
  return klfast::cuda::grid_of(in.batch, in.is_double ? 0 : this_chip().processors);
}

int64_t doubles_of_partials(const rollout::Inputs& in) {
  if (!has_long_sequences(in.batch)) return 0;
  return grid_of(in).slots * rows_of_totals(in.options.rules_count);
}

template <typename Acc>
Task<Acc> task_of(const Call& call, const Launch& on) {
  const TokenBounds<Acc> bounds(call.in.options);
  const double near = std::max<double>(bounds.near, 0);
  // A little less than the square, so that no rounding lets a bound act on a near token.
  const Acc far_squares = static_cast<Acc>(near * near * (1 - 1e-6));
  const int64_t partials = doubles_of_partials(call.in);
  Fill* const fill =
      fills(call.in.options) ? reinterpret_cast<Fill*>(on.partials + partials) : nullptr;
  return {call,
          bounds,
          far_squares,
          grid_of(call.in),
          on.partials,
          fill,
          has_long_sequences(call.in.batch) ? on.arrivals : nullptr};
}

template <typename T, bool kRules, typename Acc>
void launch_rollout(const Task<Acc>& task, const Launch& on) {
  const size_t shared = BlockMemory<Acc>::bytes(task.call.in.options.rules_count);
  launch(rollout_kernel<T, kRules>, {task.grid.blocks, kBlockThreads, 1, shared}, on.stream, task);
}

template <typename T, typename Acc>
void launch_rollout(const Task<Acc>& task, const Launch& on) {
  if (task.call.in.options.rules_count > 0) return launch_rollout<T, true>(task, on);
  launch_rollout<T, false>(task, on);
}

template <typename Acc>
void run(const Call& call, const Launch& on) {
  const Task<Acc> task = task_of<Acc>(call, on);
  if (has_mixed_dtypes(call.in)) {
    launch_rollout<AnyDtype<Acc>>(task, on);
  } else {
    visit_dtype(call.in.logprobs.dtype, [&](auto zero) {
      using T = decltype(zero);
      if constexpr (is_floating<T>) {
        if constexpr (std::is_same_v<typename Source<T>::Acc, Acc>) launch_rollout<T>(task, on);
      }
    });
  }
  if (task.fills == nullptr || call.in.batch.tokens == 0) return;
  launch(fill_kernel<Acc>, {task.grid.blocks, kBlockThreads}, on.stream, task);
}

}  // namespace
}  // namespace klfast::rollout::cuda

namespace klfast::cuda {

int64_t rollout_doubles_needed(const rollout::Inputs& in) {
  constexpr int64_t kDoubles = sizeof(rollout::Fill) / sizeof(double);
  const int64_t fills = rollout::cuda::fills(in.options) ? kDoubles * in.batch.sequences : 0;
  return rollout::cuda::doubles_of_partials(in) + fills;
}

void rollout_correction(const rollout::Call& call, const Launch& on) {
  if (call.in.is_double) return rollout::cuda::run<double>(call, on);
  rollout::cuda::run<float>(call, on);
}

}  // namespace klfast::cuda
