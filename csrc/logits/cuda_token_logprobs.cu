// Log-probs of tokens and entropies of rows of one model, and their gradients: kernels and
// launches.

#include "logits/cuda.h"
#include "logits/cuda_token_gradients.h"
#include "logits/cuda_token_sums.h"

namespace klfast::cuda {
namespace {

struct ForwardTask {
  TokenLogprobsForward call;
  RowPlan plan;
};

struct BackwardTask {
  TokenLogprobsBackward call;
  PiecePlan plan;
};

template <typename Visitor>
void visit_bool(bool value, const Visitor& visit) {
  value ? visit(std::true_type()) : visit(std::false_type());
}

// The number of blocks on a processor. It leaves a kernel the registers that it needs. Chips
// without clusters have no registers for values that are uniform in a block, so fewer blocks fit.
template <typename T, bool kSmooth>
constexpr int kBlocksOfProcessor =
    std::is_same_v<T, double> ? 2 : (kSmooth && kHasClusters ? 4 : 3);

// Stores the results of which a row has one. Run by one thread.
template <typename Acc>
__device__ __forceinline__ void store_row(const TokenLogprobsForward& call, int64_t index,
                                          const TokenResults& row) {
  const int64_t rows = call.in.shape.rows();
  store_number<Acc>(call.entropy, index, row.entropy);
  call.saved[WordSaved::kOrigin * rows + index] = row.origin;
  call.saved[WordSaved::kLse * rows + index] = row.lse;
}

// Stores the log-probs of a row's picks. The log-prob of an id that is no word is NaN. Run by all
// threads of a block. With more than one pick they have waited for the results before.
template <typename T, bool kSmooth, bool kMany>
__device__ __noinline__ void store_picks(const TokenLogprobsForward& call, int64_t index,
                                         const LeftOut<T, kSmooth, kMany>& left_out,
                                         const TokenResults& results) {
  using Result = std::conditional_t<kMany, double, AccOf<T>>;
  const RowInputs& in = call.in;
  for (int64_t pick = threadIdx.x; pick < in.picks; pick += blockDim.x) {
    const int64_t at = index * in.picks + pick;
    const int64_t id = in.token_ids[at];
    const double logit = in.is_word(id) ? left_out.logit(id) : NAN;
    store_number<Result>(call.logprobs, at,
                         in.is_none(id) ? 0 : results.template log_prob<kBase<AccOf<T>>>(logit));
  }
}

// K picks take registers of a block more.
template <typename T, bool kEntropy, bool kSmooth, bool kMany>
__global__ void __launch_bounds__(kRowThreads, kBlocksOfProcessor<T, kSmooth> - kMany)
    token_logprobs_forward_kernel(const __grid_constant__ ForwardTask task) {
  using Acc = AccOf<T>;
  auto& shared = *reinterpret_cast<TokenShared*>(dynamic_shared());
  const TokenLogprobsForward& call = task.call;
  const RowInputs& in = call.in;
  const int64_t index = task.plan.row_of_block();
  const bool is_first = task.plan.rank_of_block() == 0;
  if (!in.keeps(index)) {
    if (!is_first) return;
    if (threadIdx.x == 0) store_row<Acc>(call, index, {});
    for (int64_t pick = threadIdx.x; pick < in.picks; pick += blockDim.x) {
      store_number<std::conditional_t<kMany, double, Acc>>(call.logprobs, index * in.picks + pick,
                                                           0);
    }
    return;
  }
  const TiledRow<T, kSmooth> row(address_of<T>(in.shape, call.logits, index, 0),
                                 call.logits.word_stride, in.shape.words);
  TileCluster cluster(task.plan, shared.exchange);
  const LeftOut<T, kSmooth, kMany> left_out(in, index, row, shared);
  double sums[1 + kEntropy];
  const RowGuess<Acc> base =
      sum_row<kEntropy>(row, left_out, in.scale(index), cluster, shared, sums);
  cluster.leave();
  if (is_first) {
    if (threadIdx.x == 0) {
      shared.results = results_of<kEntropy>(base, sums);
      store_row<Acc>(call, index, shared.results);
    }
    if (kMany) __syncthreads();
    store_picks(call, index, left_out, shared.results);
  }
  cluster.end();
}

template <typename T, bool kEntropy, bool kSmooth, bool kMany>
void launch_forward(ForwardTask task, void* stream) {
  constexpr int64_t kState = sizeof(TokenShared);
  static_assert(kState <= kMostShared);
  constexpr int kBlocks = kBlocksOfProcessor<T, true>;  // both kernels need the same plan
  const LogitsShape& shape = task.call.in.shape;
  const auto kernel = token_logprobs_forward_kernel<T, kEntropy, kSmooth, kMany>;
  task.plan = plan_tiles(shape.words, shape.rows(), kChunk<T>, kTileWords<T>, kBlocks, kState,
                         this_chip(), launchable(kernel));
  launch_rows(kernel, shape.rows(), task.plan.blocks, task.plan.shared, task, stream);
}

// The constants of the gradients of a row's log-probs and entropy, computed once per row. For a
// word that is no pick, with placed logit x, s = x * scale - lse and p = base^s, the gradient is
//   -p (entropy s + constant).
template <typename Acc>
struct RowGradient {
  Acc scale;
  Acc lse;
  Acc constant;
  Acc entropy;
  double of_logprobs;  // (gradient of log-probs - gradient of lse) / temperature
  Frame<Acc, 1> frame;

