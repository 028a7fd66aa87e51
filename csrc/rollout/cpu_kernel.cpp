// The fused pass over the tokens of a segment, for the correction between sampler and trainer.
// setup.py compiles this file once per instruction set, and KLFAST_INSTRUCTION_SET names the set.
// Only the table at the end is visible outside of a copy.
//
// Tokens are evaluated in groups of kLanes. A group is *near* if every |x| is at most 1, no bound
// can act on a weight, and its mask has only zeros and ones. A near group needs few sums. The sums
// of e^x and of its square follow from the sums of e^x - 1 and of the square of e^x - 1. Other
// groups take every formula. The tokens of a group alone decide whether it is near, so no layout
// changes a bit.
//
// Near groups are added several at a time. To load and store each sum for every group would cost as
// much as the arithmetic.

#include "rollout/cpu_kernel.h"

#include <algorithm>
#include <cmath>

#include "device/cpu/ahead.h"
#include "device/cpu/instruction_set_table.h"
#include "device/cpu/lanes.h"
#include "device/cpu/segment_tiles.h"
#include "rollout/token_bounds.h"
#include "rollout/totals.h"

namespace klfast::cpu {
namespace {

using math::magnitude;
using math::Range;
using math::select;
using rollout::Call;
using rollout::derived_sum_of;
using rollout::How;
using rollout::Inputs;
using rollout::near_sum_of;
using rollout::Options;
using rollout::Rule;
using rollout::TokenBounds;
using rollout::visit_how;
namespace statistics = rollout::statistics;

// The sums of lanes. The weights of near groups are e^x.
enum LaneRow {
  kOfNear,  // statistics::OfNear in its order, for all groups
  kNearLength = kOfNear + statistics::OfNear::kSize,
  kNearGrowth,  // e^x - 1
  kNearGrowthSquares,
  kNearLeast,
  kNearGreatest,
  kNearRows,
  // Sums of groups that are not near.
  kFarLength = kNearRows,
  kFarTokens,
  kFarNonfinite,
  kFarCounted,
  kFarExcluded,
  kDerived,  // statistics::DerivedSums in its order
  kFarBelow = kDerived + statistics::DerivedSums::kSize,
  kFarAbove,
  kFarOutside,
  kFarLeast,
  kFarLeastWeight,
  kFarGreatest,
  kFarGreatestWeight,
  kFarRows,
  // Sums of rules.
  kLaneRejected = kFarRows,
  kLaneRejectedTokens,
  kLaneRows
};

// The row to which groups that are not near add a statistic.
template <typename Row>
constexpr int lane_row_of() {
  if constexpr (Row::has_near_sum) {
    return kOfNear + near_sum_of<Row>;
  } else {
    return kDerived + derived_sum_of<Row>;
  }
}

How how_of_lanes(int row) {
  if (row == kNearLeast || row == kFarLeast || row == kFarLeastWeight) return How::kLeast;
  if (row == kNearGreatest || row == kFarGreatest || row == kFarGreatestWeight) {
    return How::kGreatest;
  }
  if (row < kLaneRows) return How::kSum;
  return rollout::how_of(row - kLaneRows + rollout::kTotals);
}

template <typename T>
struct alignas(64) Lanes {
  T at[kLanes];
};

// The sums of a segment by lane, and the sums of the tile that is being read.
template <typename Acc>
class Sums {
 public:
  // The sums are in the scratch memory of a kernel. A container that may throw would add symbols
  // that the copies of this file for other processors share.
  Sums(int rules, CacheLine* scratch)
      : rows_(kLaneRows + rules * rollout::kRuleTotals),
        segment_(reinterpret_cast<Lanes<double>*>(scratch)),
        tile_(reinterpret_cast<Lanes<Acc>*>(segment_ + rows_)) {
    static_assert(2 * sizeof(Lanes<double>) * kLaneRows <=
                  kScratchLines * sizeof(CacheLine) * rollout::kTotals);
    static_assert(2 * sizeof(Lanes<double>) <= kScratchLines * sizeof(CacheLine));
    for (int row = 0; row < rows_; ++row) {
      const double empty = rollout::empty_of(how_of_lanes(row));
      std::fill_n(tile_[row].at, kLanes, static_cast<Acc>(empty));
      std::fill_n(segment_[row].at, kLanes, empty);
    }
  }

