// Log-probs of tokens and entropies of rows of one model, and their gradients: kernels and
// launches.

#include "formulas/divergences.h"
#include "logits/cuda.h"
#include "logits/cuda_gradients.h"
#include "logits/cuda_team.h"

namespace klfast::cuda {
namespace {

using passes::Step;
using passes::Verdict;

struct ForwardTask {
  TokenLogprobsForward call;
  RowPlan plan;
};

struct BackwardTask {
  TokenLogprobsBackward call;
  PiecePlan plan;
};

// The shared memory of a block: written by its first thread, read by all.
template <typename Acc>
struct Shared {
  Exchange exchange;
  Frame<Acc, 1> frame;
  Acc scale;  // of placed words
  Acc guess;
  Step step;
  double origin;
  double lse;
  double entropy;
};

constexpr int64_t kState = (sizeof(Shared<double>) + 15) / 16 * 16;

template <bool kEntropy, typename Rows, typename Acc>
__device__ __forceinline__ void sum_words(const Rows& rows, Acc scale, Acc guess,
                                          const Frame<Acc, 1>* frame,
                                          double (&sums)[1 + kEntropy]) {
  Acc mass = 0;
  Acc moment = 0;
#pragma unroll
  for (int i = 0; i < 1 + kEntropy; ++i) sums[i] = 0;
  const auto add = [&](int, const auto& fetch) {
    auto placed = convert_words<typename Rows::Type>(fetch);
    place_words<typename Rows::Type>(placed, frame);
    const auto& words = placed.of[0];
#pragma unroll
    for (int i = 0; i < kChunk<typename Rows::Type>; ++i) {
      const auto word = divergences::word_of(words.element[i], scale, guess);
      mass += word.mass;
      if constexpr (kEntropy) moment += word.moment;
    }
  };
  for_each_group<4>(rows, add, [&] {
    sums[0] += mass;
    if constexpr (kEntropy) sums[1] += moment;
    mass = moment = 0;
  });
}

// Takes the greatest word as the guess, and chooses the next step. Run by the first thread.
template <typename Acc>
__device__ __forceinline__ void judge_greatest(double greatest, double scale, Shared<Acc>& shared) {
  const bool is_finite = std::isfinite(greatest);
  shared.lse = shared.entropy = NAN;
  if (is_finite) {
    const divergences::Origins origins = {divergences::origin_of(greatest, scale), 0};
    shared.origin = origins.first;
    shared.frame = Frame<Acc, 1>::of(origins);
    shared.scale = static_cast<Acc>(scale / divergences::unit_of(origins));
    shared.guess =
        divergences::placed(static_cast<Acc>(greatest), shared.frame.unit, shared.frame.origin[0]) *
        shared.scale;
  }
  shared.step = passes::next_step(shared.step, is_finite ? Verdict::kGood : Verdict::kUseless);
}

// Takes the row's results from its sums, and chooses the next step. Run by the first thread.
template <typename Acc>
__device__ __noinline__ void judge_sums(double mass, double moment, Shared<Acc>& shared) {
  const double log_mass = std::log(mass);
  const double entropy = log_mass - moment / mass;
  const double lse = static_cast<double>(shared.guess) + log_mass;
  shared.lse = lse;
  shared.entropy = entropy < 0 ? 0 : entropy;
  shared.step = passes::next_step(shared.step, passes::verdict_of(mass));
  if (shared.step == Step::kSumAgain) shared.guess = static_cast<Acc>(lse);
}

// lse and entropy of a row, in shared, by the passes of passes.h.
template <bool kEntropy, typename Rows, typename Acc>
__device__ __forceinline__ void sum_row(const Rows& rows, double scale, Team& team,
                                        Shared<Acc>& shared) {
  const bool decides = threadIdx.x == 0;
  if (decides) {
    shared.step = Step::kFindFirst;
    shared.origin = 0;
  }
#pragma unroll 1
  for (Step step = Step::kFindFirst; step != Step::kDone; step = shared.step) {
    if (step == Step::kFindFirst || step == Step::kFindInRow) {
      double greatest[1];
      find_greatest(rows, step == Step::kFindFirst ? 1 : rows.rounds.some, greatest);
      team.combine<Greatest>(greatest);
      if (decides) judge_greatest(greatest[0], scale, shared);
    } else {
      const Acc guess = shared.guess;
      double sums[1 + kEntropy];
      sum_words<kEntropy>(rows, shared.scale, guess, shared.frame.if_any(), sums);
      team.combine<Add>(sums);
      if (decides) judge_sums(sums[0], kEntropy ? sums[kEntropy] : 0, shared);
    }
    __syncthreads();
  }
}

template <typename Acc>
__device__ __forceinline__ void store_row(const TokenLogprobsForward& call, int64_t index,
                                          double logprob, double origin, double lse,
                                          double entropy) {
  const int64_t rows = call.in.shape.rows();
  store_number<Acc>(call.logprobs, index, logprob);
  store_number<Acc>(call.entropy, index, entropy);
  call.saved[kWordOrigin * rows + index] = origin;
  call.saved[kWordLse * rows + index] = lse;
}

template <typename T, bool kEntropy>
__global__ void __launch_bounds__(kMostThreads, 2)
    token_logprobs_forward_kernel(const __grid_constant__ ForwardTask task) {
  using Acc = AccOf<T>;
  auto& shared = *reinterpret_cast<Shared<Acc>*>(dynamic_shared());
  const TokenLogprobsForward& call = task.call;
  const RowInputs& in = call.in;
  const int64_t index = task.plan.row_of_block();
  Team team(task.plan, shared.exchange);
  const bool stores = task.plan.rank_of_block() == 0 && threadIdx.x == 0;
  if (!in.keeps(index)) {
    if (stores) store_row<Acc>(call, index, 0, 0, 0, 0);
    return;
  }
  const Part place = part_at(in.shape.words, task.plan.part, task.plan.rank_of_block());
  const ReadRows<T, 1> rows = read_rows<T, 1>(
      {&call.logits}, {address_of<T>(in.shape, call.logits, index, place.begin)}, place.size);
  sum_row<kEntropy>(rows, in.scale(), team, shared);
  team.leave();
  if (stores) {
    const double scale = static_cast<Acc>(in.scale());
    const double origin = shared.origin;
    const double unit = divergences::unit_of({origin, 0});
    const double lse = shared.lse;
    const double logprob =
        log_prob(in, call.logits, rows.first(0), index, scale, unit, origin, lse);
    store_row<Acc>(call, index, logprob, origin, lse, shared.entropy);
  }
  team.end();
}

template <typename T, bool kEntropy>
void launch_forward(ForwardTask task, void* stream) {
  const LogitsShape& shape = task.call.in.shape;
  task.plan = plan_read(shape.words, kChunk<T>, kMostThreads, kState, this_chip());
  launch_rows(token_logprobs_forward_kernel<T, kEntropy>, shape.rows(), task.plan.blocks,
              task.plan.shared, task, stream);
}

// The constants of a row's gradient, computed once a row.
template <typename Acc>
struct RowGradient {
  divergences::TokenRow<Acc> row;
  Acc of_logprob;
  Frame<Acc, 1> frame;
};

template <typename Acc>
__device__ __forceinline__ RowGradient<Acc> gradient_of(const TokenLogprobsBackward& call,
                                                        int64_t index) {
  const int64_t rows = call.in.shape.rows();
  const divergences::Origins origins = {call.saved[kWordOrigin * rows + index], 0};
  const double lse = call.saved[kWordLse * rows + index];
  const double scale = call.in.scale();
  const double own_scale = scale / divergences::unit_of(origins);
  const double of_logprob = number_at<Acc>(call.grad_logprobs, index) * scale;
  const double of_entropy = number_at<Acc>(call.grad_entropy, index) * scale;
  const double entropy = number_at<Acc>(call.entropy, index);
  return {divergences::token_row_of<Acc>(own_scale, lse, of_logprob, of_entropy, entropy),
          static_cast<Acc>(of_logprob), Frame<Acc, 1>::of(origins)};
}

// The gradient may overwrite the logits: a thread reads its words before it writes them, and reads
// no others.
template <typename T>
__global__ void __launch_bounds__(kPieceThreads, 4)
    token_logprobs_backward_kernel(const __grid_constant__ BackwardTask task) {
  using Acc = AccOf<T>;
  const TokenLogprobsBackward& call = task.call;
  const RowInputs& in = call.in;
  const int64_t index = task.plan.row_of_block();
  const Part place = task.plan.part_of_block(in.shape.words);
  const int64_t first = index * in.shape.words + place.begin;
  if (!in.keeps(index)) return write_zeros(call.grad, first, place.size);
  __shared__ RowGradient<Acc> shared;
  if (threadIdx.x == 0) shared = gradient_of<Acc>(call, index);
  __syncthreads();
  const divergences::TokenRow<Acc> gradient_row = shared.row;
  const auto part_at = [&](int64_t zero) -> GradientPart<T, 1> {
    return {{address_of<T>(in.shape, call.logits, index + zero, place.begin)},
            {call.logits.dtype},
            {call.logits.word_stride},
            {call.grad},
            first + zero,
            place.size,
            target_in(in, index + zero, place),
            {shared.of_logprob},
            shared.frame.if_any()};
  };
  const auto gradient = [&](Acc x) { return divergences::token_gradient(x, gradient_row); };
  write_gradients<T, Memory::kReadWrite>(
      part_at, [&](const auto& part) { return each_word(gradient, part); });
}

template <typename Visitor>
void visit_logits(const Logits& logits, const Visitor& visit) {
  visit_dtype(logits.dtype, [&](auto zero) {
    if constexpr (is_floating<decltype(zero)>) visit(zero);
  });
}

}  // namespace

void token_logprobs_forward(const TokenLogprobsForward& call, void* stream) {
  const ForwardTask task = {call, {}};
  visit_logits(call.logits, [&](auto zero) {
    using T = decltype(zero);
    if (call.entropy != nullptr) {
      launch_forward<T, true>(task, stream);
    } else {
      launch_forward<T, false>(task, stream);
    }
  });
}

void token_logprobs_backward(const TokenLogprobsBackward& call, void* stream) {
  BackwardTask task = {call, {}};
  visit_logits(call.logits, [&](auto zero) {
    using T = decltype(zero);
    task.plan = plan_pieces(call.in.shape.words, kChunk<T>);
    launch_rows(token_logprobs_backward_kernel<T>, call.in.shape.rows(), 1, 0, task, stream);
  });
}

}  // namespace klfast::cuda
