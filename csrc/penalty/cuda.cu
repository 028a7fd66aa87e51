// The KL penalty on a GPU: kernels and launches.

#include "device/cuda/launch.h"
#include "penalty/cuda.h"
#include "penalty/cuda_run.h"
#include "penalty/cuda_weights.h"

namespace klfast::cuda {
namespace {

template <typename Acc>
__device__ __forceinline__ Factors<Acc> factors_of(const Task& task, const Scalars& scalars,
                                                   int64_t sequence) {
  const Result result = task.in.reduction.result;
  double gradient = scalars.coef;
  if (task.backward) {
    gradient *= static_cast<const Acc*>(task.weights.data)[sequence * task.weights.column_stride];
    if ((task.stored & kTimesGradOut) == 0) {
      const View& grad_out = task.grad_out;
      const int64_t stride =
          result == Result::kToken ? grad_out.row_stride : grad_out.column_stride;
      const int64_t index = result == Result::kScalar ? 0 : sequence * stride;
      gradient *= static_cast<const Acc*>(grad_out.data)[index];
    }
  } else if (task.grad_logprobs.data != nullptr || task.grad_ref_logprobs.data != nullptr) {
    gradient *= weight_before_sums<Acc>(task, scalars, sequence);
  }
  return {static_cast<Acc>(scalars.coef), static_cast<Acc>(gradient)};
}

// Coefficient and normalizer of the call. One thread reads them for the whole block.
__device__ __forceinline__ const Scalars& shared_scalars(const KlPenaltyInputs& in) {
  __shared__ Scalars scalars;
  if (threadIdx.x == 0) scalars = scalars_of(in);
  __syncthreads();
  return scalars;
}

// Runs the segments of this block's slots. locate(segment) returns a Span. Every warp calls
// run(span, sequence, turns, flush), then one thread of each slot calls finish(segment, sums).
template <Depth depth, typename Acc, typename Locate, typename Run, typename Finish>
__device__ __forceinline__ void run_slots(const Task& task, const Locate& locate, const Run& run,
                                          const Finish& finish) {
  __shared__ LaneMemory<depth, Acc> memory;
  const auto [group, warp, warps, segment, span] =
      place_of_warp<Span>(task.in.batch, task.grid, locate);
  const bool follows = segment.sequence == task.in.batch.sequences;
  if (follows && segment.size > 0) {
    store_zeros(task, segment, threadIdx.x % (warps * kWarp), warps * kWarp);
  }
  SegmentSums<depth, Acc> segment_sums(memory, warps, group);
  if (!follows) {
    run(span, segment.sequence, Turns{warp, warps},
        [&](int tile, const LaneSums<Acc>& sums) KLFAST_INLINE_LAMBDA {
          if (!task.backward) segment_sums.add(tile, sums);
        });
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
  if (threadIdx.x % kWarp == 0) finish(segment, sums);
}

// Gradients of 16-bit types take more registers on compute capability 12.0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
inline constexpr int kBlocksOfGradient = 2;
#else
inline constexpr int kBlocksOfGradient = 3;
#endif

// The number of blocks on a processor: enough to hide the latency of memory, without spilled
// registers.
template <typename T, Variant variant>
inline constexpr int kBlocksPerProcessor =
    variant == Variant::kPlain                             ? 3
    : variant == Variant::kPlainGradient && sizeof(T) == 2 ? kBlocksOfGradient
    : std::is_same_v<typename Source<T>::Acc, double>      ? 1  // two spill on sm_100
                                                           : 2;

template <typename T, Variant variant>
__global__ void __launch_bounds__(kBlockThreads, kBlocksPerProcessor<T, variant>)
    kl_penalty_kernel(const __grid_constant__ Task task) {
  using Acc = typename Source<T>::Acc;
  constexpr Depth depth = depth_of<variant>;
  const Partials partials = {task.partials, task.grid.slots};
  const Scalars& scalars = shared_scalars(task.in);
  run_slots<depth, Acc>(
      task, [&](const Segment& segment) { return span_of<T, variant>(task, segment); },
      [&](const Span& span, int64_t sequence, const Turns& turns, const auto& flush)
          KLFAST_INLINE_LAMBDA {
            const Factors<Acc> factors = factors_of<Acc>(task, scalars, sequence);
            run_tiles<T, variant>(task, limits_as<Acc>(task.limits), factors, span, turns, flush);
          },
      [&](const Segment& segment, const Sums& sums) {
        if (task.in.reduction.result != Result::kScalar && segments_of(segment.length) == 1) {
          finish_sequence<depth, Acc>(task, scalars, segment.sequence, sums, 0);
        } else {
          put<depth>(partials, segment.slot, sums, task.scores.data != nullptr);
        }
      });
  if (task.arrivals != nullptr && arrives_last(task.arrivals)) {
    finish_batch<depth, Acc>(task, scalars, partials);
  }
}

// Computes the weights of the sequences of a mean, because its gradient needs them first. If the
// weights of tokens are wanted too, the last block stores them.
template <typename Acc, int W>
__global__ void __launch_bounds__(kBlockThreads, 4)
    lengths_kernel(const __grid_constant__ Task task) {
  const Partials partials = {task.partials, task.grid.slots};
  const Scalars& scalars = shared_scalars(task.in);
  run_slots<Depth::kAlways, Acc>(
      task,
      [&](const Segment& segment) { return span_of<AnyDtype<Acc>, Variant::kAny>(task, segment); },
      [&](const Span& span, int64_t, const Turns& turns, const auto& flush)
          KLFAST_INLINE_LAMBDA { run_lengths<W, Acc>(task, span, turns, flush); },
      [&](const Segment& segment, const Sums& sums) {
        put<Depth::kAlways>(partials, segment.slot, sums, false);
      });
  if (!arrives_last(task.arrivals)) return;
  finish_lengths<Acc>(task, scalars, partials);
  if constexpr (W <= 4) {  // calls with wider lanes want no weights of tokens
    if (task.grad_logprobs.data == nullptr) return;
    __syncthreads();
    store_token_weights<Acc>(task, {scalars.coef, true}, threadIdx.x, kBlockThreads);
  }
}

template <typename Acc>
__global__ void __launch_bounds__(kBlockThreads)
    token_weights_kernel(const __grid_constant__ Task task) {
  const Scalars& scalars = shared_scalars(task.in);
  // If no lengths were needed, all sequences have the same weight.
  const double weight = task.weights_known ? 1 : weight_before_sums<Acc>(task, scalars, 0);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  store_token_weights<Acc>(task, {scalars.coef * weight, task.weights_known}, first,
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

void launch(void (*kernel)(Task), const Task& task, const Launch& on) {
  launch(kernel, {task.grid.blocks, kBlockThreads}, on.stream, task);
}

bool has_mixed_dtypes(const KlPenaltyInputs& in) {
  const DType dtype = in.logprobs.dtype;
  return (in.ref_logprobs.data != nullptr && in.ref_logprobs.dtype != dtype) ||
         (in.old_logprobs.data != nullptr && in.old_logprobs.dtype != dtype);
}

// True if a plain kernel can run the call. There is none for fp64 and mixed dtypes, which serve for
// checks and not for speed.
bool is_plain_call(const KlPenaltyInputs& in) {
  return !in.options.has_limits() && in.options.gradient != Gradient::kK2 &&
         in.old_logprobs.data == nullptr && !in.is_weighted() && !in.is_double &&
         !has_mixed_dtypes(in);
}

// True if the last block adds sums of several blocks: for a sum over all sequences, or for a
// sequence longer than a segment.
bool needs_last_block(const KlPenaltyInputs& in) {
  return in.reduction.result == Result::kScalar || has_long_sequences(in.batch);
}

bool wants_gradient(const KlPenaltyForward& out) {
  return out.grad_logprobs.data != nullptr || out.grad_ref_logprobs.data != nullptr;
}

// True if the weights of a gradient depend on lengths that only the device knows.
bool needs_lengths(const KlPenaltyInputs& in) {
  const bool unknown = in.mask.data != nullptr || in.batch.packed();
  return unknown && (in.reduction.own_length || in.reduction.uses_total(in.is_normalized()));
}

int64_t partials_of(const KlPenaltyInputs& in, bool all) {
  return Partials::rows(all) * std::max<int64_t>(1, grid_of(in.batch, 1).slots);
}

Task task_of(const KlPenaltyInputs& in) {
  Task task;
  task.in = in;
  task.limits = in.is_double ? limits_of<double>(in.options)
                             : limits_as<double>(limits_of<float>(in.options));
  task.grid = grid_of(in.batch, this_chip().processors);
  return task;
}

template <typename T>
void launch_kl_penalty(const Task& task, const Launch& on) {
  if constexpr (!std::is_same_v<typename Source<T>::Acc, double>) {
    const bool adds_more = task.statistics != nullptr || task.scores.data != nullptr;
    if (is_plain_call(task.in) && adds_more) {
      return launch(kl_penalty_kernel<T, Variant::kPlainStatistics>, task, on);
    }
    const bool stores_gradient =
        task.grad_logprobs.data != nullptr || task.grad_ref_logprobs.data != nullptr;
    if (is_plain_call(task.in) && stores_gradient) {
      return launch(kl_penalty_kernel<T, Variant::kPlainGradient>, task, on);
    }
    if (is_plain_call(task.in)) return launch(kl_penalty_kernel<T, Variant::kPlain>, task, on);
  }
  launch(kl_penalty_kernel<T, Variant::kAny>, task, on);
}

void launch_kl_penalty(Task task, const Launch& on) {
  const KlPenaltyInputs& in = task.in;
  task.stored = stored_by(task);
  if (has_mixed_dtypes(in)) {
    return in.is_double ? launch(kl_penalty_kernel<AnyDtype<double>, Variant::kAny>, task, on)
                        : launch(kl_penalty_kernel<AnyDtype<float>, Variant::kAny>, task, on);
  }
  visit_dtype(in.logprobs.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (is_floating<T>) launch_kl_penalty<T>(task, on);
  });
}

// The lanes are as wide as in the kernel that follows, so that both sum the mask to the same bits.
void launch_lengths(const Task& task, const Launch& on) {
  if (task.in.is_double) return launch(lengths_kernel<double, 2>, task, on);
  const bool wide = is_plain_call(task.in) && element_size(task.in.logprobs.dtype) == 2;
  launch(wide ? lengths_kernel<float, 8> : lengths_kernel<float, 4>, task, on);
}

}  // namespace

int64_t partials_needed(const KlPenaltyInputs& in, const KlPenaltyForward& out) {
  if (!needs_last_block(in)) return 0;
  const bool all = !is_plain_call(in) || out.statistics != nullptr || out.scores.data != nullptr;
  return partials_of(in, all);
}

void kl_penalty_forward(const KlPenaltyInputs& in, const KlPenaltyForward& out, const Launch& on) {
  Task task = task_of(in);
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
  task.arrivals = needs_last_block(in) ? on.arrivals : nullptr;
  if (wants_gradient(out) && needs_lengths(in)) {
    launch_lengths(task, on);
    task.weights_known = true;
  }
  task.grad_logprobs = out.grad_logprobs;
  task.grad_ref_logprobs = out.grad_ref_logprobs;
  launch_kl_penalty(task, on);
}

void kl_penalty_backward(const KlPenaltyInputs& in, const KlPenaltyBackward& out,
                         const Launch& on) {
  if (in.batch.tokens == 0) return;  // then grad_out is absent too
  Task task = task_of(in);
  task.grad_logprobs = out.grad_logprobs;
  task.grad_ref_logprobs = out.grad_ref_logprobs;
  task.grad_out = out.grad_out;
  task.weights = out.weights;
  task.backward = true;
  launch_kl_penalty(task, on);
}

int64_t doubles_for_token_weights(const KlPenaltyInputs& in) {
  return needs_lengths(in) ? partials_of(in, false) + in.batch.sequences : 0;
}

void token_weights(const KlPenaltyInputs& in, void* weights, const Launch& on) {
  constexpr int64_t kFew =
      kSegmentTokens;  // tokens that one block stores while a launch would wait
  Task task = task_of(in);
  const Output out = {weights, in.is_double ? DType::kFloat64 : DType::kFloat32};
  if (needs_lengths(in)) {
    task.partials = on.partials;
    task.arrivals = on.arrivals;
    task.weights_out = on.partials + partials_of(in, false);
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
