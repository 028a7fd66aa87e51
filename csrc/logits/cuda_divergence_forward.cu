// Divergences of rows of two models: kernel and launches.
//
// The blocks of a row take the passes of formulas/passes.h; the first thread of each block chooses
// the next step, alike in all blocks, as all have the same sums. A JSD takes one more pass. A row
// that fits in shared memory is read once, and its gradient written by the same kernel; the
// gradient of any other row is written by the backward's kernel.

#include "logits/cuda.h"
#include "logits/cuda_divergence_gradients.h"
#include "logits/cuda_pairs.h"
#include "logits/cuda_team.h"

namespace klfast::cuda {
namespace {

using divergences::JsdFit;
using divergences::Mixture;
using divergences::Origins;
using divergences::PairRow;
using divergences::RowGradient;
using math::Base;
using math::kNats;
using math::Range;
using passes::Step;
using passes::Verdict;

struct ForwardTask {
  DivergenceForward call;
  RowPlan plan;
  JsdFit fit;
};

// The shared memory of a block: written by its first thread, read by all.
template <typename Acc>
struct Shared {
  Exchange exchange;
  PairRow row;
  GuessOf<Acc> guess;
  Frame<Acc, 2> frame;
  Step step;
  RowGradient<Acc, kBase<Acc>> gradient;
};

// The threads of a block: as many as leave two blocks on a processor the registers that they need.
template <Divergence divergence>
constexpr int kThreads = divergence == Divergence::kJsd ? 320 : 384;

constexpr int64_t kState = (sizeof(Shared<double>) + 15) / 16 * 16;

// The greatest |u| of near chunks: negative for rows that have none.
template <typename Acc>
__device__ __forceinline__ Acc near_limit(const Shared<Acc>& shared) {
  const bool is_plain = !has_offset(shared.guess) && shared.frame.if_any() == nullptr;
  return is_plain ? Acc(1 / kNats<kBase<Acc>>) : Acc(-1);
}

enum Field { kMass, kSpread, kSlope, kOther, kExcluded, kFields };

// A thread's sums for a KL. Chunks whose words are all near take fewer instructions: in
// w (e^u - 1 - u) = (w u) (u q(u)) the first factor is the slope. A warp's own words alone decide,
// so that a row's sums depend on nothing else.
template <typename T>
struct PairTotals {
  using Acc = AccOf<T>;
  static constexpr Base base = kBase<Acc>;
  using Words = Converted<T, 2>;
  using Near = LogRatios<Acc, kChunk<T>>;

  const Shared<Acc>& shared;
  const GuessOf<Acc> guess = shared.guess;
  const Acc limit = near_limit(shared);
  Acc mass = 0, spread = 0;  // of near chunks, since the last flush
  Acc slope = 0;             // in the base's unit
  double totals[kExcluded] = {};
  bool is_excluded = false;

  __device__ __forceinline__ Near near_of(const Words& words) const {
    return Near(words.of[0], words.of[1], guess, limit);
  }
  __device__ __forceinline__ void add_near(const Words& words, const Near& u) {
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      const Acc p = divergences::first_term(words.of[0].element[i], guess);
      const Acc product = p * u.of[i];
      mass += p;
      slope += product;
      spread = math::fma(product, u.of[i] * math::series<base>(u.of[i]), spread);
    }
  }
  // What this needs of the shared memory is not held in registers.
  __device__ __forceinline__ void add_far(Words words) {
    const GuessOf<Acc> guess = opaque(&shared.guess);
    place_words<T>(words, opaque(&shared.frame).if_any());
    divergences::Pair<Acc> sum = {};
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      const auto pair = divergences::pair_of<Range::kAnywhere>(words.of[0].element[i],
                                                               words.of[1].element[i], guess);
      sum.mass += pair.mass;
      sum.spread += pair.spread;
      sum.slope += pair.slope;
      sum.other += pair.other;
      is_excluded = is_excluded || pair.excluded != 0;
    }
    add(sum.mass, sum.spread, sum.slope, sum.other);
  }
  __device__ __forceinline__ void flush() {
    const Acc in_nats = divergences::nats<base>(slope);
    add(mass, spread, in_nats, (mass + spread) + in_nats);
    mass = spread = slope = 0;
  }
  __device__ __forceinline__ void store(double (&sums)[kFields]) const {
#pragma unroll
    for (int i = 0; i < kExcluded; ++i) sums[i] = totals[i];
    sums[kExcluded] = is_excluded ? 1 : 0;
  }