  Lanes<Acc>* tile() { return tile_; }

  // Adds rows [first, last) of the tile to the segment's rows, and empties the tile's.
  void flush(int first, int last) {
    for (int row = first; row < last; ++row) {
      visit_how(how_of_lanes(row),
                [&](auto how) { cpu::flush<decltype(how)>(tile_[row].at, segment_[row].at); });
    }
  }
  int rows() const { return rows_; }

  double total(int row) {
    return visit_how(how_of_lanes(row),
                     [&](auto how) { return combine_lanes<decltype(how)>(segment_[row].at); });
  }

 private:
  const int rows_;
  Lanes<double>* const segment_;
  Lanes<Acc>* const tile_;
};

constexpr int64_t kNearGroups = 4;  // near groups that are added at a time

// Groups in the arithmetic's type. The log-probs and x of masked tokens are 0. In groups that are
// not near, tokens that are not counted have 0, too.
template <typename Acc>
struct Groups {
  alignas(64) Acc logprobs[kNearGroups * kLanes];
  alignas(64) Acc x[kNearGroups * kLanes];
  alignas(64) Acc mask[kNearGroups * kLanes];
};

// Further numbers of a group, for its rules.
template <typename Acc>
struct Judged {
  using Bits = typename math::Constants<Acc>::Bits;
  alignas(64) Acc rollout_logprobs[kLanes];
  alignas(64) Acc counted[kLanes];   // the mask's weight if counted, else 0
  alignas(64) Acc excluded[kLanes];  // the mask's weight if the policy excludes a token, else 0
  alignas(64) Bits lost[kLanes];     // 1 if a kept token is not counted, or a rule rejects it
};

// True if a mask has only zeros and ones.
template <typename Acc>
KLFAST_HOST_DEVICE bool are_zeros_and_ones(const Acc* mask) {
  typename math::Constants<Acc>::Bits others = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    others |= (mask[lane] != Acc(0)) & (mask[lane] != Acc(1));
  }
  return others == 0;
}

// Adds `n` near groups, and writes their weights, which are e^x, or 0 where masked. A lane adds the
// groups in their order for every n.
template <int n, typename Acc>
KLFAST_HOST_DEVICE void add_near(const Acc* logprobs, const Acc* log_ratios, const Acc* mask,
                                 Lanes<Acc>* sums, Acc* to) {
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    Acc of_near[statistics::OfNear::kSize];
    for_each_row(statistics::OfNear(), [&](auto row) KLFAST_INLINE_LAMBDA {
      constexpr int i = near_sum_of<decltype(row)>;
      of_near[i] = sums[kOfNear + i].at[lane];
    });
    Acc length = sums[kNearLength].at[lane], growth = sums[kNearGrowth].at[lane],
        growth_squares = sums[kNearGrowthSquares].at[lane], least = sums[kNearLeast].at[lane],
        greatest = sums[kNearGreatest].at[lane];
    const auto add = [&](int64_t i) KLFAST_INLINE_LAMBDA {
      const Acc x = log_ratios[i], m = mask[i];
      const bool kept = m != Acc(0);
      const rollout::NearToken<Acc> token = {logprobs[i], x, x * x,
                                             rollout::near_exponentials_of(x)};
      to[i] = select(kept, Acc(1) + token.e.growth, Acc(0));
      for_each_row(statistics::OfNear(), [&](auto row) KLFAST_INLINE_LAMBDA {
        using Row = decltype(row);
        of_near[near_sum_of<Row>] += Row::near(token);
      });
      length += m;
      growth += token.e.growth;
      growth_squares += token.e.growth * token.e.growth;
      least = math::Minimum::combine(least, select(kept, x, Acc(INFINITY)));
      greatest = math::Maximum::combine(greatest, select(kept, x, Acc(-INFINITY)));
    };
    add(lane);
    if constexpr (n > 1) add(lane + kLanes);
    if constexpr (n > 2) add(lane + 2 * kLanes);
    if constexpr (n > 3) add(lane + 3 * kLanes);
    static_assert(n <= 4);
    for_each_row(statistics::OfNear(), [&](auto row) KLFAST_INLINE_LAMBDA {
      constexpr int i = near_sum_of<decltype(row)>;
      sums[kOfNear + i].at[lane] = of_near[i];
    });
    sums[kNearLength].at[lane] = length;
    sums[kNearGrowth].at[lane] = growth;
    sums[kNearGrowthSquares].at[lane] = growth_squares;
    sums[kNearLeast].at[lane] = least;
    sums[kNearGreatest].at[lane] = greatest;
  }
}

