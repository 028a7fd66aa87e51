// Gradients of divergences of rows: kernel and launches.

#include "logits/cuda.h"
#include "logits/cuda_cluster.h"
#include "logits/cuda_divergence_gradients.h"

namespace klfast::cuda {
namespace {

using divergences::RowState;

struct BackwardTask {
  DivergenceBackward call;
  PiecePlan plan;
  divergences::Fit fit;
};

// It is called, so that it takes no registers of the loops.
template <typename Acc>
__device__ __noinline__ bool has_gradient(const DivergenceBackward& call, int64_t index) {
  return has_incoming<Acc>(call, index);
}

// The number of blocks on a processor. It leaves each block the registers that it needs.
template <typename T, typename Divergences, EntropyOf of>
constexpr int kTogetherOfGradients =
    is_any_dtype<T> || !Divergences::kIsKl || of != EntropyOf::kNone ? 4 : 6;

// `memory` is kReadWrite if the gradients overwrite the logits. A thread then reads each chunk
// before it overwrites it. Loads of other memory may be moved before stores, which halves the
// instructions.
template <typename T, typename Divergences, EntropyOf of, Memory memory>
__global__ void __launch_bounds__(kPairThreads, kTogetherOfGradients<T, Divergences, of>)
    divergence_backward_kernel(const __grid_constant__ BackwardTask task) {
  using Acc = AccOf<T>;
  const DivergenceBackward& call = task.call;
  const RowInputs& in = call.in.rows;
  const int64_t index = task.plan.row_of_block();
  const Part place = task.plan.part_of_block(in.shape.words);
  if (!in.keeps(index) || !has_gradient<Acc>(call, index)) {
    const int64_t first = index * in.shape.words + place.begin;
    write_zeros(call.grad_first, first, place.size);
    write_zeros(call.grad_second, first, place.size);
    return;
  }
  __shared__ PairGradient<Acc> gradient;
  __shared__ Frame<Acc, 2> frame;
  __shared__ Acc target_gradient[2];
  __shared__ divergences::EntropyGradient<Acc> of_entropy;
  if (threadIdx.x == 0) {
    const RowState state = state_of<Acc>(call, index);
    const auto exact = divergences::guess_of<Acc, kBase<Acc>>(
        divergences::scale_of(in.scale(index), state.origins), state.lse, state.shift);
    frame = Frame<Acc, 2>::of(state.origins);
    Divergences::visit(call.in.divergence, [&](auto divergence) {
      using Row = decltype(divergence);
      gradient =
          PairGradient<Acc>::of(divergences::gradient_of<Row>(exact, call.in.parameter, state),
                                Row::kIsKl, call.grad_second.data == nullptr, frame);
    });
    target_gradient[0] = static_cast<Acc>(state.grad_logprob);
    target_gradient[1] = static_cast<Acc>(state.grad_ref_logprob);
    if constexpr (of != EntropyOf::kNone) {
      of_entropy = divergences::entropy_gradient_of(
          exact, state.lse, state.shift, of, number_at<Acc>(call.entropy, index),
          number_at<Acc>(call.grad_entropy, index) * in.scale(index));
    }
  }
  __syncthreads();
  const auto part_at = [&](int64_t zero) {
    auto part = gradient_part<T>(call.in, call.grad_first, call.grad_second, index + zero, place,
                                 frame.if_any());
    part.target = target_in(in, index + zero, place);
    part.target_gradient[0] = target_gradient[0];
    part.target_gradient[1] = target_gradient[1];
    return part;
  };
  Divergences::visit(call.in.divergence, [&](auto divergence) KLFAST_INLINE_LAMBDA {
    write_gradients<T, memory>(part_at, [&] {
      return PairFormula<decltype(divergence), T, of>(gradient, task.fit, of_entropy);
    });
  });
}

// The model whose entropy has an incoming gradient, if that model's own gradient is wanted.
EntropyOf entropy_of(const DivergenceBackward& call) {
  const Output& grad = call.in.entropy_of == EntropyOf::kFirst ? call.grad_first : call.grad_second;
  const bool is_wanted = call.grad_entropy != nullptr && grad.data != nullptr;
  return is_wanted ? call.in.entropy_of : EntropyOf::kNone;
}

template <typename T, typename Divergences, EntropyOf of>
void launch_backward(BackwardTask task, void* stream) {
  const LogitsShape& shape = task.call.in.rows.shape;
  task.plan = plan_pieces(shape.words, kChunk<T>, shape.rows(), kPairThreads, this_chip());
  if constexpr (of == EntropyOf::kNone) {  // with an entropy no gradient is in the logits' memory
    if (is_over_logits(task.call.in, task.call.grad_first, task.call.grad_second)) {
      return launch_rows(divergence_backward_kernel<T, Divergences, of, Memory::kReadWrite>,
                         shape.rows(), 1, 0, task, stream);
    }
  }
  launch_rows(divergence_backward_kernel<T, Divergences, of, Memory::kReadOnly>, shape.rows(), 1, 0,
              task, stream);
}

}  // namespace

void run_rows(const DivergenceBackward& call, void* stream) {
  if (call.grad_first.data == nullptr && call.grad_second.data == nullptr) return;
  BackwardTask task = {call, {}, {}};
  join_batches(task.call.in.rows.shape, call.in.first, call.in.second);
  visit_kernel(call.in, entropy_of(call), [&](auto source, auto served, auto tag, const auto& fit) {
    task.fit = fit;
    launch_backward<typename decltype(source)::Type, decltype(served), decltype(tag)::value>(
        task, stream);
  });
}

}  // namespace klfast::cuda
