// The KL penalty on a GPU: kernels and launches.

#include "penalty/cuda.h"
#include "penalty/cuda_launch.h"
#include "penalty/cuda_tile.h"
#include "penalty/cuda_weights.h"

namespace klfast::cuda {
namespace {

// Runs the segments of this block's slots. One lane of a warp makes locate(segment), a span. All
// lanes call run(span, place, sums), which adds a chunk of W tokens to a lane's sums. One thread
// then calls finish(segment, sums). The warps of a segment take its tiles in turns. Segments and
// spans lie in shared memory. They are read again for each chunk, which saves a dozen registers.
template <Depth depth, int W, typename Acc, typename Locate, typename Run, typename Finish>
__device__ __forceinline__ void run_slots(const Task& task, const Locate& locate, const Run& run,
                                          const Finish& finish) {
  __shared__ LaneMemory<depth, Acc> memory;
  __shared__ Segment segments[kWarps];
  __shared__ Span<Acc> spans[kWarps];
  const int log2_warps = task.grid.log2_warps, warps = 1 << log2_warps;
  const int of_block = static_cast<int>(threadIdx.x) / kWarp, lane = threadIdx.x % kWarp;
  const int group = of_block >> log2_warps, warp = of_block & (warps - 1);
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * (kWarps >> log2_warps) + group;
  const Segment found = segment_of_slot(task.in.batch, task.grid, slot);
  if (lane == 0) {
    segments[of_block] = found;
    spans[of_block] = locate(found);
  }
  __syncwarp();
  const Segment& segment = segments[of_block];
  const bool follows = segment.sequence == task.in.batch.sequences;
  if (follows && segment.size > 0) {
    store_zeros(task, segment, threadIdx.x % (warps * kWarp), warps * kWarp);
  }
  SegmentSums<depth, Acc> segment_sums(memory, warps, group);
  const int size = follows ? 0 : static_cast<int>(segment.size);
  constexpr int kTile = kTileTokens;
#pragma unroll 1
  for (int tile = warp; tile * kTile < size; tile += warps) {
    LaneSums<Acc> sums = empty_lane<Acc>();
    const int end = min(size, (tile + 1) * kTile);
#pragma unroll 1
    for (int done = tile * kTile; done < end; done += kWarp * W) {
      run(opaque(&spans[of_block]), Place{done + lane * W, done + kWarp * W}, sums);
    }
    if (!task.backward) segment_sums.add(tile, sums);
  }
  if (task.backward) return;
  if (warps > 1) {
    __syncthreads();
  } else {
    __syncwarp();  // the lane that finishes sees what all lanes have stored
  }
  if (!segment.exists || warp != 0) return;
  const int tiles = static_cast<int>((segment.size + kTileTokens - 1) / kTileTokens);
  const Sums sums =
      segment_sums.finish(tiles, task.scores.data != nullptr, segment.start + segment.position);
  if (lane == 0) finish(segment, sums);
}

// The number of blocks on a processor: enough to hide the latency of memory, without spilled
// registers.
template <typename T>
inline constexpr int kBlocksPerProcessor = std::is_same_v<typename Source<T>::Acc, double> ? 1 : 2;

template <typename T>
__global__ void __launch_bounds__(kBlockThreads, kBlocksPerProcessor<T>)
    kl_penalty_kernel(const __grid_constant__ Task task,
                      const __grid_constant__ Limits<double> limits) {
  using Acc = typename Source<T>::Acc;
  constexpr Depth depth = Depth::kLimited;
  constexpr int W = kWidth<T>;
  const Limits<Acc> limit = limits_as<Acc>(limits);
  run_slots<depth, W, Acc>(
      task,
      [&](const Segment& segment) {
        Span<Acc> span = span_of<T>(task, segment);
        if (segment.exists) {
          span.factors = factors_of<Acc>(task, segment.sequence);
        }
        return span;
      },
      [&](const Span<Acc>& span, const Place& at, LaneSums<Acc>& sums)
          KLFAST_INLINE_LAMBDA { run_chunk<T, W>(task, limit, span, at, sums); },
      [&](const Segment& segment, const Sums& sums) {
        finish_segment<depth, Acc>(task, segment, sums);
      });
  if (task.arrivals != nullptr && arrives_last(task.arrivals)) {
    finish_batch<depth, Acc>(task);
  }
}

// Computes the weights of the sequences of a mean, because its gradient needs them first. The sum
// of a mask equals the sum of the kernel above, because weights are added in the same order.
template <typename Acc>
__global__ void __launch_bounds__(kBlockThreads, 4)
    lengths_kernel(const __grid_constant__ Task task) {
  constexpr int W = kWidth<AnyDtype<Acc>>;
  run_slots<Depth::kAlways, W, Acc>(
      task, [&](const Segment& segment) { return span_of<AnyDtype<Acc>>(task, segment); },
      [&](const Span<Acc>& span, const Place& at, LaneSums<Acc>& sums) KLFAST_INLINE_LAMBDA {
        Chunk<Acc, W> weights;
        load_weights(task.in.mask, span.mask, span.size, at, weights);
#pragma unroll
        for (int i = 0; i < W; ++i) sums.at[kLength] += weights.element[i];
      },
      [&](const Segment& segment, const Sums& sums) {
        put<Depth::kAlways>(partials_of(task), segment.slot, sums, false);
      });
  finish_lengths<Acc, false>(task);
}

template <typename Acc>
__global__ void __launch_bounds__(kBlockThreads)
    token_weights_kernel(const __grid_constant__ Task task) {
  // If no lengths were needed, all sequences have the same weight.
  const double weight = task.weights_known ? 1 : weight_before_sums<Acc>(task, 0);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  store_token_weights<Acc, false>(task, {coef_of(task.in) * weight, task.weights_known}, first,
                                  static_cast<int64_t>(gridDim.x) * kBlockThreads);
}

template <typename T>
__global__ void __launch_bounds__(kBlockThreads)
    scale_kernel(T* const data, const int64_t n, const __grid_constant__ View factor_view) {
  using Acc = typename Source<T>::Acc;
  constexpr int W = kSmoothWidth<T>;
  const double factor = read_element(factor_view, 0);
  if (factor == 1) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlockThreads * W;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x) * W; i < n;
       i += step) {
    Chunk<T, W> chunk = {};
    if (i + W <= n && reinterpret_cast<uintptr_t>(data) % Vectors<T, W>::kBytes == 0) {
      chunk = load_aligned<T, W, Memory::kReadWrite>(data + i);
    } else {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        if (i + j < n) chunk.element[j] = data[i + j];
      }
    }
    Chunk<Acc, W> values;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const Acc value = convert<Acc>(chunk.element[j]);
      // A masked token keeps its gradient of 0, even if the factor is infinite.
      values.element[j] = value != Acc(0) ? value * static_cast<Acc>(factor) : value;
    }
    store_chunk(data + i, static_cast<int>(n - i < W ? n - i : W), values);
  }
}