  // A word without probability has a gradient of 0.
  template <bool kEntropy>
  __device__ __forceinline__ Acc of_word(Acc x) const {
    const Acc s = math::fma(x, scale, -lse);
    const Acc p = math::exp_term<kBase<Acc>>(s);
    if constexpr (!kEntropy) return -p * constant;
    return -p * math::fma(entropy, std::fmax(s, Acc(-1000)), constant);
  }
};

// The sum of the incoming gradients of a row's log-probs. Every lane of the warp that runs it gets
// the sum.
template <typename Acc>
__device__ __noinline__ double incoming_of_row(const TokenLogprobsBackward& call, int64_t index) {
  const int64_t picks = call.in.picks;
  if (!call.in.may_lack_ids) return number_at<Acc>(call.grad_logprobs, index);
  double sum = 0;
  for (int64_t pick = threadIdx.x % kWarp; pick < picks; pick += kWarp) {
    const int64_t at = index * picks + pick;
    if (!call.in.is_none(call.in.token_ids[at])) sum += number_at<double>(call.grad_logprobs, at);
  }
#pragma unroll 1
  for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

// Writes the gradients of the words in a part whose log-probs are results. Overwrites earlier
// values, once per word. Run by all threads of a block, after a barrier.
template <typename Acc>
__device__ __noinline__ void write_picks(const TokenLogprobsBackward& call, int64_t index,
                                         const Part& place, double all) {
  const RowInputs& in = call.in;
  const int64_t* const ids = in.token_ids + index * in.picks;
  const double scale = in.scale(index);
  for (int64_t pick = threadIdx.x; pick < in.picks; pick += blockDim.x) {
    const int64_t id = ids[pick];
    if (!in.is_word(id) || id < place.begin || id >= place.begin + place.size) continue;
    bool is_first = true;
    double own = 0;
    for (int64_t i = 0; i < in.picks; ++i) {
      if (ids[i] != id) continue;
      is_first = is_first && i >= pick;
      own += number_of_pick<Acc>(in, call.grad_logprobs, index * in.picks + i);
    }
    if (!is_first) continue;
    const double gradient = divergences::pick_gradient(
        number_of_pick<Acc>(in, call.logprobs, index * in.picks + pick), own * scale, all,
        number_at<Acc>(call.grad_entropy, index) * scale, number_at<Acc>(call.entropy, index));
    visit_dtype(call.grad.dtype, [&](auto zero) {
      using T = decltype(zero);
      if constexpr (is_floating<T>) {
        static_cast<T*>(call.grad.data)[index * in.shape.words + id] =
            convert<T>(static_cast<Acc>(gradient));
      }
    });
  }
}

template <typename Acc>
__device__ __noinline__ RowGradient<Acc> gradient_of(const TokenLogprobsBackward& call,
                                                     int64_t index, double incoming) {
  const int64_t rows = call.in.shape.rows();
  const divergences::Origins origins = {call.saved[WordSaved::kOrigin * rows + index], 0};
  const double exact_lse = call.saved[WordSaved::kLse * rows + index];
  const double scale = call.in.scale(index);
  const double of_logprob = (incoming - number_of_pick<Acc>(call.in, call.grad_lse, index)) * scale;
  const double of_entropy = number_at<Acc>(call.grad_entropy, index) * scale;
  RowGradient<Acc> row;
  row.frame = Frame<Acc, 1>::of(origins);
  row.scale = static_cast<Acc>(scale / divergences::unit_of(origins) / kNatsOf<Acc>);
  row.lse = static_cast<Acc>(exact_lse / kNatsOf<Acc>);
  const double lost = static_cast<double>(row.lse) * kNatsOf<Acc> - exact_lse;
  const double rest = std::exp(lost);
  // The mean of -log p with the rounded lse.
  const double mean = number_at<Acc>(call.entropy, index) + lost;
  row.entropy = static_cast<Acc>(of_entropy * rest * kNatsOf<Acc>);
  row.constant = static_cast<Acc>((of_logprob + (of_entropy == 0 ? 0 : of_entropy * mean)) * rest);
  row.of_logprobs = of_logprob;
  return row;
}

// The gradient may overwrite the logits. A lane reads a chunk before it writes it, and reads no
// other chunks.
template <typename T, bool kEntropy>
__global__ void __launch_bounds__(kRowThreads, kBlocksOfProcessor<T, true>)
    token_logprobs_backward_kernel(const __grid_constant__ BackwardTask task) {
  using Acc = AccOf<T>;
  const TokenLogprobsBackward& call = task.call;
  const RowInputs& in = call.in;
  const int64_t index = task.plan.row_of_block();
  const Part place = task.plan.part_of_block(in.shape.words);
  const int64_t first = index * in.shape.words + place.begin;
  if (!in.keeps(index) || !has_incoming<Acc>(call, index)) {
    return write_zeros(call.grad, first, place.size);
  }
  __shared__ RowGradient<Acc> shared;
  if (threadIdx.x < kWarp) {
    const double incoming = incoming_of_row<Acc>(call, index);
    if (threadIdx.x == 0) shared = gradient_of<Acc>(call, index, incoming);
  }
  __syncthreads();
  const RowGradient<Acc> gradient = shared;
  const GradientPart<T, 1> part = {{address_of<T>(in.shape, call.logits, index, place.begin)},
                                   {call.logits.dtype},
                                   {call.logits.word_stride},
                                   {call.grad},
                                   first,
                                   place.size,
                                   -1,
                                   {},
                                   shared.frame.if_any()};
  write_token_gradients(part, [&](Acc x) { return gradient.template of_word<kEntropy>(x); });
  __syncthreads();
  write_picks<Acc>(call, index, place, shared.of_logprobs);
}

template <typename T, bool kEntropy>
void launch_backward(BackwardTask task, void* stream) {
  const LogitsShape& shape = task.call.in.shape;
  task.plan = plan_pieces(shape.words, kTileWords<T>, shape.rows(), kRowThreads, this_chip());
  launch_rows(token_logprobs_backward_kernel<T, kEntropy>, shape.rows(), 1, 0, task, stream);
}

}  // namespace

void run_rows(const TokenLogprobsForward& call, void* stream) {
  ForwardTask task = {call, {}};
  join_batches(task.call.in.shape, call.logits);
  visit_dtype(call.logits.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (is_floating<T>) {
      visit_bool(call.entropy != nullptr, [&](auto entropy) {
        visit_bool(is_smooth(task.call.in.shape, call.logits, kChunk<T>), [&](auto smooth) {
          // Rows of one id have kernels of their own, which need fewer registers.
          visit_bool(call.in.may_lack_ids, [&](auto many) {
            launch_forward<T, decltype(entropy)::value, decltype(smooth)::value,
                           decltype(many)::value>(task, stream);
          });
        });
      });
    }
  });
}

void run_rows(const TokenLogprobsBackward& call, void* stream) {
  BackwardTask task = {call, {}};
  join_batches(task.call.in.shape, call.logits);
  visit_dtype(call.logits.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (is_floating<T>) {
      visit_bool(call.grad_entropy != nullptr,
                 [&](auto entropy) { launch_backward<T, decltype(entropy)::value>(task, stream); });
    }
  });
}

}  // namespace klfast::cuda