 private:
  __device__ __forceinline__ void add(Acc mass, Acc spread, Acc slope, Acc other) {
    totals[kMass] += mass;
    totals[kSpread] += spread;
    totals[kSlope] += slope;
    totals[kOther] += other;
  }
};

// Two sums of a thread, flushed to double.
template <typename Acc>
struct TwoTotals {
  Acc sums[2] = {};
  double totals[2] = {};

  __device__ __forceinline__ void flush() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      totals[i] += sums[i];
      sums[i] = 0;
    }
  }
};

// The sums of e^(x - m) and e^(y - second): all that a JSD needs of the passes before its own. Far
// chunks are those that must be placed.
template <typename T>
struct MassTotals : TwoTotals<AccOf<T>> {
  using Acc = AccOf<T>;
  using Words = Converted<T, 2>;
  struct Near {
    Acc sums[2];
    bool are_near;
  };

  const Shared<Acc>& shared;
  const GuessOf<Acc> guess = shared.guess;
  const bool is_placed = shared.frame.if_any() == nullptr;

  __device__ __forceinline__ explicit MassTotals(const Shared<Acc>& shared) : shared(shared) {}

  // The vote says what each lane knows. It keeps the load of the next chunk behind the conversion
  // of this one, whose registers it takes.
  __device__ __forceinline__ Near near_of(const Words& words) const {
    Near near = {};
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      near.sums[0] += divergences::first_term(words.of[0].element[i], guess);
      near.sums[1] +=
          math::exp_term<kBase<Acc>>(math::fma(words.of[1].element[i], guess.scale, -guess.second));
    }
    near.are_near = !__any_sync(0xffffffffu, !is_placed);
    return near;
  }
  __device__ __forceinline__ void add_near(const Words&, const Near& near) {
    this->sums[0] += near.sums[0];
    this->sums[1] += near.sums[1];
  }
  __device__ __forceinline__ void add_far(Words words) {
    place_words<T>(words, &shared.frame);
    add_near(words, near_of(words));
  }
};

// The sums of a row's JSD and of its slope, but for the factor rest_of().
template <typename T>
struct JsdTotals : TwoTotals<AccOf<T>> {
  using Acc = AccOf<T>;
  static constexpr Base base = kBase<Acc>;
  using Words = Converted<T, 2>;
  using Near = LogRatios<Acc, kChunk<T>>;

  const Shared<Acc>& shared;
  const double beta;
  const JsdFit& fit;
  const GuessOf<Acc> exact = shared.guess;
  const Acc limit = base == Base::kTwo ? near_limit(shared) : Acc(-1);

  __device__ __forceinline__ JsdTotals(const Shared<Acc>& shared, double beta, const JsdFit& fit)
      : shared(shared), beta(beta), fit(fit) {}

  __device__ __forceinline__ Near near_of(const Words& words) const {
    return Near(words.of[0], words.of[1], exact, limit);
  }
  __device__ __forceinline__ void add_near(const Words& words, const Near& near) {
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      const Acc u = near.of[i];
      const Acc product = divergences::first_term(words.of[0].element[i], exact) * u;
      this->sums[0] = math::fma(product, u * divergences::polynomial(fit.value, u), this->sums[0]);
      this->sums[1] =
          math::fma(product, divergences::polynomial(fit.log_m_over_p, u), this->sums[1]);
    }
  }
  __device__ __forceinline__ void add_far(Words words) {
    const GuessOf<Acc> guess = opaque(&shared.guess);
    const Mixture<Acc> mixture = divergences::mixture_of<Acc>(beta);
    place_words<T>(words, opaque(&shared.frame).if_any());
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      const auto word = divergences::device_jsd_word_of(
          words.of[0].element[i], words.of[1].element[i], guess, mixture, fit);
      this->sums[0] += word.value;
      this->sums[1] += word.p * word.log_m_over_p;
    }
  }
};