// Adds any group, and writes the log-probs and x of its counted tokens. Returns true if a kept
// token is not counted. The function is not inlined, because its constants would take the registers
// of the loop over groups.
template <typename Acc>
__attribute__((noinline)) bool add_far(const TokenBounds<Acc>& bounds, const Acc* a, const Acc* b,
                                       const Acc* mask, Acc* logprobs, Acc* log_ratios,
                                       Judged<Acc>& group, Lanes<Acc>* sums, Acc* to) {
  using Bits = typename math::Constants<Acc>::Bits;
  Bits any_lost = 0;
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const Acc given = mask[lane], difference = a[lane] - b[lane];
    const bool kept = given != Acc(0);
    const bool counted = kept & (magnitude(difference) < Acc(INFINITY));
    const Bits lost = kept & !counted;
    const Acc x = select(counted, difference, Acc(0));
    const Acc logprob = select(counted, a[lane], Acc(0));
    const Acc m = select(counted, given, Acc(0));
    const Acc excluded = select(kept & (difference == -Acc(INFINITY)), given, Acc(0));
    const auto e = rollout::exponentials_of(x);
    log_ratios[lane] = x;
    logprobs[lane] = logprob;
    group.counted[lane] = m;
    group.excluded[lane] = excluded;
    group.lost[lane] = lost;
    any_lost |= lost;

    const rollout::FarToken<Acc> token = {logprob, x, e, rollout::token_weight(bounds, x, e)};
    to[lane] = select(counted, token.weight.value, Acc(0));

    const auto add = [&](int row, Acc term) KLFAST_INLINE_LAMBDA { sums[row].at[lane] += term; };
    const auto count = [&](int row, bool condition) KLFAST_INLINE_LAMBDA {
      sums[row].at[lane] += select(condition, Acc(1), Acc(0));
    };
    const auto extremes = [&](int least, int greatest, Acc number) KLFAST_INLINE_LAMBDA {
      sums[least].at[lane] =
          math::Minimum::combine(sums[least].at[lane], select(counted, number, Acc(INFINITY)));
      sums[greatest].at[lane] =
          math::Maximum::combine(sums[greatest].at[lane], select(counted, number, Acc(-INFINITY)));
    };
    for_each_row(statistics::Sums(), [&](auto row) KLFAST_INLINE_LAMBDA {
      using Row = decltype(row);
      add(lane_row_of<Row>(), m * Row::far(token));
    });
    add(kFarLength, given);
    count(kFarTokens, kept);
    count(kFarNonfinite, kept & !counted);
    add(kFarCounted, m);
    add(kFarExcluded, excluded);
    count(kFarBelow, counted & (token.weight.below != 0));
    count(kFarAbove, counted & (token.weight.above != 0));
    count(kFarOutside, counted & (token.weight.outside != 0));
    extremes(kFarLeast, kFarGreatest, x);
    extremes(kFarLeastWeight, kFarGreatestWeight, token.weight.value);
  }
  return any_lost != 0;
}

