// Divergences of rows of two models: kernel and launches.
//
// The blocks of a row do the passes of formulas/passes.h. The first warp of each block finds the
// first guess, from the same sample of the row. After that the first thread of each block chooses
// the next step. All blocks choose the same step, because they have the same sums. A JSD takes one
// more pass. If a gradient is wanted, each block then writes it for its own parts. It reads them
// again, mostly from L2 (plan_pairs). The backward's kernel writes the gradient if no cluster can
// share a long row, or if dtypes are mixed or fp64.

#include <cstdlib>

#include "logits/cuda.h"
#include "logits/cuda_cluster.h"
#include "logits/cuda_divergence_gradients.h"
#include "logits/cuda_pairs.h"
#include "logits/cuda_ring.h"

namespace klfast::cuda {
namespace {

using divergences::Fit;
using divergences::Mixture;
using divergences::Origins;
using divergences::PairRow;
using math::Base;
using math::kNats;
using passes::Step;
using passes::Verdict;

struct ForwardTask {
  DivergenceForward call;
  RowPlan plan;
  Fit fit;
};

// The guess against which a row is summed, and constants that follow from it.
template <typename Acc>
struct Basis {
  GuessOf<Acc> guess;
  Acc limit;  // the greatest |u| of near chunks, or negative if the row has none
  Frame<Acc, 2> frame;

  __device__ __forceinline__ Origins origins() const { return {frame.origin[0], frame.origin[1]}; }
  __device__ __forceinline__ void take(const GuessOf<Acc>& of_row) {
    guess = of_row;
    limit = near_limit(guess, frame);
  }
};

// The start of a warp's row, and the warp's step. Each warp has a copy, so that no warp waits for
// another before its first loads.
struct WarpState {
  const char* first[2];  // where the row starts in each model
  Step step;
};

// The shared memory of a block. The first thread writes it, except for the states of other warps.
// The numbers of a cluster follow it.
template <typename Acc>
struct Shared {
  PairRow row;
  double value;  // of the divergence, rounded as the backward reads it
  double slope;
  PairGradient<Acc> gradient;
  Basis<Acc> basis;
  Step step;
  WarpState warps[kPairWarps];

  // The state of this warp. Its address is not held in a register.
  __device__ __forceinline__ WarpState& own() { return warps[in_register(threadIdx.x) / kWarp]; }
};

// The number of blocks on a processor. It leaves each block the registers that it needs.
template <typename T, typename Divergences, EntropyOf of>
constexpr int kBlocksOfProcessor =
    is_any_dtype<T> ? 2 : (of != EntropyOf::kNone ? 4 : (Divergences::kIsAlone ? 6 : 5));

// The numbers that a pass combines at a time: the four sums of a KL, and the moment for an entropy.
template <typename Divergences, EntropyOf of>
constexpr int kCombined = Divergences::kHasRest && of != EntropyOf::kNone ? 8 : kMostNumbers;

template <typename Acc>
constexpr int64_t kClusterMemory =
    (sizeof(Shared<Acc>) + 15) / 16 * 16;  // where a cluster's memory starts
template <typename Acc, int kNumbers = kMostNumbers>
constexpr int64_t kState = (kClusterMemory<Acc> + sizeof(ClusterMemory<kNumbers>) + 15) / 16 * 16;

template <typename Acc, int kNumbers = kMostNumbers>
__device__ __forceinline__ Cluster<kNumbers> cluster_of(const RowPlan& plan) {
  using Memory = ClusterMemory<kNumbers>;
  return {plan, *reinterpret_cast<Memory*>(dynamic_shared() + kClusterMemory<Acc>)};
}

// A lane's chunk of the sample of a row. It starts at word lane * apart.
template <typename T>
__device__ __forceinline__ Raw load_sample(const Logits& logits, const char* first, int64_t words) {
  const int chunks = static_cast<int>(words / (kWarp * kChunk<T>));
  const int start = start_of_lane<T>() * (chunks == 0 ? 1 : chunks);
  if constexpr (!is_any_dtype<T>) {
    const bool is_smooth = logits.word_stride == 1 && is_aligned(first);
    const char* const own = first + start * static_cast<int64_t>(sizeof(T));
    if (is_smooth && start + kChunk<T> <= words) {
      return load_aligned<uint32_t, 4>(reinterpret_cast<const uint32_t*>(own));
    }
  }
  return load_singly<T>(first, logits.dtype, logits.word_stride, start, 0, static_cast<int>(words));
}

// Copies the block's step to a warp.
template <typename Acc>
__device__ __forceinline__ void take_step(Shared<Acc>& shared) {
  if (threadIdx.x % kWarp == 0) shared.own().step = shared.step;
  __syncwarp();
}

__device__ __forceinline__ bool are_finite(double first, double second) {
  return std::isfinite(first) && std::isfinite(second);
}

// Takes the greatest logits as the guess. The guess is NaN unless both are finite. This function is
// not inlined, like judge_sums, because both are long and run once or twice per row.
template <typename Acc>
__device__ __noinline__ void take_greatest(double first, double second, double scale,
                                           Basis<Acc>& basis) {
  if (!are_finite(first, second)) first = second = NAN;
  const Origins origins = {divergences::origin_of(first, scale),
                           divergences::origin_of(second, scale)};
  basis.frame = Frame<Acc, 2>::of(origins);
  basis.take(divergences::guess_of_greatest<Acc, kBase<Acc>>(scale, origins, first, second));
}

__device__ __forceinline__ double scale_of_row(const ForwardTask& task) {
  return task.call.in.rows.scale(task.plan.row_of_block());
}

// Takes the greatest logits of a sample of the row as its first guess. If they are not finite, the
// row's sums against them are not finite either, and the row is summed again. Run by the first
// warp. It is inlined because a call would wait for all loads in flight.
template <typename T>
__device__ __forceinline__ void take_sample(const ForwardTask& task, Shared<AccOf<T>>& shared) {
  const DivergenceInputs& in = task.call.in;
  const char* const(&row)[2] = shared.warps[0].first;
  const Raw first = load_sample<T>(in.first, row[0], in.rows.shape.words);
  const Raw second = load_sample<T>(in.second, row[1], in.rows.shape.words);
  const auto greatest = greatest_of_sample<T>(first);
  const auto greatest_of_second = greatest_of_sample<T>(second);
  if (threadIdx.x > 0) return;
  take_greatest(greatest, greatest_of_second, scale_of_row(task), shared.basis);
  shared.step = Step::kSumFirst;
}

// Finds the first guess of a row in its first pass, with a barrier of the block. Does nothing in
// later passes.
template <typename T>
__device__ __forceinline__ void open_row(const ForwardTask& task, Shared<AccOf<T>>& shared) {
  if (shared.own().step != Step::kFindFirst) return;
  if (threadIdx.x < kWarp) take_sample<T>(task, shared);
  __syncthreads();
  take_step(shared);
}

// A thread's sums over a pair of rows.
struct Field {
  enum : int { kMass, kSpread, kSlope, kOther, kCount, kMoment = kCount };
};

// The moment of one model (entropy.h) in a thread's sums. It is empty if no entropy is wanted.
template <typename Acc, EntropyOf of>
struct Moment {
  Acc sum = 0;  // since the last flush, in the base's unit
  double total = 0;