// Takes the greatest words as the guess, and chooses the next step. Run by the first thread. Not
// inlined, like judge_sums: both are long, and run once or twice a row.
template <typename Acc>
__device__ __noinline__ void judge_greatest(double first, double second, double scale,
                                            Shared<Acc>& shared) {
  const bool is_finite = std::isfinite(first) && std::isfinite(second);
  Origins& origins = shared.row.origins;
  shared.row = divergences::nan_row();
  if (is_finite) {
    origins = {divergences::origin_of(first, scale), divergences::origin_of(second, scale)};
    shared.guess = divergences::guess_of_greatest<Acc, kBase<Acc>>(scale, origins, first, second);
  }
  shared.frame = Frame<Acc, 2>::of(origins);
  shared.step = passes::next_step(shared.step, is_finite ? Verdict::kGood : Verdict::kUseless);
}

// Takes the row's results and the next guess from its sums, and chooses the next step. Run by the
// first thread.
template <typename Acc>
__device__ __forceinline__ void take_row(const PairRow& row, double scale, Shared<Acc>& shared) {
  shared.row = row;
  shared.guess = divergences::guess_of<Acc, kBase<Acc>>(divergences::scale_of(scale, row.origins),
                                                        row.lse, row.shift);
  shared.step = passes::next_step(shared.step, row.verdict);
}
template <typename Acc>
__device__ __noinline__ void judge_sums(divergences::PairSums sums, double scale,
                                        Shared<Acc>& shared) {
  take_row(divergences::row_of(sums, shared.guess, shared.row.origins), scale, shared);
}
template <typename Acc>
__device__ __noinline__ void judge_masses(double mass, double other, double scale,
                                          Shared<Acc>& shared) {
  take_row(divergences::row_of_masses(mass, other, shared.guess, shared.row.origins), scale,
           shared);
}

// lse and shift of a row, and its KL unless a JSD is wanted, in shared.row, by the passes of
// passes.h; lse and shift are also in shared.guess. The scale is read where it is needed: staged,
// it costs two registers, and 16-bit kernels spill. They also spill where a function decides which
// kind of pass a step is.
template <Divergence divergence, typename Rows, typename Acc>
__device__ __forceinline__ void sum_row(const Rows& rows, const RowInputs& in, Team& team,
                                        Shared<Acc>& shared) {
  const bool decides = threadIdx.x == 0;
  if (decides) shared.step = Step::kFindFirst;
#pragma unroll 1
  for (Step step = Step::kFindFirst; step != Step::kDone; step = shared.step) {
    if (step == Step::kFindFirst || step == Step::kFindInRow) {
      double greatest[2];
      find_greatest(rows, step == Step::kFindFirst ? 1 : rows.rounds.some, greatest);
      team.combine<Greatest>(greatest);
      if (decides) judge_greatest(greatest[0], greatest[1], in.scale(), shared);
    } else if constexpr (divergence == Divergence::kKl) {
      PairTotals<typename Rows::Type> totals = {shared};
      add_chunks(rows, totals);
      double sums[kFields];
      totals.store(sums);
      team.combine<Add>(sums);
      if (decides) {
        judge_sums({sums[kMass], sums[kSpread], sums[kSlope], sums[kOther], sums[kExcluded] > 0},
                   in.scale(), shared);
      }
    } else {
      MassTotals<typename Rows::Type> masses(shared);
      add_chunks(rows, masses);
      team.combine<Add>(masses.totals);
      if (decides) judge_masses(masses.totals[0], masses.totals[1], in.scale(), shared);
    }
    __syncthreads();
  }
}

// Stores the row's results. `first`: the start of the row in each model.
template <typename Acc>
__device__ __forceinline__ void store_row(const DivergenceForward& call, int64_t index,
                                          const char* const (&first)[2], const PairRow& row,
                                          double value, double slope) {
  const RowInputs& in = call.in.in;
  const int64_t rows = in.shape.rows();
  store_number<Acc>(call.rows, index, value);
  if (in.token_ids != nullptr) {
    const double scale = divergences::rounded_scale<Acc, kBase<Acc>>(in.scale());
    const double unit = divergences::unit_of(row.origins);
    const double logprob = log_prob<kBase<Acc>>(in, call.in.first, first[0], index, scale, unit,
                                                row.origins.first, row.lse);
    const double ref_logprob = log_prob<kBase<Acc>>(in, call.in.second, first[1], index, scale,
                                                    unit, row.origins.second, row.lse + row.shift);
    store_number<Acc>(call.logprobs, index, logprob);
    store_number<Acc>(call.ref_logprobs, index, ref_logprob);
  }
  call.saved[kLse * rows + index] = row.lse;
  call.saved[kShift * rows + index] = row.shift;
  call.saved[kSlope * rows + index] = slope;
  call.saved[kFirstOrigin * rows + index] = row.origins.first;
  call.saved[kSecondOrigin * rows + index] = row.origins.second;
}