bool has_mixed_dtypes(const KlPenaltyInputs& in) {
  const DType dtype = in.logprobs.dtype;
  return (in.ref_logprobs.data != nullptr && in.ref_logprobs.dtype != dtype) ||
         (in.old_logprobs.data != nullptr && in.old_logprobs.dtype != dtype);
}

// True if the last block adds sums of several blocks: for a sum over all sequences, or for a
// sequence longer than a segment.
bool needs_last_block(const KlPenaltyInputs& in, const Grid& grid) {
  return in.reduction.result == Result::kScalar || longest_of(in.batch) > grid.segment();
}

bool wants_gradient(const KlPenaltyForward& out) {
  return out.grad_logprobs.data != nullptr || out.grad_ref_logprobs.data != nullptr;
}

// True if the weights of a gradient depend on lengths that only the device knows.
bool needs_lengths(const KlPenaltyInputs& in) {
  const bool unknown = in.mask.data != nullptr || in.batch.packed();
  return unknown && (in.reduction.own_length || in.reduction.uses_total(in.is_normalized()));
}

// The grid of a call that is not plain is made for the general kernel.
Grid grid_of_call(const KlPenaltyInputs& in, bool plain) {
  const int processors = this_chip().processors;
  return plain ? plain_grid_of(in, processors) : grid_of(in.batch, processors);
}

// The grid of a pass over the lengths.
Grid grid_of_lengths(const KlPenaltyInputs& in) {
  const int processors = this_chip().processors;
  return has_plain_mask(in.mask) ? lengths_grid_of(in.batch, processors)
                                 : grid_of(in.batch, processors);
}

int64_t partials_of(const Grid& grid, bool all) {
  return Partials::rows(all) * std::max<int64_t>(1, grid.slots);
}

Task task_of(const KlPenaltyInputs& in, bool plain) {
  Task task;
  task.in = in;
  task.grid = grid_of_call(in, plain);
  return task;
}

void launch_kl_penalty(Task task, bool plain, const Launch& on) {
  const KlPenaltyInputs& in = task.in;
  task.stored = stored_by(task);
  if (plain) return launch_plain(task, on);
  const Limits<double> limits = in.is_double ? limits_of<double>(in.options)
                                             : limits_as<double>(limits_of<float>(in.options));
  const auto launch_general = [&](void (*kernel)(Task, Limits<double>)) {
    launch(kernel, {task.grid.blocks, kBlockThreads}, on.stream, task, limits);
  };
  if (has_mixed_dtypes(in)) {
    return launch_general(in.is_double ? kl_penalty_kernel<AnyDtype<double>>
                                       : kl_penalty_kernel<AnyDtype<float>>);
  }
  visit_dtype(in.logprobs.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (is_floating<T>) launch_general(kl_penalty_kernel<T>);
  });
}