// Adds a rule's numbers for a group, and marks the tokens that a rule over tokens rejects. `rises`
// is 1 where an advantage is positive. It matters only for a rule that is outward_only. A rule over
// sequences also sees tokens that the policy excludes, with an x of -infinity.
template <typename F, typename Acc>
__attribute__((noinline)) void add_rule(const Rule& rule, const Acc* rises, const Acc* logprobs,
                                        const Acc* log_ratios, Judged<Acc>& group,
                                        Lanes<Acc>* sums) {
  using namespace rollout;
  using Bits = typename math::Constants<Acc>::Bits;
  const Acc low = static_cast<Acc>(rule.low), high = static_cast<Acc>(rule.high);
  const Acc sees_excluded = rule.over == Over::kToken ? 0 : 1;
  alignas(64) Acc numbers[kLanes];
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const Acc excluded = sees_excluded * group.excluded[lane];
    const bool is_excluded = excluded != Acc(0);
    const Pair<Acc> pair = {select(is_excluded, -Acc(INFINITY), logprobs[lane]),
                            group.rollout_logprobs[lane],
                            select(is_excluded, -Acc(INFINITY), log_ratios[lane])};
    const Acc number = F::at(pair);
    const Acc m = group.counted[lane] + excluded;
    const bool counted = m != Acc(0);
    numbers[lane] = number;
    sums[kRuleTotal].at[lane] += m * number;
    sums[kRuleLeast].at[lane] =
        math::Minimum::combine(sums[kRuleLeast].at[lane], select(counted, number, Acc(INFINITY)));
    sums[kRuleGreatest].at[lane] = math::Maximum::combine(sums[kRuleGreatest].at[lane],
                                                          select(counted, number, Acc(-INFINITY)));
  }
  if (rule.over != Over::kToken) return;
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const Acc number = numbers[lane], m = group.counted[lane], x = log_ratios[lane];
    const bool counted = m != Acc(0);
    const bool below = counted & (number < low), above = counted & (number > high);
    const bool rising = rises[lane] != Acc(0);
    const bool outward = (!rule.outward_only) | (rising & (x > Acc(0))) | (!rising & (x < Acc(0)));
    const Acc bounded = math::clamp(number, low, high);
    group.lost[lane] |= static_cast<Bits>((below | above) & outward);
    sums[kRuleBelow].at[lane] += select(below, Acc(1), Acc(0));
    sums[kRuleAbove].at[lane] += select(above, Acc(1), Acc(0));
    sums[kRuleBounded].at[lane] += m * bounded;
    sums[kRuleBoundedSquares].at[lane] += m * (bounded * bounded);
  }
}

// Applies all rules to a group. It first loads the group's log-probs under the rollout policy.
// Returns true if a kept token is lost.
template <typename Acc>
bool add_rules(const Options& options, const Acc* b, const Acc* rises, const Acc* logprobs,
               const Acc* log_ratios, Judged<Acc>& group, Lanes<Acc>* sums) {
  using Bits = typename math::Constants<Acc>::Bits;
  alignas(64) Bits nonfinite[kLanes];
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    nonfinite[lane] = group.lost[lane];
    const bool is_there = group.counted[lane] + group.excluded[lane] != Acc(0);
    group.rollout_logprobs[lane] = select(is_there, b[lane], Acc(0));
  }
  for (int i = 0; i < options.rules_count; ++i) {
    const Rule& rule = options.rules[i];
    Lanes<Acc>* const of_rule = sums + kLaneRows + i * rollout::kRuleTotals;
    visit_row(rollout::RuleTable(), rule.formula, [&](auto formula) {
      add_rule<decltype(formula)>(rule, rises, logprobs, log_ratios, group, of_rule);
    });
  }
  Bits any = 0;
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    any |= group.lost[lane];
    const bool lost = (group.lost[lane] & ~nonfinite[lane]) != 0;
    sums[kLaneRejected].at[lane] += select(lost, group.counted[lane], Acc(0));
    sums[kLaneRejectedTokens].at[lane] += select(lost, Acc(1), Acc(0));
  }
  return any != 0;
}