  __device__ __forceinline__ void add(const divergences::MomentTerm<Acc>& term) {
    sum = math::fma(term.mass, term.exponent, sum);
  }
  __device__ __forceinline__ void flush() {
    total += sum;
    sum = 0;
  }
  // Stores the moment after `field` sums. The number of combined sums is a power of 2.
  template <int field, int n>
  __device__ __forceinline__ void store(double (&sums)[n]) const {
    sums[field] = total;
#pragma unroll
    for (int i = field + 1; i < n; ++i) sums[i] = 0;
  }
};
template <typename Acc>
struct Moment<Acc, EntropyOf::kNone> {
  __device__ __forceinline__ void flush() const {}
  template <int field, int n>
  __device__ __forceinline__ void store(double (&)[n]) const {}
};

// A thread's sums for a KL, and for other divergences that need a KL's digits of the shift. Chunks
// with only near words take fewer instructions:
//   w (e^u - 1 - u) = (w u) (u q(u)),
// and the first factor is also the term of the slope. Only the words that a warp reads decide
// whether it takes this form, so a row's sums depend on nothing else. The spread becomes NaN if
// only the second model excludes a word. Other sums with a spread of NaN are poor or useless, or
// their KL is infinite.
template <typename T, bool kIsKl, EntropyOf of>
struct PairTotals {
  using Acc = AccOf<T>;
  static constexpr Base base = kBase<Acc>;
  using Words = Converted<T, 2>;
  using Near = LogRatios<Acc, kChunk<T>>;

  const ForwardTask& task;
  Shared<Acc>& shared;
  GuessOf<Acc> guess;
  Acc limit;
  Acc mass = 0, spread = 0;  // of near chunks since the last flush
  Acc slope = 0;             // in the base's unit
  double totals[Field::kCount] = {};
  Moment<Acc, of> moment = {};