// Numbers of tokens have the same bits in any order. Weights of a mask are summed as in the general
// kernel.
void launch_lengths(Task task, const Launch& on) {
  task.grid = grid_of_lengths(task.in);
  if (has_plain_mask(task.in.mask)) return launch_plain_lengths(task, on);
  launch(task.in.is_double ? lengths_kernel<double> : lengths_kernel<float>, task, on);
}

}  // namespace

int64_t partials_needed(const KlPenaltyInputs& in, const KlPenaltyForward& out) {
  const bool plain = has_plain_kernel(in, {});
  const Grid grid = grid_of_call(in, plain);
  const bool all = !plain || out.statistics != nullptr || out.scores.data != nullptr;
  const int64_t own = needs_last_block(in, grid) ? partials_of(grid, all) : 0;
  const bool counts = wants_gradient(out) && needs_lengths(in);
  return std::max(own, counts ? partials_of(grid_of_lengths(in), false) : 0);
}

void kl_penalty_forward(const KlPenaltyInputs& in, const KlPenaltyForward& out, const Launch& on) {
  const bool plain = has_plain_kernel(in, {});
  Task task = task_of(in, plain);
  const DType acc = in.is_double ? DType::kFloat64 : DType::kFloat32;
  if (in.reduction.result == Result::kToken) {
    task.value = {out.result, acc};
  } else {
    task.result = out.result;
  }
  task.scores = out.scores;
  task.weights_out = out.weights;
  task.statistics = out.statistics;
  task.partials = on.partials;
  task.arrivals = on.arrivals;
  if (wants_gradient(out) && needs_lengths(in)) {
    launch_lengths(task, on);
    task.weights_known = true;
  }
  if (!needs_last_block(in, task.grid)) task.arrivals = nullptr;
  task.grad_logprobs = out.grad_logprobs;
  task.grad_ref_logprobs = out.grad_ref_logprobs;
  launch_kl_penalty(task, plain, on);
}

void kl_penalty_backward(const KlPenaltyInputs& in, const KlPenaltyBackward& out,
                         const Launch& on) {
  if (in.batch.tokens == 0) return;  // then grad_out is absent too
  const bool plain = has_plain_kernel(in, out.grad_out);
  Task task = task_of(in, plain);
  task.grad_logprobs = out.grad_logprobs;
  task.grad_ref_logprobs = out.grad_ref_logprobs;
  task.grad_out = out.grad_out;
  task.weights = out.weights;
  task.backward = true;
  launch_kl_penalty(task, plain, on);
}

int64_t doubles_for_token_weights(const KlPenaltyInputs& in) {
  return needs_lengths(in) ? partials_of(grid_of_lengths(in), false) + in.batch.sequences : 0;
}

void token_weights(const KlPenaltyInputs& in, void* weights, const Launch& on) {
  constexpr int64_t kFew =
      kSegmentTokens;  // tokens that one block stores while a launch would wait
  Task task = task_of(in, false);
  const Output out = {weights, in.is_double ? DType::kFloat64 : DType::kFloat32};
  if (needs_lengths(in)) {
    task.partials = on.partials;
    task.arrivals = on.arrivals;
    task.weights_out = on.partials + partials_of(grid_of_lengths(in), false);
    const bool are_few = in.batch.tokens <= kFew;
    if (are_few) task.grad_logprobs = out;
    launch_lengths(task, on);
    if (are_few) return;
    task.weights_known = true;
  }
  task.grad_logprobs = out;
  const int64_t blocks = (in.batch.tokens + kBlockThreads - 1) / kBlockThreads;
  const int64_t most_blocks = 2 * this_chip().processors;
  launch(in.is_double ? token_weights_kernel<double> : token_weights_kernel<float>,
         {static_cast<unsigned>(std::min(most_blocks, blocks)), kBlockThreads}, on.stream, task);
}

void scale(const Output& x, int64_t n, const View& factor, const Launch& on) {
  // Each block loops over its part. In most calls the factor is 1.
  const int64_t most_blocks = 2 * this_chip().processors;
  visit_dtype(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (is_floating<T>) {
      const int64_t per_block = kBlockThreads * kSmoothWidth<T>;
      const auto blocks =
          static_cast<unsigned>(std::min(most_blocks, (n + per_block - 1) / per_block));
      launch(scale_kernel<T>, {blocks, kBlockThreads}, on.stream, static_cast<T*>(x.data), n,
             factor);
    }
  });
}

}  // namespace klfast::cuda
