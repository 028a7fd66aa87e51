// Plain calls over log-probs on a GPU, and the lengths of sequences under a mask of bools.

#include "device/cuda/launch.h"
#include "penalty/cuda_launch.h"
#include "penalty/cuda_plain.h"
#include "penalty/cuda_weights.h"

namespace klfast::cuda {
namespace {

// The blocks on a processor and the chunks of each input that a lane requests at once: as many as
// the registers allow without spills. Either way a processor of an H100 has more than the 31 KB of
// requests that its memory needs to stay busy. A group takes two chunks in fp32.
template <typename T, Variant variant, bool kAligned>
inline constexpr int kPlainBlocks = sizeof(T) == 4 && has_gradient<variant> && !kAligned ? 3 : 4;
template <typename T, Variant variant, bool kAligned>
inline constexpr int kInFlight = sizeof(T) == 4 || (variant == Variant::kPlain && kAligned) ? 2 : 1;

template <typename T, Variant variant, bool kAligned>
__global__ void __launch_bounds__(kBlockThreads, kPlainBlocks<T, variant, kAligned>)
    plain_kernel(const __grid_constant__ Task task) {
  constexpr Depth depth = depth_of<variant>;
  constexpr int W = kSmoothWidth<T>;
  using Span = PlainSpan<PlainInputs<T, W, kAligned, kInFlight<T, variant, kAligned>>>;
  const KlPenaltyInputs& in = task.in;
  run_plain<depth, W, kAligned, Span>(
      task,
      [&](const Segment& segment) KLFAST_INLINE_LAMBDA {
        const auto first = [&](const View& view, int size) {
          return first_of<kAligned>(view, in.batch, segment, size);
        };
        Factors<float> factors = {};
        if (segment.exists && (variant == Variant::kPlainGradient || task.stored != 0)) {
          factors = plain_factors<variant>(task, segment.sequence);
        }
        return Span{{first(in.logprobs, sizeof(T)), first(in.ref_logprobs, sizeof(T)),
                     first(in.mask, 1), static_cast<int>(segment.size)},
                    factors,
                    variant == Variant::kPlainGradient
                        ? reinterpret_cast<const float*>(first(task.grad_out, sizeof(float)))
                        : nullptr,
                    segment.start + segment.position};
      },
      [&](const Span* span, int size, int position, LaneSums<float>& sums) KLFAST_INLINE_LAMBDA {
        run_lane<T, variant, kAligned>(task, span, size, position, sums);
      },
      [&](const Segment& segment, const Sums& sums)
          KLFAST_INLINE_LAMBDA { finish_segment<depth, float>(task, segment, sums); });
  if (task.arrivals != nullptr) finish_plain<depth>(task);
}

// Computes the weights of the sequences of a mean, because its gradient needs them first. If the
// weights of tokens are wanted too, the last block stores them.
template <typename Acc>
__global__ void __launch_bounds__(kBlockThreads, 4)
    plain_lengths_kernel(const __grid_constant__ Task task) {
  using Inputs = PlainInputs<Bool, kWidthOfMask, false>;
  using Span = PlainSpan<Inputs>;
  const KlPenaltyInputs& in = task.in;
  run_plain<Depth::kAlways, kWidthOfMask, false, Span>(
      task,
      [&](const Segment& segment) KLFAST_INLINE_LAMBDA {
        const char* const mask = first_of<false>(in.mask, in.batch, segment, 1);
        return Span{{nullptr, nullptr, mask, static_cast<int>(segment.size)}, {}, nullptr, 0};
      },
      [](const Span* span, int, int position, LaneSums<float>& sums) KLFAST_INLINE_LAMBDA {
        typename Inputs::Parts parts;
        span->inputs.load(position, parts);
        sums.at[kLength] = static_cast<float>(span->inputs.kept(position, parts).count());
      },
      [&](const Segment& segment, const Sums& sums) KLFAST_INLINE_LAMBDA {
        put<Depth::kAlways>(partials_of(task), segment.slot, sums, false);
      });
  finish_lengths<Acc, true>(task);
}

bool is_dense(const View& view) { return view.data == nullptr || view.column_stride == 1; }

// True if the rows of an input begin at whole vectors of `bytes` bytes.
bool is_aligned(const View& view, const Batch& batch, int bytes) {
  if (view.data == nullptr) return true;
  const int64_t row = batch.sequences > 1 ? view.row_stride * element_size(view.dtype) : 0;
  return reinterpret_cast<uintptr_t>(view.data) % bytes == 0 && row % bytes == 0;
}

template <typename T, bool kAligned>
void launch_plain(const Task& task, const Launch& on) {
  const bool stores_gradient = (task.stored & (kStoresGradient | kStoresRefGradient)) != 0;
  if (task.statistics != nullptr || task.scores.data != nullptr) {
    launch(plain_kernel<T, Variant::kPlainStatistics, kAligned>, task, on);
  } else if (stores_gradient) {
    launch(plain_kernel<T, Variant::kPlainGradient, kAligned>, task, on);
  } else {
    launch(plain_kernel<T, Variant::kPlain, kAligned>, task, on);
  }
}

}  // namespace

bool has_plain_mask(const View& mask) {
  return mask.data == nullptr || (mask.dtype == DType::kBool && is_dense(mask));
}

bool has_plain_kernel(const KlPenaltyInputs& in, const View& grad_out) {
  const DType dtype = in.logprobs.dtype;
  const bool has_one_dtype = in.ref_logprobs.data == nullptr || in.ref_logprobs.dtype == dtype;
  const bool sums_up = in.reduction.result != Result::kToken;
  return !in.options.has_limits() && in.old_logprobs.data == nullptr && !in.is_weighted() &&
         !in.is_double && has_one_dtype && is_dense(in.logprobs) && is_dense(in.ref_logprobs) &&
         has_plain_mask(in.mask) && (sums_up || grad_out.column_stride == 0 || is_dense(grad_out));
}

Grid plain_grid_of(const KlPenaltyInputs& in, int processors) {
  const int width = 16 / static_cast<int>(element_size(in.logprobs.dtype));
  return plain_grid_of(in.batch, kWarp * width, processors);
}

Grid lengths_grid_of(const Batch& batch, int processors) {
  return plain_grid_of(batch, kWarp * kWidthOfMask, processors);
}

void launch_plain(const Task& task, const Launch& on) {
  const KlPenaltyInputs& in = task.in;
  visit_dtype(in.logprobs.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (is_floating<T> && sizeof(T) <= 4) {
      constexpr int W = kSmoothWidth<T>;
      const Batch& batch = in.batch;
      const bool aligned = !batch.packed() && batch.width % W == 0 &&
                           is_aligned(in.logprobs, batch, 16) &&
                           is_aligned(in.ref_logprobs, batch, 16) && is_aligned(in.mask, batch, W);
      aligned ? launch_plain<T, true>(task, on) : launch_plain<T, false>(task, on);
    }
  });
}

void launch_plain_lengths(const Task& task, const Launch& on) {
  launch(task.in.is_double ? plain_lengths_kernel<double> : plain_lengths_kernel<float>, task, on);
}

}  // namespace klfast::cuda