  __device__ __forceinline__ void start() {
    open_row<T>(task, shared);
    guess = shared.basis.guess;
    limit = shared.basis.limit;
  }
  __device__ __forceinline__ Near near_of(const Words& words) const {
    return Near(words.of[0], words.of[1], guess, limit);
  }
  __device__ __forceinline__ void add_near(const Words& words, const Near& u) {
    using Number = math::Packed<Acc>;
    constexpr int kWords = sizeof(Number) / sizeof(Acc);
#pragma unroll
    for (int i = 0; i < kChunk<T>; i += kWords) {
      const Number ratio = math::packed<Number>(&u.of[i]);
      const Number p =
          divergences::first_term(math::packed<Number>(&words.of[0].element[i]), guess);
      const auto masses = math::unpacked<Acc>(p), products = math::unpacked<Acc>(p * ratio);
      const auto factors = math::unpacked<Acc>(ratio * math::series<base>(ratio));
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        mass += masses.element[j];
        slope += products.element[j];
        spread = math::fma(products.element[j], factors.element[j], spread);
        if constexpr (of != EntropyOf::kNone) {
          moment.add(divergences::near_moment_of<of>(masses.element[j], words.of[0].element[i + j],
                                                     u.of[i + j], guess));
        }
      }
    }
  }
  // Reads the shared memory here, so that its values take no registers elsewhere.
  __device__ __forceinline__ void add_far(Words words) {
    const Basis<Acc>& basis = shared.basis;
    const GuessOf<Acc> guess = basis.guess;
    place_words<T>(words, basis.frame.if_any());
    divergences::Pair<Acc> sum = {};
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      const auto pair = divergences::pair_of(words.of[0].element[i], words.of[1].element[i], guess);
      sum.mass += pair.mass;
      sum.spread += math::select(kIsKl && pair.excluded != 0, Acc(NAN), pair.spread);
      sum.slope += pair.slope;
      sum.other += pair.other;
      if constexpr (of != EntropyOf::kNone) {
        moment.add(divergences::moment_of<of>(pair, words.of[0].element[i], words.of[1].element[i],
                                              guess));
      }
    }
    add(sum.mass, sum.spread, sum.slope, sum.other);
  }
  __device__ __forceinline__ void flush() {
    const Acc in_nats = divergences::nats<base>(slope);
    add(mass, spread, in_nats, (mass + spread) + in_nats);
    mass = spread = slope = 0;
    moment.flush();
  }
  template <int n>
  __device__ __forceinline__ void store(double (&sums)[n]) const {
#pragma unroll
    for (int i = 0; i < Field::kCount; ++i) sums[i] = totals[i];
    moment.template store<Field::kMoment>(sums);
  }

 private:
  __device__ __forceinline__ void add(Acc mass, Acc spread, Acc slope, Acc other) {
    totals[Field::kMass] += mass;
    totals[Field::kSpread] += spread;
    totals[Field::kSlope] += slope;
    totals[Field::kOther] += other;
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
  template <int n>
  __device__ __forceinline__ void store(double (&stored)[n]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) stored[i] = totals[i];
  }
};

// The sums of e^(x - m) and e^(y - second), and the moment for the first model's entropy. A JSD
// needs nothing else from the passes before its own, because its sum corrects the shift. Far chunks
// are chunks that must be placed.
template <typename T, EntropyOf of>
struct MassTotals : TwoTotals<AccOf<T>> {
  using Acc = AccOf<T>;
  using Words = Converted<T, 2>;
  struct Near {
    Acc sums[2];
    Moment<Acc, of> moment;
    bool are_near;
  };

  const ForwardTask& task;
  Shared<Acc>& shared;
  GuessOf<Acc> guess;
  bool is_placed;
  Moment<Acc, of> moment = {};

  __device__ __forceinline__ MassTotals(const ForwardTask& task, Shared<Acc>& shared)
      : task(task), shared(shared) {}

  __device__ __forceinline__ void start() {
    open_row<T>(task, shared);
    guess = shared.basis.guess;
    is_placed = shared.basis.frame.if_any() == nullptr;
  }
  // Every lane already knows the result of the vote. The vote keeps the load of the next chunk
  // behind the conversion of this chunk, so that the load can reuse its registers.
  __device__ __forceinline__ Near near_of(const Words& words) const {
    Near near = {};
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      const Acc p = divergences::first_term(words.of[0].element[i], guess);
      near.sums[0] += p;
      if constexpr (of != EntropyOf::kNone) {
        near.moment.add(divergences::near_moment_of<of>(p, words.of[0].element[i], Acc(0), guess));
      }
      near.sums[1] +=
          math::exp_term<kBase<Acc>>(math::fma(words.of[1].element[i], guess.scale, -guess.second));
    }
    near.are_near = !__any_sync(0xffffffffu, !is_placed);
    return near;
  }
  __device__ __forceinline__ void add_near(const Words&, const Near& near) {
    this->sums[0] += near.sums[0];
    this->sums[1] += near.sums[1];
    if constexpr (of != EntropyOf::kNone) moment.sum += near.moment.sum;
  }
  __device__ __forceinline__ void add_far(Words words) {
    place_words<T>(words, &shared.basis.frame);
    add_near(words, near_of(words));
  }
  __device__ __forceinline__ void flush() {
    TwoTotals<Acc>::flush();
    moment.flush();
  }
  template <int n>
  __device__ __forceinline__ void store(double (&sums)[n]) const {
    TwoTotals<Acc>::store(sums);
    moment.template store<2>(sums);
  }
};

// The sums of a row's divergence and of its slope, without the factor rest_of(). Not for a KL.
template <typename T, typename Divergence>
struct WordTotals : TwoTotals<AccOf<T>> {
  using Acc = AccOf<T>;
  static constexpr Base base = kBase<Acc>;
  using Words = Converted<T, 2>;
  using Near = LogRatios<Acc, kChunk<T>>;

  const Shared<Acc>& shared;
  const double parameter;
  const Fit& fit;
  GuessOf<Acc> exact;
  Acc limit;
  Mixture<Acc> mixture;  // the loop over near chunks reads its rest alone

  __device__ __forceinline__ WordTotals(const Shared<Acc>& shared, double parameter, const Fit& fit)
      : shared(shared), parameter(parameter), fit(fit) {}