// Writes 1 for a token whose advantage is positive, else 0.
template <typename Acc>
void load_rises(const Inputs& in, const Segment& segment, const Tile& tile, Acc* rises) {
  const View& view = in.advantages;
  if (view.data == nullptr) return;
  const bool per_token = in.has_advantage_per_token;
  visit_dtype(view.dtype, [&](auto zero) {
    using From = decltype(zero);
    using Number = std::conditional_t<std::is_same_v<From, double>, double, float>;
    const From* const data = static_cast<const From*>(view.data);
    for (int64_t i = 0; i < tile.size; ++i) {
      const int64_t at = per_token
                             ? tile.row * view.row_stride + (tile.column + i) * view.column_stride
                             : segment.sequence * view.column_stride;
      rises[i] = convert<Number>(data[at]) > Number(0) ? Acc(1) : Acc(0);
    }
  });
}

// Writes the mask of a tile. It is the given mask, and 0 where a token is lost. `lost` is null if
// no token is lost.
void store_mask(const View& mask, const Tile& tile, const uint8_t* lost, const Output& to) {
  if (mask.data == nullptr) {
    uint8_t* const bools = static_cast<uint8_t*>(to.data) + tile.index;
    for (int64_t i = 0; i < tile.size; ++i) bools[i] = lost == nullptr || lost[i] == 0;
    return;
  }
  visit_dtype(mask.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* const from = static_cast<const T*>(mask.data) + tile.row * mask.row_stride +
                          tile.column * mask.column_stride;
    T* const kept = static_cast<T*>(to.data) + tile.index;
    if (lost == nullptr && mask.column_stride == 1) {
      std::copy_n(from, tile.size, kept);
      return;
    }
    for (int64_t i = 0; i < tile.size; ++i) {
      kept[i] = lost != nullptr && lost[i] != 0 ? T{} : from[i * mask.column_stride];
    }
  });
}

bool are_bools(const View& mask) { return mask.data == nullptr || mask.dtype == DType::kBool; }

template <typename Acc>
void write_totals(Sums<Acc>& sums, int rules, double* totals) {
  double lanes[kLaneRows];
  for (int row = 0; row < kLaneRows; ++row) lanes[row] = sums.total(row);
  const double length = lanes[kNearLength];
  const rollout::NearSums near = {length, lanes[kNearGrowth], lanes[kNearGrowthSquares]};
  const auto near_weight = [&](int row, double none) {
    return length > 0 ? math::exp<Range::kNear>(lanes[row]) : none;
  };
  totals[rollout::kLength] = length + lanes[kFarLength];
  totals[rollout::kTokens] = length + lanes[kFarTokens];
  totals[rollout::kNonfinite] = lanes[kFarNonfinite];
  totals[rollout::kCounted] = length + lanes[kFarCounted];
  totals[rollout::kExcluded] = lanes[kFarExcluded];
  totals[rollout::kRejected] = lanes[kLaneRejected];
  totals[rollout::kRejectedTokens] = lanes[kLaneRejectedTokens];
  for_each_row(statistics::Sums(), [&](auto row) {
    using Row = decltype(row);
    double& total = totals[rollout::kStatisticsSums + rollout::sum_of<Row>];
    total = lanes[lane_row_of<Row>()];
    if constexpr (!Row::has_near_sum) total += Row::near(near);
  });
  totals[rollout::kBelow] = lanes[kFarBelow];
  totals[rollout::kAbove] = lanes[kFarAbove];
  totals[rollout::kOutside] = lanes[kFarOutside];
  totals[rollout::kLeast] = std::min(lanes[kNearLeast], lanes[kFarLeast]);
  totals[rollout::kLeastWeight] =
      std::min(near_weight(kNearLeast, INFINITY), lanes[kFarLeastWeight]);
  totals[rollout::kGreatest] = std::max(lanes[kNearGreatest], lanes[kFarGreatest]);
  totals[rollout::kGreatestWeight] =
      std::max(near_weight(kNearGreatest, -INFINITY), lanes[kFarGreatestWeight]);
  for (int i = 0; i < rules * rollout::kRuleTotals; ++i) {
    totals[rollout::kTotals + i] = sums.total(kLaneRows + i);
  }
}