template <typename Acc>
__device__ __forceinline__ void skip_row(const DivergenceForward& call, int64_t index,
                                         const Part& part) {
  if (part.begin > 0 || threadIdx.x > 0) return;
  store_number<Acc>(call.rows, index, 0);
  store_number<Acc>(call.logprobs, index, 0);
  store_number<Acc>(call.ref_logprobs, index, 0);
  const int64_t rows = call.in.in.shape.rows();
  for (int field = 0; field < kSaved; ++field) call.saved[field * rows + index] = 0;
}

// Stores the row's results and computes the constants of its gradient. Run by the first thread of
// every block; the first block stores. `first` and `second`: the start of the part in each model.
template <typename Acc>
__device__ __noinline__ void finish_row(const ForwardTask& task, const char* first,
                                        const char* second, double jsd, double slope,
                                        Shared<Acc>& shared) {
  const DivergenceForward& call = task.call;
  const int64_t index = task.plan.row_of_block();
  const bool is_kl = call.in.divergence == Divergence::kKl;
  const PairRow row = shared.row;
  if (is_kl) {
    jsd = row.kl;
  } else {
    const bool exists = row.lse == row.lse && row.shift == row.shift;
    const double rest = exists ? divergences::rest_of(shared.guess, row.lse) : NAN;
    slope *= rest;
    jsd *= rest;
    if constexpr (kBase<Acc> == Base::kTwo) {
      jsd = divergences::without_offset(jsd, slope, call.in.beta);
    }
    jsd = divergences::jsd_of(jsd, call.in.beta);
  }
  const double value = static_cast<Acc>(jsd);  // rounded, as the backward reads it
  const bool stores = task.plan.rank_of_block() == 0;
  if (stores) store_row<Acc>(call, index, {first, second}, row, value, slope);
  if (call.row_weights == nullptr) return;
  const double scale = call.in.in.scale();
  const double weight = number_at<Acc>(call.row_weights, index) * scale;
  shared.gradient =
      divergences::gradient_of(is_kl, shared.guess, call.in.beta,
                               {value, row.lse, row.shift, slope, row.origins, weight, 0, 0});
}

// Everything but the gradient of a block's part of a row. `rows` loads the part, from memory or
// staged; `source` has its address in memory.
template <Divergence divergence, typename T, typename Rows, typename Acc>
__device__ __forceinline__ void run_row(const ForwardTask& task, const ReadRows<T, 2>& source,
                                        const Rows& rows, Team& team, Shared<Acc>& shared) {
  sum_row<divergence>(rows, task.call.in.in, team, shared);
  double jsd_sums[2] = {};
  if constexpr (divergence == Divergence::kJsd) {
    JsdTotals<T> totals(shared, task.call.in.beta, task.fit);
    add_chunks(rows, totals);
    team.combine<Add>(totals.totals);
    jsd_sums[0] = totals.totals[0];
    jsd_sums[1] = totals.totals[1];
  }
  team.leave();  // finish_row reads nothing of other blocks
  if (threadIdx.x == 0) {
    finish_row(task, source.first(0), source.first(1), jsd_sums[0], jsd_sums[1], shared);
  }
}

template <typename T>
__device__ __forceinline__ ReadRows<T, 2> read_pair(const DivergenceInputs& in, int64_t index,
                                                    const Part& place) {
  const LogitsShape& shape = in.in.shape;
  return read_rows<T, 2>({&in.first, &in.second},
                         {address_of<T>(shape, in.first, index, place.begin),
                          address_of<T>(shape, in.second, index, place.begin)},
                         place.size);
}

template <typename T, Divergence divergence>
__global__ void __launch_bounds__(kThreads<divergence>, is_any_dtype<T> ? 1 : 2)
    divergence_forward_kernel(const __grid_constant__ ForwardTask task) {
  auto& shared = *reinterpret_cast<Shared<AccOf<T>>*>(dynamic_shared());
  const DivergenceForward& call = task.call;
  const int64_t index = task.plan.row_of_block();
  const Part place = part_at(call.in.in.shape.words, task.plan.part, task.plan.rank_of_block());
  if (!call.in.in.keeps(index)) return skip_row<AccOf<T>>(call, index, place);
  Team team(task.plan, shared.exchange);
  const auto rows = read_pair<T>(call.in, index, place);
  run_row<divergence>(task, rows, rows, team, shared);
  team.end();
}