  __device__ __forceinline__ void start() {
    exact = shared.basis.guess;
    limit = base == Base::kTwo ? shared.basis.limit : Acc(-1);
    if constexpr (Divergence::kHasRest) mixture = mixture_of_row();
  }
  __device__ __forceinline__ Near near_of(const Words& words) const {
    return Near(words.of[0], words.of[1], exact, limit);
  }
  __device__ __forceinline__ void add_near(const Words& words, const Near& near) {
    if constexpr (base != Base::kE) {  // by the limit, base e has no near chunks
      constexpr bool is_fitted = std::is_base_of_v<divergences::Fitted, Divergence>;
      using Number = std::conditional_t<is_fitted, math::Packed<Acc>, Acc>;
      constexpr int kWords = sizeof(Number) / sizeof(Acc);
#pragma unroll
      for (int i = 0; i < kChunk<T>; i += kWords) {
        const Number p =
            divergences::first_term(math::packed<Number>(&words.of[0].element[i]), exact);
        const Number u =
            divergences::without_rest<Divergence>(math::packed<Number>(&near.of[i]), mixture);
        if constexpr (is_fitted) {
          const auto products = math::unpacked<Acc>(p * u);
          const auto values = math::unpacked<Acc>(u * divergences::polynomial(fit.value, u));
          const auto slopes = math::unpacked<Acc>(divergences::polynomial(fit.of_first, u));
#pragma unroll
          for (int j = 0; j < kWords; ++j) {
            const Acc product = products.element[j];
            this->sums[0] = math::fma(product, values.element[j], this->sums[0]);
            this->sums[1] = math::fma(product, slopes.element[j], this->sums[1]);
          }
        } else {
          this->sums[0] += Divergence::near_value(p, u, fit);
          this->sums[1] = math::fma(p, Divergence::near_first(u, fit), this->sums[1]);
        }
      }
    }
  }
  __device__ __forceinline__ void add_far(Words words) {
    const GuessOf<Acc> guess = opaque(&shared.basis.guess);
    const Mixture<Acc> of_row = mixture_of_row();
    place_words<T>(words, opaque(&shared.basis.frame).if_any());
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      const auto word = divergences::fitted_word_of<Divergence>(
          words.of[0].element[i], words.of[1].element[i], guess, of_row, fit);
      this->sums[0] += word.value;
      this->sums[1] += word.p * word.of_first;
    }
  }

 private:
  __device__ __forceinline__ Mixture<Acc> mixture_of_row() const {
    double rest = 0;
    if constexpr (Divergence::kHasRest) {
      rest = shared.row.shift - divergences::ratio_of(shared.basis.guess);
    }
    return Divergence::template mixture<Acc>(parameter, rest);
  }
};

// Stores the row's results and the next guess, which follow from its sums, and chooses the next
// step. Run by the first thread.
template <typename Acc>
__device__ __forceinline__ void take_row(const PairRow& row, double scale, Shared<Acc>& shared) {
  shared.row = row;
  shared.basis.take(divergences::guess_of<Acc, kBase<Acc>>(
      divergences::scale_of(scale, row.origins), row.lse, row.shift));
  shared.step = passes::next_step(shared.step, row.verdict);
}
template <typename Acc>
__device__ __noinline__ void judge_sums(divergences::PairSums sums, double scale,
                                        Shared<Acc>& shared) {
  const Basis<Acc>& basis = shared.basis;
  sums.excluded = sums.spread != sums.spread;
  if (sums.excluded) sums.spread = INFINITY;
  take_row(divergences::row_of(sums, basis.guess, basis.origins()), scale, shared);
}
template <typename Acc>
__device__ __noinline__ void judge_masses(double mass, double other, double scale,
                                          Shared<Acc>& shared) {
  const Basis<Acc>& basis = shared.basis;
  take_row(divergences::row_of_masses(mass, other, basis.guess, basis.origins()), scale, shared);
}

// Stores the entropy of one model from the sums of a pass, or NaN if the sums are NaN. The row's
// last pass overwrites earlier values. Run by the first thread. Not inlined, like judge_sums.
template <typename Acc>
__device__ __noinline__ void store_entropy(const ForwardTask& task, double mass, double moment) {
  if (task.plan.rank_of_block() > 0) return;
  store_number<Acc>(task.call.entropy, task.plan.row_of_block(),
                    divergences::entropy_of_sums<kBase<Acc>>(mass, moment));
}

// A part of a row that starts at `first` in each model.
template <typename T>
__device__ __forceinline__ ReadRows<T, 2> read_pair(const DivergenceInputs& in,
                                                    const char* const (&first)[2],
                                                    const Part& place) {
  const auto start_of = [&](int m, const Logits& logits) {
    return first[m] + place.begin * logits.word_stride * size_of<T>(logits.dtype);
  };
  // Both are read before the first opaque value, so that `place` needs no memory.
  const char* const start[2] = {start_of(0, in.first), start_of(1, in.second)};
  ReadRows<T, 2> rows = {{&in.first, &in.second}, {}, rounds_of<T>(place.size)};
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const char* const own = start[m] + in_register(threadIdx.x) * sizeof(Raw);
    rows.own[m] = reinterpret_cast<const char*>(opaque(reinterpret_cast<int64_t>(own)));
    const bool is_smooth = rows.logits[m]->word_stride == 1 && is_aligned(start[m]);
    if (is_any_dtype<T> || !is_smooth) rows.rounds.whole = 0;
  }
  return rows;
}