// The tokens of a tile, converted from any inputs.
template <typename Acc>
class AnyTokens {
 public:
  AnyTokens(const Inputs& in, const Tile& tile, Acc (*buffers)[kTileTokens + kLanes])
      : weights_(load_weights(in.mask, tile, buffers[0])),
        a_(load(in.logprobs, tile, buffers[1])),
        b_(load(in.rollout_logprobs, tile, buffers[2])),
        is_bool_(are_bools(in.mask)) {}

  // Loads the group at `first`, with 0 for masked tokens. Returns true if the group is near. The
  // bounds on weights act only beyond `near`.
  bool load_group(int64_t first, Acc near, Acc* logprobs, Acc* log_ratios, Acc* mask) const {
    const Acc *a = a_ + first, *b = b_ + first, *given = weights_ + first;
#pragma GCC ivdep
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const bool kept = given[lane] != Acc(0);
      mask[lane] = given[lane];
      logprobs[lane] = select(kept, a[lane], Acc(0));
      log_ratios[lane] = select(kept, a[lane] - b[lane], Acc(0));
    }
    return are_within(log_ratios, near) && (is_bool_ || are_zeros_and_ones(mask));
  }
  const Acc* logprobs(int64_t first, Acc*) const { return a_ + first; }
  const Acc* rollout_logprobs(int64_t first, Acc*) const { return b_ + first; }
  bool has_bad_weights(int64_t n) const { return any_bad(weights_, n); }

 private:
  const Acc* weights_;
  const Acc* a_;
  const Acc* b_;
  const bool is_bool_;
};

// The tokens of a tile that has only whole groups. The log-probs are all fp32 or all bf16. The mask
// is bool or absent. The tensors have no gaps. Tokens are converted beside the arithmetic.
template <typename T>
class DenseTokens {
 public:
  DenseTokens(const Inputs& in, const Tile& tile)
      : a_(at<T>(in.logprobs, tile)),
        b_(at<T>(in.rollout_logprobs, tile)),
        mask_(in.mask.data == nullptr ? kOnes.mask : at<Bool>(in.mask, tile)) {}

  static bool serve(const Inputs& in, const Tile& tile) {
    const auto is_dense = [](const View& view, DType dtype) {
      return view.column_stride == 1 && view.dtype == dtype;
    };
    const DType dtype = sizeof(T) == 2 ? DType::kBFloat16 : DType::kFloat32;
    return tile.size == tile.padded && is_dense(in.logprobs, dtype) &&
           is_dense(in.rollout_logprobs, dtype) &&
           (in.mask.data == nullptr || is_dense(in.mask, DType::kBool));
  }

  KLFAST_HOST_DEVICE bool load_group(int64_t first, float near, float* logprobs, float* log_ratios,
                                     float* mask) const {
    fetch_group(a_ + first + kTileTokens);
    fetch_group(b_ + first + kTileTokens);
    fetch_group(mask_ + first + kTileTokens);
    const auto write = [&](int64_t lane, auto a, auto kept) KLFAST_INLINE_LAMBDA {
      store(kept.of(a), logprobs + lane);
      store(kept.of(1), mask + lane);
    };
    return load_difference(a_ + first, b_ + first, mask_ + first, near, log_ratios, write);
  }
  const float* logprobs(int64_t first, float* buffer) const { return as_float(a_ + first, buffer); }
  const float* rollout_logprobs(int64_t first, float* buffer) const {
    return as_float(b_ + first, buffer);
  }
  bool has_bad_weights(int64_t) const { return false; }

 private:
  const T* a_;
  const T* b_;
  const Bool* mask_;

  template <typename Element>
  static const Element* at(const View& view, const Tile& tile) {
    return static_cast<const Element*>(view.data) + tile.row * view.row_stride + tile.column;
  }
  static const float* as_float(const float* from, float*) { return from; }
  static const float* as_float(const BFloat16* from, float* buffer) {
#pragma GCC ivdep
    for (int64_t lane = 0; lane < kLanes; ++lane) buffer[lane] = convert<float>(from[lane]);
    return buffer;
  }
};