// The same for a row that is staged in the shared memory of a cluster, and the row's gradients.
template <typename T, Divergence divergence>
__device__ __forceinline__ void stage_row(const ForwardTask& task) {
  auto& shared = *reinterpret_cast<Shared<AccOf<T>>*>(dynamic_shared());
  char* const memory = dynamic_shared() + kState;
  const DivergenceForward& call = task.call;
  const int64_t index = task.plan.row_of_block();
  const Part place = part_at(call.in.in.shape.words, task.plan.part, task.plan.rank_of_block());
  if (!call.in.in.keeps(index)) {
    const int64_t first = index * call.in.in.shape.words + place.begin;
    write_zeros(call.grad_first, first, place.size);
    write_zeros(call.grad_second, first, place.size);
    return skip_row<AccOf<T>>(call, index, place);
  }
  Team team(task.plan, shared.exchange);
  const auto rows = read_pair<T>(call.in, index, place);
  const auto staged = stage_rows(rows, place.size, memory);
  run_row<divergence>(task, rows, staged, team, shared);
  __syncthreads();
  const auto part_at = [&](int64_t zero) {
    return of_staged(gradient_part<T>(call.in, call.grad_first, call.grad_second, index + zero,
                                      place, shared.frame.if_any()),
                     staged);
  };
  write_pair_gradients<T, Memory::kShared, divergence>(part_at, shared.gradient, task.fit);
  team.end();
}

template <typename T, Divergence divergence>
__global__ void __launch_bounds__(kThreads<divergence>, 2)
    divergence_forward_staged_kernel(const __grid_constant__ ForwardTask task) {
  if constexpr (kHasClusters) stage_row<T, divergence>(task);
}

bool wants_gradient(const DivergenceForward& call) {
  return call.grad_first.data != nullptr || call.grad_second.data != nullptr;
}

void launch_gradient(const DivergenceForward& call, void* stream) {
  DivergenceBackward backward;
  backward.in = call.in;
  backward.in.in.token_ids = nullptr;  // their log-probs have no incoming gradient here
  backward.rows = call.rows;
  backward.saved = call.saved;
  backward.grad_rows = call.row_weights;
  backward.grad_first = call.grad_first;
  backward.grad_second = call.grad_second;
  divergence_backward(backward, stream);
}

// A row has the same bits with and without a gradient: a kernel that does not stage it takes the
// parts of the one that does.
template <typename T, Divergence divergence>
void launch_forward(ForwardTask task, void* stream) {
  constexpr int kMost = kThreads<divergence>;
  const int64_t words = task.call.in.in.shape.words;
  const int64_t rows = task.call.in.in.shape.rows();
  const Chip chip = this_chip();
  const auto reads = divergence_forward_kernel<T, divergence>;
  if constexpr (!is_any_dtype<T>) {
    const auto stages = divergence_forward_staged_kernel<T, divergence>;
    task.plan =
        plan_staged(words, kChunk<T>, 2 * sizeof(T), kMost, kState, chip, launchable(stages));
    if (task.plan.is_staged && (wants_gradient(task.call) || divergence == Divergence::kJsd)) {
      return launch_rows(stages, rows, task.plan.blocks, task.plan.shared, task, stream);
    }
  }
  task.plan = task.plan.is_staged
                  ? unstaged(task.plan, kState)
                  : plan_read(words, kChunk<T>, kMost, kState, chip, launchable(reads));
  launch_rows(reads, rows, task.plan.blocks, task.plan.shared, task, stream);
  if (wants_gradient(task.call)) launch_gradient(task.call, stream);
}

}  // namespace

void divergence_forward(const DivergenceForward& call, void* stream) {
  const ForwardTask task = {call, {}, fit_of(call.in)};
  visit_pair(call.in, [&](auto source) {
    using T = typename decltype(source)::Type;
    if (call.in.divergence == Divergence::kKl) {
      launch_forward<T, Divergence::kKl>(task, stream);
    } else {
      launch_forward<T, Divergence::kJsd>(task, stream);
    }
  });
}

}  // namespace klfast::cuda