// A thread's greatest logits in a part, one for each model. Not inlined, because it is rare.
struct GreatestOfPair {
  double first;
  double second;
};
template <typename T>
__device__ __noinline__ GreatestOfPair find_in_part(const ForwardTask& task, const WarpState& warp,
                                                    const Part& place) {
  const auto rows = read_pair<T>(task.call.in, warp.first, place);
  AccOf<T> first = -INFINITY, second = -INFINITY;
#pragma unroll 1
  for (int round = 0; round < rows.rounds.some; ++round) {
    const auto words = convert_words<T>(rows.load(round));
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      first = Maximum::combine(first, words.of[0].element[i]);
      second = Maximum::combine(second, words.of[1].element[i]);
    }
  }
  return {first, second};
}

// Computes a row's lse and shift by the passes of passes.h, and its KL if that is wanted. All are
// stored in shared.row. lse and shift are also in the block's guess.
//
// The scale is read where it is needed. Held for the pass, it would cost two registers, and 16-bit
// kernels would spill. They also spill if a function decides which kind of pass a step is.
template <typename Divergences, EntropyOf of, typename T, typename PartOf, typename Cluster,
          typename Acc>
__device__ __forceinline__ void sum_row(const ForwardTask& task, const PartOf& part_of,
                                        Cluster& cluster, Shared<Acc>& shared) {
  const bool decides = threadIdx.x == 0;
  // Mostly one pass is enough. The sums say whether another follows, so the first thread decides,
  // and the loop is not unrolled.
#pragma unroll 1
  while (shared.own().step != Step::kDone) {
    if (shared.own().step == Step::kFindInRow) {
      const double* const greatest =
          cluster.template combine<Maximum, 2>([&](int part, double (&of_part)[2]) {
            const Part place = part_at(task.call.in.rows.shape.words, cluster.plan.part, part);
            const GreatestOfPair found = find_in_part<T>(task, shared.own(), place);
            of_part[0] = found.first;
            of_part[1] = found.second;
          });
      if (decides) {
        // If both models exclude all words, the sums against any guess are 0, or NaN if there is a
        // NaN.
        const bool is_excluded = greatest[0] == -INFINITY && greatest[1] == -INFINITY;
        const double first = is_excluded ? 0 : greatest[0];
        const double second = is_excluded ? 0 : greatest[1];
        const bool is_found = are_finite(first, second);
        shared.row = divergences::nan_row();
        take_greatest(first, second, scale_of_row(task), shared.basis);
        shared.step =
            passes::next_step(Step::kFindInRow, is_found ? Verdict::kGood : Verdict::kUseless);
        if constexpr (of != EntropyOf::kNone) {
          if (!is_found) store_entropy<Acc>(task, NAN, NAN);
        }
      }
    } else if constexpr (Divergences::kHasRest) {
      constexpr int n = kCombined<Divergences, of>;
      const auto sum_part = [&](int part, double (&of_part)[n]) {
        PairTotals<T, Divergences::kIsKl, of> totals = {task, shared};
        add_chunks(part_of(part), totals);
        totals.store(of_part);
      };
      const double* const sums = cluster.template combine<Sum, n>(sum_part);
      if (decides) {
        judge_sums({sums[Field::kMass], sums[Field::kSpread], sums[Field::kSlope],
                    sums[Field::kOther], false},
                   scale_of_row(task), shared);
        if constexpr (of != EntropyOf::kNone) {
          store_entropy<Acc>(task, sums[of == EntropyOf::kFirst ? Field::kMass : Field::kOther],
                             sums[Field::kMoment]);
        }
      }
    } else {
      constexpr int n = of == EntropyOf::kNone ? 2 : 4;
      const auto sum_part = [&](int part, double (&of_part)[n]) {
        MassTotals<T, of> masses(task, shared);
        add_chunks(part_of(part), masses);
        masses.store(of_part);
      };
      const double* const sums = cluster.template combine<Sum, n>(sum_part);
      if (decides) {
        judge_masses(sums[0], sums[1], scale_of_row(task), shared);
        if constexpr (of != EntropyOf::kNone) store_entropy<Acc>(task, sums[0], sums[2]);
      }
    }
    __syncthreads();
    take_step(shared);
  }
}

// Stores the row's results. Run by the first thread of the row's first block. It is not inlined, so
// that its numbers take no registers from the gradient.
template <typename Acc>
__device__ __noinline__ void store_row(const ForwardTask& task, const Shared<Acc>& shared) {
  const DivergenceForward& call = task.call;
  const RowInputs& in = call.in.rows;
  const PairRow& row = shared.row;
  const int64_t index = task.plan.row_of_block();
  store_number<Acc>(call.rows, index, shared.value);
  if (in.token_ids != nullptr) {
    const char* const(&first)[2] = shared.warps[0].first;
    const double scale = divergences::rounded_scale<Acc, kBase<Acc>>(in.scale(index));
    const double unit = divergences::unit_of(row.origins);
    const double logprob = log_prob<kBase<Acc>>(in, call.in.first, first[0], index, scale, unit,
                                                row.origins.first, row.lse);
    const double ref_logprob = log_prob<kBase<Acc>>(in, call.in.second, first[1], index, scale,
                                                    unit, row.origins.second, row.lse + row.shift);
    store_number<Acc>(call.logprobs, index, logprob);
    store_number<Acc>(call.ref_logprobs, index, ref_logprob);
  }
  save_row(call, index, row, shared.slope);
}