// The pass over a segment.
template <typename Acc>
class Pass {
 public:
  Pass(const Call& call, const Segment& segment, CacheLine* scratch)
      : call_(call),
        options_(call.in.options),
        segment_(segment),
        bounds_(options_),
        weighs_(options_.weight == rollout::Weight::kToken),
        sums_(options_.rules_count, scratch) {}

  // See RolloutKernels::run_segment.
  bool run(double* totals) {
    const Inputs& in = call_.in;
    bool good = true;
    for (int64_t done = 0; done < segment_.length; done += kTileTokens) {
      const Tile tile = tile_of(in.batch, segment_, done);
      load_rises(in, segment_, tile, rises_);
      if constexpr (sizeof(Acc) == 4) {
        if (DenseTokens<float>::serve(in, tile)) {
          run_tile(tile, DenseTokens<float>(in, tile));
          continue;
        }
        if (DenseTokens<BFloat16>::serve(in, tile)) {
          run_tile(tile, DenseTokens<BFloat16>(in, tile));
          continue;
        }
      }
      const AnyTokens<Acc> tokens(in, tile, buffers_);
      run_tile(tile, tokens);
      if (can_be_bad(in.mask)) good &= !tokens.has_bad_weights(tile.size);
    }
    write_totals(sums_, options_.rules_count, totals);
    return good;
  }

 private:
  const Call& call_;
  const Options& options_;
  const Segment& segment_;
  const TokenBounds<Acc> bounds_;
  const bool weighs_;
  Sums<Acc> sums_;
  Groups<Acc> groups_;
  Judged<Acc> judged_;
  // Buffers a whole page apart would alias in the cache.
  alignas(64) Acc buffers_[4][kTileTokens + kLanes];
  alignas(64) Acc rises_[kTileTokens];
  alignas(64) uint8_t lost_[kTileTokens];
  bool any_far_ = false, any_lost_ = false;

  template <typename Tokens>
  void run_tile(const Tile& tile, const Tokens& tokens) {
    const rollout::Outputs& out = call_.out;
    Acc* const to = weighs_
                        ? output_tile(out.weights, tile.index, tile.size, tile.padded, buffers_[3])
                        : buffers_[3];
    any_far_ = any_lost_ = false;
    for (int64_t first = 0; first < tile.padded; first += kNearGroups * kLanes) {
      run_groups(tokens, first, std::min(kNearGroups, (tile.padded - first) / kLanes), to + first);
    }
    sums_.flush(0, kNearRows);
    if (any_far_) sums_.flush(kFarLength, kFarRows);
    if (options_.rules_count > 0) sums_.flush(kLaneRejected, sums_.rows());
    if (weighs_) store_tile(out.weights, tile.index, tile.size, to);
    store_mask(call_.in.mask, tile, any_lost_ ? lost_ : nullptr, out.mask);
  }

  // Runs `n` groups from `first` on.
  template <typename Tokens>
  KLFAST_HOST_DEVICE void run_groups(const Tokens& tokens, int64_t first, int64_t n, Acc* to) {
    bool is_near[kNearGroups];
    bool all_near = n == kNearGroups;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = i * kLanes;
      if (weighs_) fetch_group(to + at + kTileTokens);
      is_near[i] = tokens.load_group(first + at, bounds_.near, groups_.logprobs + at,
                                     groups_.x + at, groups_.mask + at);
      all_near &= is_near[i];
    }
    if (all_near) {
      add_near<kNearGroups>(groups_.logprobs, groups_.x, groups_.mask, sums_.tile(), to);
      if (options_.rules_count == 0) return;
    }
    for (int64_t i = 0; i < n; ++i) {
      run_group(tokens, first, i * kLanes, is_near[i], all_near, to + i * kLanes);
    }
  }

  // Runs the group at `first + at`. If it `is_added`, its near sums have been added already.
  template <typename Tokens>
  __attribute__((noinline)) void run_group(const Tokens& tokens, int64_t first, int64_t at,
                                           bool is_near, bool is_added, Acc* to) {
    Acc *const logprobs = groups_.logprobs + at, *const x = groups_.x + at,
               *const mask = groups_.mask + at;
    alignas(64) Acc b_buffer[kLanes];
    bool loses = false;
    const bool judges = options_.rules_count > 0;
    const Acc* b = nullptr;
    if (!is_near || judges) b = tokens.rollout_logprobs(first + at, b_buffer);
    if (is_near) {
      if (!is_added) add_near<1>(logprobs, x, mask, sums_.tile(), to);
      if (!judges) return;
      std::copy_n(mask, kLanes, judged_.counted);
      std::fill_n(judged_.excluded, kLanes, Acc(0));
      std::fill_n(judged_.lost, kLanes, 0);
    } else {
      alignas(64) Acc a_buffer[kLanes];
      const Acc* const a = tokens.logprobs(first + at, a_buffer);
      loses = add_far(bounds_, a, b, mask, logprobs, x, judged_, sums_.tile(), to);
      any_far_ = true;
    }
    if (judges) {
      loses = add_rules(options_, b, rises_ + first + at, logprobs, x, judged_, sums_.tile());
    }
    if (loses) note_lost(first + at);
  }

  void note_lost(int64_t first) {
    if (!any_lost_) std::fill_n(lost_, kTileTokens, 0);
    any_lost_ = true;
    for (int64_t lane = 0; lane < kLanes; ++lane) lost_[first + lane] = judged_.lost[lane] != 0;
  }
};

bool run_segment(const Call& call, const Segment& segment, double* totals, CacheLine* scratch) {
  return call.in.is_double ? Pass<double>(call, segment, scratch).run(totals)
                           : Pass<float>(call, segment, scratch).run(totals);
}

// Writes a sequence's weight to the kept tokens of a tile with x < infinity, and 0 to the others.
template <typename Acc>
void fill_weights(const Inputs& in, const Tile& tile, const rollout::Decision& decision,
                  Acc* buffer, Acc* to) {
  const Acc value = static_cast<Acc>(decision.weight.value);
  if (in.mask.data == nullptr && decision.all_finite) {
    std::fill_n(to, tile.size, value);
    return;
  }
  const Acc* const mask = load_weights(in.mask, tile, buffer);
#pragma GCC ivdep
  for (int64_t i = 0; i < tile.size; ++i) to[i] = select(mask[i] != Acc(0), value, Acc(0));
  if (decision.all_finite) return;
  const Acc* const a = load(in.logprobs, tile, buffer + (kTileTokens + kLanes));
  const Acc* const b = load(in.rollout_logprobs, tile, buffer + 2 * (kTileTokens + kLanes));
#pragma GCC ivdep
  for (int64_t i = 0; i < tile.size; ++i) {
    to[i] = select(a[i] - b[i] < Acc(INFINITY), to[i], Acc(0));
  }
}

template <typename Acc>
void fill_segment(const Call& call, const Segment& segment, const rollout::Decision& decision) {
  const Inputs& in = call.in;
  alignas(64) Acc buffer[3 * (kTileTokens + kLanes)];
  for (int64_t done = 0; done < segment.length; done += kTileTokens) {
    const Tile tile = tile_of(in.batch, segment, done);
    if (in.options.weighs_sequences()) {
      fill_weights(in, tile, decision, buffer,
                   static_cast<Acc*>(call.out.weights.data) + tile.index);
    }
    if (!decision.rejected) continue;
    const Output& mask = call.out.mask;
    const int64_t size = element_size(mask.dtype);
    std::fill_n(static_cast<char*>(mask.data) + tile.index * size, tile.size * size, 0);
  }
}

void fill_segment(const Call& call, const Segment& segment, const rollout::Decision& decision) {
  call.in.is_double ? fill_segment<double>(call, segment, decision)
                    : fill_segment<float>(call, segment, decision);
}

}  // namespace

KLFAST_TABLE(RolloutKernels, rollout_kernels) = {run_segment, fill_segment};

}  // namespace klfast::cpu