// Makes the entropy NaN if the divergence is NaN. Run by the thread that has stored both.
template <EntropyOf of, typename Acc>
__device__ __forceinline__ void finish_entropy(const ForwardTask& task, const Shared<Acc>& shared) {
  if constexpr (of == EntropyOf::kNone) return;
  if (std::isnan(shared.value)) store_entropy<Acc>(task, NAN, NAN);
}

template <EntropyOf of, typename Acc>
__device__ __forceinline__ void skip_row(const ForwardTask& task, int64_t index) {
  if (task.plan.rank_of_block() > 0 || threadIdx.x > 0) return;
  const DivergenceForward& call = task.call;
  store_number<Acc>(call.rows, index, 0);
  store_number<Acc>(call.logprobs, index, 0);
  store_number<Acc>(call.ref_logprobs, index, 0);
  if constexpr (of != EntropyOf::kNone) store_number<Acc>(call.entropy, index, 0);
  const int64_t rows = call.in.rows.shape.rows();
  for (int field = 0; field < Saved::kCount; ++field) call.saved[field * rows + index] = 0;
}

// Computes the row's value, and the constants of the gradient if the kernel writes one. Run by the
// first thread of every block.
template <typename Divergences, bool kWritesGradient, typename Acc>
__device__ __noinline__ void finish_row(const ForwardTask& task, double value, double slope,
                                        Shared<Acc>& shared) {
  const DivergenceForward& call = task.call;
  const double parameter = call.in.parameter;
  const PairRow row = shared.row;
  const GuessOf<Acc>& guess = shared.basis.guess;
  if constexpr (Divergences::kIsKl) {
    value = row.kl;
  } else {
    const bool exists = row.lse == row.lse && row.shift == row.shift;
    const double rest = exists ? divergences::rest_of(guess, row.lse) : NAN;
    slope *= rest;
    value *= rest;
    Divergences::visit(call.in.divergence, [&](auto divergence) {
      value = decltype(divergence)::template value_of<kBase<Acc>>(value, slope, parameter);
    });
  }
  shared.value = static_cast<Acc>(value);
  shared.slope = slope;
  if (!kWritesGradient || call.row_weights == nullptr) return;
  const double scale = scale_of_row(task);
  const double weight = number_at<Acc>(call.row_weights, task.plan.row_of_block()) * scale;
  Divergences::visit(call.in.divergence, [&](auto divergence) {
    using Row = decltype(divergence);
    const auto constants = divergences::gradient_of<Row>(
        guess, parameter, {shared.value, row.lse, row.shift, slope, row.origins, weight, 0, 0});
    shared.gradient = PairGradient<Acc>::of(constants, Row::kIsKl, call.grad_second.data == nullptr,
                                            shared.basis.frame);
  });
}

// Computes everything of a row except its gradient, and leaves the results in shared memory.
template <typename Divergences, EntropyOf of, bool kWritesGradient, typename T, typename PartOf,
          typename Cluster, typename Acc>
__device__ __forceinline__ void run_row(const ForwardTask& task, const PartOf& part_of,
                                        Cluster& cluster, Shared<Acc>& shared) {
  sum_row<Divergences, of, T>(task, part_of, cluster, shared);
  const double none[2] = {};
  const double* sums = none;
  if constexpr (!Divergences::kIsKl) {
    sums = cluster.template combine<Sum, 2>([&](int part, double (&of_part)[2]) {
      Divergences::visit(task.call.in.divergence, [&](auto divergence) KLFAST_INLINE_LAMBDA {
        WordTotals<T, decltype(divergence)> totals(shared, task.call.in.parameter, task.fit);
        add_chunks(part_of(part), totals);
        totals.store(of_part);
      });
    });
  }
  cluster.leave();  // finish_row reads no memory of other blocks
  if (threadIdx.x == 0) {
    finish_row<Divergences, kWritesGradient>(task, sums[0], sums[1], shared);
  }
}

// Finds for a warp where a row starts.
template <typename T>
__device__ __forceinline__ void start_row(const DivergenceInputs& in, int64_t index,
                                          WarpState& warp) {
  const LogitsShape& shape = in.rows.shape;
  if (threadIdx.x % kWarp == 0) {
    warp.first[0] = address_of<T>(shape, in.first, index, 0);
    warp.first[1] = address_of<T>(shape, in.second, index, 0);
    warp.step = Step::kFindFirst;
  }
  __syncwarp();
}

// Writes zeros as the gradients of a part.
__device__ __forceinline__ void write_no_gradients(const DivergenceForward& call, int64_t index,
                                                   const Part& place) {
  const int64_t first = index * call.in.rows.shape.words + place.begin;
  write_zeros(call.grad_first, first, place.size);
  write_zeros(call.grad_second, first, place.size);
}

// Writes the gradients of a part after its row's sums. Run by all threads, after a barrier.
template <typename T, typename Divergences>
__device__ __forceinline__ void write_gradients_of(const ForwardTask& task, const Part& place,
                                                   const Shared<AccOf<T>>& shared) {
  const DivergenceForward& call = task.call;
  const int64_t index = task.plan.row_of_block();
  if (number_at<AccOf<T>>(call.row_weights, index) == 0) {  // the row may hold NaN
    return write_no_gradients(call, index, place);
  }
  const auto part_at = [&](int64_t zero) {
    return gradient_part<T>(call.in, call.grad_first, call.grad_second, index + zero, place,
                            shared.basis.frame.if_any());
  };
  Divergences::visit(call.in.divergence, [&](auto divergence) KLFAST_INLINE_LAMBDA {
    write_gradients<T, Memory::kReadOnly>(
        part_at, [&] { return PairFormula<decltype(divergence), T>(shared.gradient, task.fit); });
  });
}

template <typename T, typename Divergences, EntropyOf of, bool kWritesGradient>
__global__ void __launch_bounds__(kPairThreads, kBlocksOfProcessor<T, Divergences, of>)
    divergence_forward_kernel(const __grid_constant__ ForwardTask task) {
  auto& shared = *reinterpret_cast<Shared<AccOf<T>>*>(dynamic_shared());
  const DivergenceInputs& in = task.call.in;
  const RowPlan& plan = task.plan;
  const int64_t index = plan.row_of_block();
  const auto own_parts = [&] {
    return part_at(in.rows.shape.words, plan.share * plan.part, plan.rank_of_block());
  };
  if (!in.rows.keeps(index)) {
    if constexpr (kWritesGradient) write_no_gradients(task.call, index, own_parts());
    return skip_row<of, AccOf<T>>(task, index);
  }
  auto cluster = cluster_of<AccOf<T>, kCombined<Divergences, of>>(plan);
  start_row<T>(in, index, shared.own());
  const auto part_of = [&](int part) {
    return read_pair<T>(in, opaque(&shared.own()).first,
                        part_at(in.rows.shape.words, plan.part, part));
  };
  run_row<Divergences, of, kWritesGradient, T>(task, part_of, cluster, shared);
  if constexpr (kWritesGradient) __syncthreads();
  if (threadIdx.x == 0 && plan.rank_of_block() == 0) {
    store_row(task, shared);
    finish_entropy<of>(task, shared);
  }
  if constexpr (kWritesGradient) write_gradients_of<T, Divergences>(task, own_parts(), shared);
  cluster.end();
}

inline constexpr int kRingBlocks = 5;  // on a processor

// A block's ring, and its task, which has the row that it is at.
struct RingTask {
  Ring ring;
  ForwardTask task;
};

// The same with a ring (cuda_ring.h), for a KL. A cluster stays for several rows.
template <typename T, typename Divergences>
__device__ __forceinline__ void run_ring(const ForwardTask& launched) {
  using Acc = AccOf<T>;
  auto& shared = *reinterpret_cast<Shared<Acc>*>(dynamic_shared());
  auto& own = *reinterpret_cast<RingTask*>(dynamic_shared() + kState<Acc>);
  const DivergenceInputs& in = launched.call.in;
  const RowPlan& plan = launched.plan;
  const Part place = part_at(in.rows.shape.words, plan.part, plan.rank_of_block());
  const int clusters = static_cast<int>(gridDim.x) / plan.blocks;
  // Finds where the warp starts in this row, or in the next one that is kept.
  const auto source_of = [&](int64_t index) -> RingSource {
    while (index < in.rows.shape.rows() && !in.rows.keeps(index)) index += clusters;
    if (index >= in.rows.shape.rows()) return {};
    const int64_t word = place.begin + start_of_warp<T>();
    return {address_of<T>(in.rows.shape, in.first, index, word),
            address_of<T>(in.rows.shape, in.second, index, word)};
  };
  RingRows<T> rows(own.ring, place.size);
  for (int round = threadIdx.x % kWarp; round < kRingRounds; round += kWarp) {
    init_barrier(rows.barrier(round));
  }
  if (threadIdx.x == 0) own.task = launched;
  int64_t index = plan.row_of_block();
  rows.request_all(0, source_of(index));
#pragma unroll 1
  for (; index < in.rows.shape.rows(); index += clusters) {
    if (!in.rows.keeps(index)) {
      write_no_gradients(launched.call, index, place);
      skip_row<EntropyOf::kNone, Acc>(launched, index);
      continue;
    }
    auto cluster = cluster_of<Acc>(plan);
    start_row<T>(in, index, shared.own());
    if (threadIdx.x == 0) own.task.plan.first_row = index - plan.row_of_block();
    open_row<T>(own.task, shared);
    const auto part_of = [&](int) { return rows; };
    run_row<Divergences, EntropyOf::kNone, true, T>(own.task, part_of, cluster, shared);
    __syncthreads();
    if (threadIdx.x == 0 && plan.rank_of_block() == 0) store_row(own.task, shared);
    const RingSource next = source_of(index + clusters);
    if (number_at<Acc>(launched.call.row_weights, index) == 0) {  // the row may hold NaN
      write_no_gradients(launched.call, index, place);
      rows.request_all(0, next);
    } else {
      const auto part_at = [&](int64_t zero) {
        return gradient_part<T>(in, launched.call.grad_first, launched.call.grad_second,
                                index + zero, place, shared.basis.frame.if_any());
      };
      Divergences::visit(in.divergence, [&](auto divergence) KLFAST_INLINE_LAMBDA {
        write_ring_gradients(
            rows, part_at,
            [&] { return PairFormula<decltype(divergence), T>(shared.gradient, launched.fit); },
            next);
      });
    }
    cluster.end();
    __syncthreads();
    rows.parity ^= 1;
  }
}

template <typename T, typename Divergences>
__global__ void __launch_bounds__(kPairThreads, kRingBlocks)
    divergence_ring_kernel(const __grid_constant__ ForwardTask task) {
  if constexpr (kHasClusters) run_ring<T, Divergences>(task);
}

// Launches the ring if it is wanted and serves the call.
template <typename T, typename Divergences>
bool launch_ring(const ForwardTask& task, void* stream) {
  const char* const wanted = std::getenv("KLFAST_RING");
  if (wanted == nullptr || *wanted != '1') return false;
  constexpr size_t kShared = kState<AccOf<T>> + sizeof(RingTask);
  static_assert(kShared <= kMostShared);
  const DivergenceForward& call = task.call;
  const LogitsShape& shape = call.in.rows.shape;
  const RowPlan& plan = task.plan;
  bool fits =
      this_chip().has_clusters && plan.share == 1 && plan.part <= kRingRounds * kRoundWords<T>;
  for (const Logits& logits : {call.in.first, call.in.second}) {
    fits = fits && is_in_vectors<T>(shape, logits);
  }
  for (const Output& grad : {call.grad_first, call.grad_second}) {
    fits = fits && is_in_vectors<T>(shape, {grad.data, grad.dtype, 0, shape.words});
  }
  if (!fits) return false;
  const auto kernel = divergence_ring_kernel<T, Divergences>;
  Blocks blocks = {static_cast<unsigned>(plan.blocks), plan.threads, plan.blocks, kShared};
  const int64_t clusters = plan.blocks > 1 ? most_clusters(address_of_kernel(kernel), blocks)
                                           : int64_t{kRingBlocks} * this_chip().processors;
  if (clusters == 0) return false;
  blocks.count *= static_cast<unsigned>(std::min(clusters, shape.rows()));
  launch(kernel, blocks, stream, task);
  return true;
}

bool wants_gradient(const DivergenceForward& call) {
  return call.grad_first.data != nullptr || call.grad_second.data != nullptr;
}

void launch_gradient(const DivergenceForward& call, void* stream) {
  DivergenceBackward backward;
  backward.in = call.in;
  backward.in.rows.token_ids = nullptr;  // log-probs have no incoming gradient here
  backward.rows = call.rows;
  backward.saved = call.saved;
  backward.grad_rows = call.row_weights;
  backward.grad_first = call.grad_first;
  backward.grad_second = call.grad_second;
  run_rows(backward, stream);
}

// A row has the same bits with and without a gradient, because all kernels sum the same parts.
template <typename T, typename Divergences, EntropyOf of>
void launch_forward(ForwardTask task, void* stream) {
  constexpr int64_t kShared = kState<AccOf<T>, kCombined<Divergences, of>>;
  static_assert(kShared <= kMostShared);
  const LogitsShape& shape = task.call.in.rows.shape;
  const auto plan_of = [&](auto kernel, bool writes_gradient) {
    return plan_pairs(shape.words, shape.rows(), kChunk<T>, 2 * sizeof(ElementOf<T>),
                      kBlocksOfProcessor<T, Divergences, of>, kShared, writes_gradient, this_chip(),
                      launchable(kernel));
  };
  const auto start = [&](auto kernel) {
    launch_rows(kernel, shape.rows(), task.plan.blocks, task.plan.shared, task, stream);
  };
  if constexpr (!is_any_dtype<T> && of == EntropyOf::kNone) {
    if (wants_gradient(task.call)) {
      const auto writes = divergence_forward_kernel<T, Divergences, of, true>;
      task.plan = plan_of(writes, true);
      if constexpr (KLFAST_RING == 1 && Divergences::kIsKl && sizeof(T) == 2) {
        if (launch_ring<T, Divergences>(task, stream)) return;
      }
      if (task.plan.blocks > 1 || task.plan.share == 1) return start(writes);
    }
  }
  const auto reads = divergence_forward_kernel<T, Divergences, of, false>;
  task.plan = plan_of(reads, false);
  start(reads);
  if (wants_gradient(task.call)) launch_gradient(task.call, stream);
}

}  // namespace

void run_rows(const DivergenceForward& call, void* stream) {
  // The kernels here read logits as memory that no thread writes, so the gradient takes a kernel of
  // its own.
  if (is_over_logits(call.in, call.grad_first, call.grad_second)) {
    DivergenceForward sums = call;
    sums.grad_first = sums.grad_second = {};
    sums.row_weights = nullptr;
    run_rows(sums, stream);
    return launch_gradient(call, stream);
  }
  ForwardTask task = {call, {}, {}};
  join_batches(task.call.in.rows.shape, call.in.first, call.in.second);
  visit_kernel(
      call.in, call.in.entropy_of, [&](auto source, auto served, auto of, const auto& fit) {
        task.fit = fit;
        launch_forward<typename decltype(source)::Type, decltype(served), decltype(of)::value>(
            task, stream);
      });
}

}  // namespace klfast::cuda
