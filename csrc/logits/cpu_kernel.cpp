// The CPU kernels over rows of logits. setup.py compiles this file once per instruction set, and
// KLFAST_INSTRUCTION_SET names the set. Only the table at the end is visible outside of a copy.
//
// A kernel reads a row in tiles, and a tile in blocks of vectors (simd.h). The last block is padded
// with words that do not exist, whose logits are -infinity. formulas/divergences.h has the
// formulas. formulas/passes.h has the passes over a row.

#include "logits/cpu_kernel.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

#include "device/cpu/instruction_set_table.h"
#include "device/cpu/simd.h"
#include "device/cpu/tiles.h"
#include "formulas/divergences.h"
#include "logits/rows.h"

namespace klfast::cpu {
namespace {

using divergences::DivergenceTable;
using divergences::Origins;
using divergences::PairRow;
using divergences::PairSums;
using divergences::RowState;
using divergences::WordGradients;
using math::Base;
using math::Range;
using passes::Step;
using passes::Verdict;

// A tile is padded to a multiple of this number, which is a multiple of every block's size.
constexpr int64_t kPadding = 64;

// The words whose sum is in the arithmetic's type. A lane adds so few of them that their rounding
// does not show.
template <typename B>
constexpr int64_t kSumWords =
    sizeof(typename B::Element) == 4 ? std::min<int64_t>(16 * B::kSize, kTileWords) : kTileWords;

// fp32 works in base 2, because 2^x takes fewer instructions than e^x.
template <typename Acc>
constexpr Base kBase = sizeof(Acc) == 4 ? Base::kTwo : Base::kE;

template <typename Acc>
using Guess = divergences::Guess<Acc, kBase<Acc>>;
template <typename Acc>
using RowGradient = divergences::RowGradient<Acc, kBase<Acc>>;

// A block of words. Four chains of instructions keep the processor busy. With two, a KL in bf16
// takes 1.13 times as long on AVX2. Eight need more registers than there are.
template <typename Acc>
using Words = Block<Acc, 4>;

// A row of logits as a view, with the unit and the origin that place its logits (divergences.h).
struct Row {
  View words;
  int64_t size;
  double unit = 1;
  double origin = 0;

  Row from(double new_unit, double new_origin) const { return {words, size, new_unit, new_origin}; }
};

Row row_at(const RowInputs& in, const Logits& logits, int64_t row) {
  const int64_t offset = in.shape.offset(logits, row) * element_size(logits.dtype);
  const char* const first = static_cast<const char*>(logits.data) + offset;
  return {{first, logits.dtype, 0, logits.word_stride}, in.shape.words};
}

// The position and size of a tile in its row, in words.
struct Tile {
  int64_t first;
  int64_t size;
  int64_t padded;  // size rounded up to whole blocks
};

Tile tile_at(int64_t first, int64_t words) {
  const int64_t size = std::min(kTileWords, words - first);
  return {first, size, (size + kPadding - 1) / kPadding * kPadding};
}

// Calls visit(T()), where T is the type of the words that blocks are loaded from, bf16 or Acc. The
// order of a row's sums depends on T. T depends only on the dtypes and the placement of the rows.
template <typename Acc, typename Visitor>
auto visit_words(const Row& first, const Row& second, const Visitor& visit) {
  const bool is_bf16 = first.unit == 1 && first.words.dtype == DType::kBFloat16 &&
                       second.words.dtype == DType::kBFloat16;
  if constexpr (std::is_same_v<Acc, float>) {
    if (is_bf16) return visit(BFloat16());
  }
  return visit(Acc());
}

// Returns a tile of a row, placed and padded. This is the row's own memory if it already has this
// form, and the buffer otherwise.
template <typename T>
const T* load(const Row& row, const Tile& tile, T* buffer) {
  const T none = convert<T>(-INFINITY);
  const T* words = load_tile(row.words, 0, tile.first, tile.size, tile.padded, buffer);
  if (words == buffer) std::fill(buffer + tile.size, buffer + tile.padded, none);
  if constexpr (!std::is_same_v<T, BFloat16>) {
    if (row.unit != 1) {
      using B = Words<T>;
      for (int64_t i = 0; i < tile.padded; i += B::kSize) {
        store(divergences::placed(cpu::load<B>(words + i), T(row.unit), T(row.origin)), buffer + i);
      }
      words = buffer;
    }
  }
  return words;
}

double word_at(const Row& row, int64_t index) {
  return element_at<true>(row.words.data, row.words.dtype, index * row.words.column_stride);
}

// The greatest of a row's first `words` logits, without placement. NaN is ignored here, because it
// shows in every sum.
template <typename Acc>
Acc greatest(const Row& placed_row, int64_t words) {
  using B = Words<Acc>;
  const Row row = placed_row.from(1, 0);
  B found(-INFINITY);
  visit_words<Acc>(row, row, [&](auto zero) {
    alignas(64) decltype(zero) buffer[kTileWords];
    for (int64_t first = 0; first < words; first += kTileWords) {
      const Tile tile = tile_at(first, words);
      const auto* const loaded = load(row, tile, buffer);
      for (int64_t i = 0; i < tile.padded; i += B::kSize) {
        found = found.at_least(cpu::load<B>(loaded + i));
      }
    }
  });
  return greatest_of(found);
}

// Runs the passes of a row (passes.h). find(words) finds the greatest of the first `words` logits.
// sum(again) sums the row. Both return a verdict.
template <typename Find, typename Sum>
void run_passes(int64_t words, const Find& find, const Sum& sum) {
  for (Step step = Step::kFindFirst; step != Step::kDone;) {
    Verdict verdict;
    if (step == Step::kFindFirst || step == Step::kFindInRow) {
      verdict = find(step == Step::kFindFirst ? std::min(kTileWords, words) : words);
    } else {
      verdict = sum(step == Step::kSumAgain);
    }
    step = passes::next_step(step, verdict);
  }
}

// Stores a log-prob of a row's pick.
template <typename Acc>
void store_of_pick(const RowInputs& in, void* data, int64_t index, double value) {
  in.has_double_picks() ? store_number<double>(data, index, value)
                        : store_number<Acc>(data, index, value);
}

// Zeroes a row's gradient.
void clear(const Output& output, int64_t row, int64_t words) {
  if (output.data == nullptr) return;
  const int64_t bytes = words * element_size(output.dtype);
  std::fill_n(static_cast<char*>(output.data) + row * bytes, bytes, 0);
}

// True if a row's temperature is valid, and each of its token ids is a word or a permitted kNoId.
template <typename Acc>
bool is_valid(const RowInputs& in, int64_t row) {
  const Acc scale = static_cast<Acc>(in.scale(row));
  if (!(scale > 0 && std::isfinite(scale))) return false;
  if (in.token_ids == nullptr) return true;
  const int64_t* const ids = in.token_ids + row * in.picks;
  return std::all_of(ids, ids + in.picks,
                     [&](int64_t id) { return in.is_word(id) || in.is_none(id); });
}

// The log-prob of a row's pick, or 0 if the pick does not exist. The log-sum-exp is in two parts,
// as in divergences::log_prob.
template <typename Acc>
double log_prob(const RowInputs& in, const Row& row, int64_t index, double lse, double rest = 0,
                int64_t pick = 0) {
  constexpr Base base = kBase<Acc>;
  const int64_t id = in.token_ids[index * in.picks + pick];
  if (in.is_none(id)) return 0;
  const double scale = divergences::rounded_scale<Acc, base>(in.scale(index));
  return divergences::log_prob<base>(word_at(row, id), scale, row.unit, row.origin, lse, rest);
}

// ---------------------------------------------------------------- one model

// The words that a row's sums leave out: its picks, each once. Their terms are added in double. In
// fp32 a term near 1 would take the digits of all other terms, and 1 minus the probability of the
// picks would have no digits.
class LeftOut {
 public:
  LeftOut(const RowInputs& in, int64_t index, const PickMemory& memory) : memory_(memory) {
    std::fill_n(memory.of_tile, in.shape.words / kTileWords + 1, int64_t{-1});
    const int64_t* const ids = in.token_ids + index * in.picks;
    for (int64_t pick = 0; pick < in.picks; ++pick) {
      if (in.is_word(ids[pick])) add(ids[pick]);
    }
  }

  const PickMemory::Word* begin() const { return memory_.words; }
  const PickMemory::Word* end() const { return memory_.words + size_; }

  // The words of a tile, with -infinity for those that are left out. They are in the buffer if
  // there are any.
  template <typename T>
  const T* without(const T* words, const Tile& tile, T* buffer) const {
    const int64_t last = memory_.of_tile[tile.first / kTileWords];
    if (last < 0) return words;
    if (words != buffer) std::copy_n(words, tile.padded, buffer);
    for (int64_t at = last; at >= 0; at = memory_.words[at].before) {
      buffer[memory_.words[at].index - tile.first] = convert<T>(-INFINITY);
    }
    return buffer;
  }

 private:
  void add(int64_t index) {
    int64_t& last = memory_.of_tile[index / kTileWords];
    for (int64_t at = last; at >= 0; at = memory_.words[at].before) {
      if (memory_.words[at].index == index) return;
    }
    memory_.words[size_] = {index, last};
    last = size_++;
  }

  const PickMemory& memory_;
  int64_t size_ = 0;
};

struct WordSums {
  double mass = 0;
  double moment = 0;
};

// `scale`, `guess` and the moment are in the base's unit.
template <bool kEntropy, typename Acc>
WordSums sum_words(const Row& row, const LeftOut& left_out, Acc scale, Acc guess) {
  using B = Words<Acc>;
  constexpr Base base = kBase<Acc>;
  WordSums sums = visit_words<Acc>(row, row, [&](auto zero) {
    using T = decltype(zero);
    const Acc own_scale = scale, own_guess = guess;
    alignas(64) T buffer[kTileWords];
    LaneSum<B> masses, moments;
    B mass(0), moment(0);
    for (int64_t first = 0; first < row.size; first += kTileWords) {
      const Tile tile = tile_at(first, row.size);
      const T* const ahead = load(row, tile, buffer);
      const T* const words = left_out.without(ahead, tile, buffer);
      for (int64_t begin = 0; begin < tile.padded; begin += kSumWords<B>) {
        const int64_t end = std::min(begin + kSumWords<B>, tile.padded);
        for (int64_t i = begin; i < end; i += B::kSize) {
          fetch<B::kSize * sizeof(T)>(ahead + i + kTileWords);
          const B x = cpu::load<B>(words + i);
          const auto word = divergences::word_of<base>(x, own_scale, own_guess);
          mass += word.mass;
          if constexpr (kEntropy) moment += word.moment;
        }
        masses.flush(mass);
        if constexpr (kEntropy) moments.flush(moment);
      }
    }
    return WordSums{masses.total(), kEntropy ? moments.total() : 0.0};
  });
  for (const PickMemory::Word& word : left_out) {
    const double x = divergences::placed(word_at(row, word.index), row.unit, row.origin);
    const double s = x * static_cast<double>(scale) - static_cast<double>(guess);
    const divergences::Word<double> terms = divergences::left_out_word_of<base>(s);
    sums.mass += terms.mass;
    sums.moment += terms.moment;
  }
  return sums;
}

struct WordRow {
  double guess;  // of the log-sum-exp, in the base's unit
  double rest;   // the log-sum-exp minus the guess, in nats
  double entropy;
};

// Returns the results of a row, and sets the row's placement.
template <bool kEntropy, typename Acc>
WordRow sum_row(const RowInputs& in, int64_t index, const PickMemory& memory, Row& row) {
  constexpr Base base = kBase<Acc>;
  const LeftOut left_out(in, index, memory);
  Acc scale = 0;
  Acc guess = 0;
  double entropy = NAN;
  WordSums sums;
  const auto find = [&](int64_t words) {
    sums.mass = entropy = NAN;
    Acc top = greatest<Acc>(row, words);
    // A row of nothing but -infinity then has a sum of 0, and a row with a NaN a sum of NaN.
    if (top == -INFINITY && words == row.size) top = 0;
    if (!std::isfinite(top)) return Verdict::kUseless;
    const double origin = divergences::origin_of(top, in.scale(index));
    row = row.from(divergences::unit_of({origin, 0}), origin);
    scale = static_cast<Acc>(divergences::in_units<base>(in.scale(index) / row.unit));
    guess = divergences::placed(top, static_cast<Acc>(row.unit), static_cast<Acc>(origin)) * scale;
    return Verdict::kGood;
  };
  const auto sum = [&](bool again) {
    if (again) guess += static_cast<Acc>(divergences::in_units<base>(std::log(sums.mass)));
    sums = sum_words<kEntropy>(row, left_out, scale, guess);
    entropy = divergences::entropy_of_sums<base>(sums.mass, sums.moment);
    const bool cancels = kEntropy && divergences::entropy_cancels(sums.mass, entropy);
    const Verdict verdict = passes::verdict_of(sums.mass);
    return verdict == Verdict::kGood && cancels ? Verdict::kPoor : verdict;
  };
  run_passes(row.size, find, sum);
  return {static_cast<double>(guess), std::log(sums.mass), entropy};
}

template <typename Acc>
bool token_logprobs_forward(const TokenLogprobsForward& call, int64_t index,
                            const PickMemory& memory) {
  const RowInputs& in = call.in;
  const int64_t rows = in.shape.rows();
  const int64_t first = index * in.picks;
  if (!in.keeps(index)) {
    for (int64_t i = 0; i < in.picks; ++i) store_of_pick<Acc>(in, call.logprobs, first + i, 0);
    store_number<Acc>(call.entropy, index, 0);
    for (int field = 0; field < WordSaved::kCount; ++field) call.saved[field * rows + index] = 0;
    return true;
  }
  if (!is_valid<Acc>(in, index)) return false;
  Row row = row_at(in, call.logits, index);
  const WordRow found = call.entropy != nullptr ? sum_row<true, Acc>(in, index, memory, row)
                                                : sum_row<false, Acc>(in, index, memory, row);
  for (int64_t i = 0; i < in.picks; ++i) {
    const double logprob = log_prob<Acc>(in, row, index, found.guess, found.rest, i);
    store_of_pick<Acc>(in, call.logprobs, first + i, logprob);
  }
  store_number<Acc>(call.entropy, index, found.entropy);
  call.saved[WordSaved::kOrigin * rows + index] = row.origin;
  const double guess = divergences::nats<kBase<Acc>>(found.guess);
  call.saved[WordSaved::kLse * rows + index] = guess + found.rest;
  return true;
}

// Sums the incoming gradients of a row's log-probs, for the picks with counts(id).
template <typename Acc, typename Counts>
double sum_incoming(const TokenLogprobsBackward& call, int64_t index, const Counts& counts) {
  const int64_t first = index * call.in.picks;
  double sum = 0;
  for (int64_t i = first; i < first + call.in.picks; ++i) {
    if (counts(call.in.token_ids[i])) sum += number_of_pick<Acc>(call.in, call.grad_logprobs, i);
  }
  return sum;
}

// Writes the gradients of the words whose log-probs are results. A word that is picked twice is
// written once.
template <typename Acc>
void write_picks(const TokenLogprobsBackward& call, int64_t index, double all) {
  const RowInputs& in = call.in;
  const int64_t* const ids = in.token_ids + index * in.picks;
  const double of_entropy = number_at<Acc>(call.grad_entropy, index) * in.scale(index);
  for (int64_t pick = 0; pick < in.picks; ++pick) {
    const int64_t id = ids[pick];
    if (!in.is_word(id) || std::find(ids, ids + pick, id) != ids + pick) continue;
    const auto is_own = [&](int64_t other) { return other == id; };
    const double own = sum_incoming<Acc>(call, index, is_own) * in.scale(index);
    const double gradient =
        divergences::pick_gradient(number_of_pick<Acc>(in, call.logprobs, index * in.picks + pick),
                                   own, all, of_entropy, number_at<Acc>(call.entropy, index));
    const Acc rounded = static_cast<Acc>(gradient);
    store_tile(call.grad, index * in.shape.words + id, 1, &rounded);
  }
}

template <typename Acc>
void token_logprobs_backward(const TokenLogprobsBackward& call, int64_t index) {
  const RowInputs& in = call.in;
  const int64_t words = in.shape.words;
  if (!in.keeps(index) || !has_incoming<Acc>(call, index)) return clear(call.grad, index, words);
  const int64_t rows = in.shape.rows();
  const double origin = call.saved[WordSaved::kOrigin * rows + index];
  const double lse = call.saved[WordSaved::kLse * rows + index];
  const double unit = divergences::unit_of({origin, 0});
  const Row row = row_at(in, call.logits, index).from(unit, origin);
  const double scale = in.scale(index);
  const auto exists = [&](int64_t id) { return !in.is_none(id); };
  const double of_lse = number_of_pick<Acc>(in, call.grad_lse, index);
  const double of_logprob = (sum_incoming<Acc>(call, index, exists) - of_lse) * scale;
  const double of_entropy = number_at<Acc>(call.grad_entropy, index) * scale;
  const auto own = divergences::token_row_of<Acc, kBase<Acc>>(
      scale / unit, lse, of_logprob, of_entropy, number_at<Acc>(call.entropy, index));
  visit_words<Acc>(row, row, [&](auto zero) {
    using T = decltype(zero);
    using B = Words<Acc>;
    alignas(64) T buffer[kTileWords];
    alignas(64) T out_buffer[kTileWords];
    for (int64_t first = 0; first < words; first += kTileWords) {
      const Tile tile = tile_at(first, words);
      const int64_t at = index * words + first;
      const T* const logits = load(row, tile, buffer);
      T* const grad = output_tile(call.grad, at, tile.size, tile.padded, out_buffer);
      for (int64_t i = 0; i < tile.padded; i += B::kSize) {
        fetch<B::kSize * sizeof(T)>(logits + i + kTileWords);
        fetch<B::kSize * sizeof(T)>(grad + i + kTileWords);
        const B x = cpu::load<B>(logits + i);
        store(divergences::token_gradient<kBase<Acc>>(x, own), grad + i);
      }
      store_tile(call.grad, at, tile.size, grad);
    }
  });
  write_picks<Acc>(call, index, of_logprob);
}

// --------------------------------------------------------------- two models

// The sums of a tile, by lane.
template <typename B>
struct PairTile {
  B mass = B(0);
  B spread = B(0);
  B slope = B(0);
  B other = B(0);
  B moment = B(0);  // of one model (entropy.h)
};

// Returns the number in a lane, and sets it to 0. Only a copy in memory is indexed, so that the
// block itself stays in registers.
template <typename B>
KLFAST_HOST_DEVICE double take_lane(B& block, int lane) {
  alignas(64) typename B::Element lanes[B::kSize];
  store(block, lanes);
  const double taken = static_cast<double>(lanes[lane]);
  lanes[lane] = 0;
  block = cpu::load<B>(lanes);
  return taken;
}

// The lane to which load() takes the element of a T at `position`.
template <typename B, typename T>
constexpr int lane_of(int position) {
  if (!std::is_same_v<T, BFloat16>) return position;
  const int in_pair = position % (2 * B::kWidth);
  return position - in_pair + in_pair % 2 * B::kWidth + in_pair / 2;
}

// The sums of a row, by lane.
template <typename B>
struct PairLanes {
  LaneSum<B> mass, spread, slope, other, moment;
  B most = B(0);  // the greatest mass that a lane has had in one tile

  // The sums of the lane `left_out` are returned instead of added, except for the moment. -1 leaves
  // out no lane. `unit` is the number of nats in a unit of `slope`.
  template <Range range, EntropyOf of>
  KLFAST_HOST_DEVICE PairSums flush(PairTile<B>& tile, int left_out, double unit) {
    most = most.at_least(tile.mass);
    PairSums left;
    if (left_out >= 0) {
      left = {take_lane(tile.mass, left_out), take_lane(tile.spread, left_out),
              unit * take_lane(tile.slope, left_out), take_lane(tile.other, left_out), false};
    }
    mass.flush(tile.mass);
    spread.flush(tile.spread);
    slope.flush(tile.slope);
    if constexpr (range != Range::kNear) other.flush(tile.other);
    if constexpr (of != EntropyOf::kNone) moment.flush(tile.moment);
    return left;
  }
  PairSums total(double unit) {
    return {mass.total(), spread.total(), unit * slope.total(), other.total(), false};
  }
};

// Adds a block with a log-ratio beyond 1 nat. The function is not inlined, because its constants
// would take the registers of the loop over near blocks. It takes one vector at a time, because
// several vectors would need more registers than there are.
template <EntropyOf of, typename B, typename Acc>
__attribute__((noinline)) void add_far_block(const B& first, const B& second,
                                             const Guess<Acc>& guess, PairTile<B>& sums,
                                             typename math::Constants<B>::Bits& excluded) {
  for (int i = 0; i < B::kVectors; ++i) {
    const auto x = first.vector(i), y = second.vector(i);
    const auto pair = divergences::pair_of(x, y, guess);
    sums.mass.v[i] += pair.mass.v[0];
    sums.spread.v[i] += pair.spread.v[0];
    sums.slope.v[i] += pair.slope.v[0];
    sums.other.v[i] += pair.other.v[0];
    excluded.v[i] |= pair.excluded.v[0];
    if constexpr (of != EntropyOf::kNone) {
      const auto term = divergences::moment_of<of>(pair, x, y, guess);
      sums.moment.v[i] += (term.mass * term.exponent).v[0];
    }
  }
}

// Calls take(first, second) for every block of a pair of rows, and end(begin) after every kSumWords
// words, which start at the word `begin`.
template <typename T, typename B, typename Take, typename End>
KLFAST_HOST_DEVICE void for_each_block(const Row& first_row, const Row& second_row,
                                       const Take& take, const End& end) {
  alignas(64) T first_buffer[kTileWords];
  alignas(64) T second_buffer[kTileWords];
  for (int64_t start = 0; start < first_row.size; start += kTileWords) {
    const Tile tile = tile_at(start, first_row.size);
    const T* const first = load(first_row, tile, first_buffer);
    const T* const second = load(second_row, tile, second_buffer);
    for (int64_t begin = 0; begin < tile.padded; begin += kSumWords<B>) {
      const int64_t last = std::min(begin + kSumWords<B>, tile.padded);
      for (int64_t i = begin; i < last; i += B::kSize) {
        fetch<B::kSize * sizeof(T)>(first + i + kTileWords);
        fetch<B::kSize * sizeof(T)>(second + i + kTileWords);
        take(cpu::load<B>(first + i), cpu::load<B>(second + i));
      }
      end(start + begin);
    }
  }
}

// Computes a block's log-ratios u, and returns true if all are near. `has_offsets` says whether the
// guess has offsets. Without them a shorter formula gives the same u.
template <typename B, typename Acc>
KLFAST_HOST_DEVICE bool are_near(const B& x, const B& y, const Guess<Acc>& guess, bool has_offsets,
                                 B& u) {
  u = has_offsets ? divergences::log_ratio(x, y, guess)
                  : math::fma_of_exact_product(y - x, guess.scale, -guess.ratio);
  constexpr Acc limit = Acc(1 / math::kNats<kBase<Acc>>);
  return !any_beyond(u * u, limit * limit);
}
template <typename Acc>
bool has_offsets(const Guess<Acc>& guess) {
  return guess.first_offset != 0 || guess.second_offset != 0;
}

// The row's target token, or -1.
int64_t target_of(const RowInputs& in, int64_t row) {
  return in.token_ids != nullptr && in.is_word(in.token_ids[row]) ? in.token_ids[row] : -1;
}

// The words whose sums share a number in the arithmetic's type with the row's target. In fp32 they
// lose their digits if the target's term is near 1.
template <typename B>
struct TargetLane {
  int64_t target;  // -1 if there is none
  int64_t begin = target < 0 ? -1 : target / kSumWords<B> * kSumWords<B>;
  int position = target < 0 ? 0 : static_cast<int>((target - begin) % B::kSize);

  // Calls visit(word) for the words other than the target.
  template <typename Visitor>
  void for_each_other(int64_t words, const Visitor& visit) const {
    for (int64_t i = begin + position; i < std::min(begin + kSumWords<B>, words); i += B::kSize) {
      if (i != target) visit(i);
    }
  }
};

// The sums of a pair of rows, and the moment of the model whose entropy is wanted.
struct RowSums {
  PairSums pairs;
  double moment;
  bool is_peaked;   // a word may have more than half of the first model's mass
  PairSums others;  // without the words of TargetLane
};

template <EntropyOf of, typename Acc>
RowSums sum_pairs(const Row& first_row, const Row& second_row, const Guess<Acc>& guess,
                  const TargetLane<Words<Acc>>& target) {
  using B = Words<Acc>;
  constexpr Base base = kBase<Acc>;
  return visit_words<Acc>(first_row, second_row, [&](auto zero) {
    const Guess<Acc> own = guess;
    const bool offsets = has_offsets(own);
    bool any_far = false;
    PairLanes<B> near, far;
    PairTile<B> near_tile, far_tile;
    typename math::Constants<B>::Bits excluded(0);
    const auto take = [&](const B& x, const B& y) KLFAST_INLINE_LAMBDA {
      B u;
      if (!are_near(x, y, own, offsets, u)) {
        any_far = true;
        return add_far_block<of>(x, y, own, far_tile, excluded);
      }
      const B mass = divergences::first_term(x, own);
      near_tile.mass += mass;
      near_tile.spread += mass * divergences::near_tail<base>(u);
      near_tile.slope += mass * u;
      if constexpr (of != EntropyOf::kNone) {
        const auto term = divergences::near_moment_of<of>(mass, x, u, own);
        near_tile.moment += term.mass * term.exponent;
      }
    };
    const int lane = lane_of<B, decltype(zero)>(target.position);
    PairSums of_lane;
    const auto end = [&](int64_t begin) KLFAST_INLINE_LAMBDA {
      const int left_out = begin == target.begin ? lane : -1;
      const PairSums of_near =
          near.template flush<Range::kNear, of>(near_tile, left_out, math::kNats<base>);
      PairSums of_far;
      if (any_far) of_far = far.template flush<Range::kAnywhere, of>(far_tile, left_out, 1);
      if (left_out >= 0) of_lane = divergences::add(of_near, of_far);
    };
    for_each_block<decltype(zero), B>(first_row, second_row, take, end);
    RowSums sums;
    sums.others = divergences::add(near.total(math::kNats<base>), far.total(1));
    sums.pairs = {sums.others.mass + of_lane.mass, sums.others.spread + of_lane.spread,
                  sums.others.slope + of_lane.slope, sums.others.other + of_lane.other, false};
    sums.pairs.excluded = (excluded != 0).any();
    sums.moment = of == EntropyOf::kNone ? 0.0 : near.moment.total() + far.moment.total();
    sums.is_peaked = greatest_of(near.most.at_least(far.most)) > sums.pairs.mass / 2;
    return sums;
  });
}

// The entropy of the model `of`, from a row's sums.
template <EntropyOf of, typename Acc>
double entropy_of(const RowSums& sums) {
  if constexpr (of == EntropyOf::kNone) return 0;
  const double mass = of == EntropyOf::kFirst ? sums.pairs.mass : sums.pairs.other;
  return divergences::entropy_of_sums<kBase<Acc>>(mass, sums.moment);
}

// The results of a pair of rows, the entropy that is wanted, and the target's log-prob under each
// model.
struct SummedRows {
  PairRow row;
  double entropy;
  bool is_peaked;
  double logprob;
  double ref_logprob;
};

// The target's log-prob, which is `logprob` unless it is likely. The log-prob of a likely target
// follows from the sum of all other terms. `others` is this sum without the words of the target's
// lane. `guess` is the guess of the log-sum-exp, in the base's unit.
template <typename Acc>
double exact_logprob(const Row& row, const TargetLane<Words<Acc>>& target, double logprob,
                     double scale, double guess, double others) {
  if (target.target < 0 || !(logprob > -0.5)) return logprob;
  const auto term = [&](int64_t word) {
    const double x = divergences::placed(word_at(row, word), row.unit, row.origin);
    return divergences::left_out_word_of<kBase<Acc>>(x * scale - guess).mass;
  };
  target.for_each_other(row.size, [&](int64_t word) { others += term(word); });
  return 0 - std::log1p(others / term(target.target));  // 0, and not -0, for a certain target
}

// Returns the results of a pair of rows, and sets the rows' placement.
template <EntropyOf of, typename Acc>
SummedRows sum_rows(const RowInputs& in, int64_t index, Row& first, Row& second) {
  const double scale = in.scale(index);
  const TargetLane<Words<Acc>> target = {target_of(in, index)};
  PairRow row;
  RowSums sums = {};
  Guess<Acc> guess = {};
  Origins origins;
  const auto find = [&](int64_t words) {
    row = divergences::nan_row();
    double top = greatest<Acc>(first, words);
    double other_top = greatest<Acc>(second, words);
    if (top == -INFINITY && other_top == -INFINITY && words == first.size) top = other_top = 0;
    if (!std::isfinite(top) || !std::isfinite(other_top)) return Verdict::kUseless;
    origins = {divergences::origin_of(top, scale), divergences::origin_of(other_top, scale)};
    const double unit = divergences::unit_of(origins);
    first = first.from(unit, origins.first);
    second = second.from(unit, origins.second);
    guess = divergences::guess_of_greatest<Acc, kBase<Acc>>(scale, origins, top, other_top);
    return Verdict::kGood;
  };
  const auto sum = [&](bool again) {
    if (again) {
      guess = divergences::guess_of<Acc, kBase<Acc>>(scale / first.unit, row.lse, row.shift);
    }
    sums = sum_pairs<of>(first, second, guess, target);
    row = divergences::row_of(sums.pairs, guess, origins);
    return row.verdict;
  };
  run_passes(in.shape.words, find, sum);
  SummedRows found = {row, entropy_of<of, Acc>(sums), sums.is_peaked, 0, 0};
  if (in.token_ids == nullptr) return found;
  const auto log_prob_of = [&](const Row& placed, double lse, double own_guess, double others) {
    return exact_logprob<Acc>(placed, target, log_prob<Acc>(in, placed, index, lse), guess.scale,
                              own_guess, others);
  };
  const double second_guess =
      static_cast<double>(guess.second) + static_cast<double>(guess.second_rest);
  found.logprob = log_prob_of(first, row.lse, guess.first, sums.others.mass);
  found.ref_logprob = log_prob_of(second, row.lse + row.shift, second_guess, sums.others.other);
  return found;
}

template <typename Acc>
SummedRows sum_rows(const DivergenceInputs& call, int64_t index, Row& first, Row& second) {
  return visit_entropy(call.entropy_of, [&](auto of) {
    return sum_rows<decltype(of)::value, Acc>(call.rows, index, first, second);
  });
}

// The divergence of a pair of rows, and the number that is saved for the backward. For a KL this is
// 1 if the first model's row is peaked, and 0 otherwise. For the others it is the slope.
struct RowValue {
  double value;
  double slope;
};

// The polynomials that are fitted to a divergence's parameter. Each thread keeps the last ones.
template <typename Divergence>
const divergences::Fit& fit_of(double parameter) {
  static thread_local double fitted = NAN;
  static thread_local divergences::Fit fit;
  if constexpr (!Divergence::kIsKl) {
    if (fitted != parameter) {
      fit = Divergence::fit(parameter);
      fitted = parameter;
    }
  }
  return fit;
}

template <typename Divergence, typename B, typename Acc>
__attribute__((noinline)) void evaluate_far(const B& first, const B& second,
                                            const Guess<Acc>& exact,
                                            const divergences::Mixture<Acc>& mixture,
                                            const divergences::Fit& fit, B& value, B& slope) {
  for (int i = 0; i < B::kVectors; ++i) {
    const auto word = divergences::fitted_word_of<Divergence>(first.vector(i), second.vector(i),
                                                              exact, mixture, fit);
    value.v[i] = word.value.v[0];
    slope.v[i] = (word.p * word.of_first).v[0];
  }
}

// The second pass over a pair of rows, for a divergence other than a KL.
template <typename Divergence, typename Acc>
RowValue value_of_rows(const RowInputs& in, int64_t index, const Row& first_row,
                       const Row& second_row, const PairRow& row, double parameter) {
  using B = Words<Acc>;
  constexpr Base base = kBase<Acc>;
  if (std::isnan(row.lse + row.shift)) return {NAN, NAN};
  const double scale = in.scale(index) / first_row.unit;
  const Guess<Acc> guess = divergences::guess_of<Acc, base>(scale, row.lse, row.shift);
  const divergences::Mixture<Acc> constants =
      Divergence::template mixture<Acc>(parameter, row.shift - divergences::ratio_of(guess));
  const RowValue sums = visit_words<Acc>(first_row, second_row, [&](auto zero) {
    const Guess<Acc> exact = guess;
    const divergences::Mixture<Acc> mixture = constants;
    const divergences::Fit fit = fit_of<Divergence>(parameter);
    const bool offsets = has_offsets(exact);
    LaneSum<B> values, slopes;
    B value(0), slope(0);
    const auto take = [&](const B& x, const B& y) KLFAST_INLINE_LAMBDA {
      if constexpr (base == Base::kTwo) {
        B u;
        if (are_near(x, y, exact, offsets, u)) {
          u = divergences::without_rest<Divergence>(u, mixture);
          const B p = divergences::first_term(x, exact);
          value += Divergence::near_value(p, u, fit);
          slope += Divergence::near_slope(p, u, fit);
          return;
        }
      }
      B far_value, far_slope;
      evaluate_far<Divergence>(x, y, exact, mixture, fit, far_value, far_slope);
      value += far_value;
      slope += far_slope;
    };
    for_each_block<decltype(zero), B>(first_row, second_row, take,
                                      [&](int64_t) KLFAST_INLINE_LAMBDA {
                                        values.flush(value);
                                        slopes.flush(slope);
                                      });
    return RowValue{values.total(), slopes.total()};
  });
  const double rest = divergences::rest_of(guess, row.lse);
  const double slope = sums.slope * rest;
  return {Divergence::template value_of<base>(sums.value * rest, slope, parameter), slope};
}

// The entropy of a row. `of` is the model whose entropy has an incoming gradient, and `grad` is
// this gradient over the temperature.
struct EntropyState {
  EntropyOf of = EntropyOf::kNone;
  double value = 0;
  double grad = 0;
};

// The gradients of the logits of a pair of words, or of a pair of blocks. They lack the term that
// only the target's logit has.
template <typename Divergence, typename Acc>
struct PairGradients {
  RowGradient<Acc> row;
  divergences::Fit fit;
  EntropyOf entropy_of;
  divergences::EntropyGradient<Acc> of_entropy;
  bool offsets;
  // True if near blocks take the shorter formulas. Infinite constants rule them out, because
  // infinity times a probability of 0 would be NaN.
  bool has_near;

  PairGradients(const RowGradient<Acc>& row, double parameter, const RowState& state,
                const EntropyState& entropy)
      : row(row),
        fit(fit_of<Divergence>(parameter)),
        entropy_of(entropy.of),
        of_entropy(),
        offsets(has_offsets(row.exact)),
        has_near((Divergence::kIsKl || kBase<Acc> == Base::kTwo) &&
                 std::isfinite(row.first + row.first_constant + row.second + row.second_constant)) {
    if (entropy.of == EntropyOf::kNone) return;
    of_entropy = divergences::entropy_gradient_of(row.exact, state.lse, state.shift, entropy.of,
                                                  entropy.value, entropy.grad);
  }

  // The gradients of a block. kFirst and kSecond say which of them are wanted.
  template <bool kFirst, bool kSecond, typename B>
  KLFAST_HOST_DEVICE WordGradients<B> of_block(const B& x, const B& y) const {
    WordGradients<B> grads;
    B u;
    if (!has_near || !are_near(x, y, row.exact, offsets, u)) {
      far_block<kFirst, kSecond>(x, y, grads);
    } else {
      using divergences::near_gradient;
      if constexpr (kFirst) grads.first = near_gradient<Divergence>(x, y, u, 0, row, fit);
      if constexpr (kSecond) grads.second = near_gradient<Divergence>(x, y, u, 1, row, fit);
    }
    if (kFirst && entropy_of == EntropyOf::kFirst) {
      add_entropy<EntropyOf::kFirst>(x, y, grads.first);
    }
    if (kSecond && entropy_of == EntropyOf::kSecond) {
      add_entropy<EntropyOf::kSecond>(x, y, grads.second);
    }
    return grads;
  }

  // The gradients of one word.
  WordGradients<Acc> of_word(Acc x, Acc y) const {
    WordGradients<Acc> grads = divergences::gradients_of<Divergence>(x, y, row, fit);
    if (entropy_of == EntropyOf::kFirst) {
      grads.first += divergences::entropy_gradient<EntropyOf::kFirst>(x, y, row.exact, of_entropy);
    } else if (entropy_of == EntropyOf::kSecond) {
      grads.second +=
          divergences::entropy_gradient<EntropyOf::kSecond>(x, y, row.exact, of_entropy);
    }
    return grads;
  }

 private:
  // This function and the next are not inlined, so that the loop over blocks keeps its registers.
  template <bool kFirst, bool kSecond, typename B>
  __attribute__((noinline)) void far_block(const B& x, const B& y, WordGradients<B>& grads) const {
    for (int i = 0; i < B::kVectors; ++i) {
      const auto of_vector =
          divergences::gradients_of<Divergence>(x.vector(i), y.vector(i), row, fit);
      if constexpr (kFirst) grads.first.v[i] = of_vector.first.v[0];
      if constexpr (kSecond) grads.second.v[i] = of_vector.second.v[0];
    }
  }
  template <EntropyOf of, typename B>
  __attribute__((noinline)) void add_entropy(const B& x, const B& y, B& grad) const {
    grad += divergences::entropy_gradient<of>(x, y, row.exact, of_entropy);
  }
};

// A row's likely word, which has well more than half of the probability. A row has one at most. By
// the formula, its gradient is a small difference of large numbers. This class instead subtracts
// the gradients of all other words from the sum of the row's gradients. That sum is the incoming
// gradient of the log-sum-exp, which is 0 unless the row is a shard of a vocabulary.
template <typename Acc>
class LikelyWord {
  using B = Words<Acc>;

 public:
  // `scale` and `lse` are for placed logits, in the base's unit. `total` is the sum of the row's
  // gradients.
  LikelyWord(double scale, double lse, double total)
      : least_(static_cast<Acc>((lse - divergences::in_units<kBase<Acc>>(std::log(1.7))) / scale)),
        total_(total) {}

  // Adds a block of gradients to the sum. `at` is the index of the block's first word.
  template <typename T>
  KLFAST_HOST_DEVICE void take(const B& words, const B& gradients, const T* memory, int64_t at) {
    const auto is_likely = words > B(least_);
    tile_ += math::select(is_likely, B(0), gradients);
    if (is_likely.any()) find(memory, at);
  }
  KLFAST_HOST_DEVICE void end_tile() { others_.flush(tile_); }

  // Adds the term that only the target's logit has.
  void add(int64_t index, double gradient) {
    if (index != index_) of_target_ += gradient;
  }

  // Writes the gradient of the likely word, if the row has one.
  void store(const Output& output, int64_t index, int64_t words) {
    const Acc gradient = static_cast<Acc>(total_ - (others_.total() + of_target_));
    if (index_ >= 0 && std::isfinite(gradient)) {
      store_tile(output, index * words + index_, 1, &gradient);
    }
  }

 private:
  LaneSum<B> others_;
  B tile_ = B(0);
  const Acc least_;
  const double total_;
  double of_target_ = 0;
  int64_t index_ = -1;

  template <typename T>
  __attribute__((noinline)) void find(const T* memory, int64_t at) {
    for (int64_t i = 0; i < B::kSize; ++i) {
      if (convert<Acc>(memory[i]) > least_) index_ = at + i;
    }
  }
};

template <typename Divergence, bool kFirst, bool kSecond, typename Acc>
void write_gradients(const DivergenceInputs& call, int64_t index, const RowState& state,
                     const EntropyState& entropy, const Output& grad_first,
                     const Output& grad_second) {
  using B = Words<Acc>;
  constexpr Base base = kBase<Acc>;
  const RowInputs& in = call.rows;
  const int64_t words = in.shape.words;
  const double unit = divergences::unit_of(state.origins);
  const Row first_row = row_at(in, call.first, index).from(unit, state.origins.first);
  const Row second_row = row_at(in, call.second, index).from(unit, state.origins.second);
  const double scale = in.scale(index) / unit;
  const auto exact = divergences::guess_of<Acc, base>(scale, state.lse, state.shift);
  const PairGradients<Divergence, Acc> gradients(
      divergences::gradient_of<Divergence>(exact, call.parameter, state), call.parameter, state,
      entropy);
  const double own_scale = divergences::in_units<base>(scale);
  LikelyWord<Acc> likely_first(own_scale, state.lse, state.grad_lse);
  LikelyWord<Acc> likely_second(own_scale, state.lse + state.shift, state.grad_ref_lse);
  const bool may_be_likely = !Divergence::kIsKl || state.slope != 0 || state.grad_logprob != 0 ||
                             state.grad_ref_logprob != 0 || entropy.grad != 0 ||
                             state.grad_lse != 0 || state.grad_ref_lse != 0;
  // The target's gradients are computed first, because its logits may be overwritten.
  const int64_t target = target_of(in, index);
  WordGradients<Acc> of_target = {};
  if (target >= 0) {
    const auto word = [&](const Row& row) {
      const Acc x = static_cast<Acc>(word_at(row, target));
      return divergences::placed(x, static_cast<Acc>(unit), static_cast<Acc>(row.origin));
    };
    of_target = gradients.of_word(word(first_row), word(second_row));
  }
  visit_words<Acc>(first_row, second_row, [&](auto zero) {
    using T = decltype(zero);
    // Buffers a whole page apart would alias in the cache.
    constexpr int64_t kApart = kTileWords + kPadding;
    alignas(64) T buffers[4][kApart];
    for (int64_t start = 0; start < words; start += kTileWords) {
      const Tile tile = tile_at(start, words);
      const int64_t at = index * words + start;
      const T* const first = load(first_row, tile, buffers[0]);
      const T* const second = load(second_row, tile, buffers[1]);
      T* const to_first = output_tile(grad_first, at, tile.size, tile.padded, buffers[2]);
      T* const to_second = output_tile(grad_second, at, tile.size, tile.padded, buffers[3]);
      for (int64_t i = 0; i < tile.padded; i += B::kSize) {
        constexpr int kBytes = B::kSize * sizeof(T);
        fetch<kBytes>(first + i + kTileWords);
        fetch<kBytes>(second + i + kTileWords);
        const B x = cpu::load<B>(first + i), y = cpu::load<B>(second + i);
        const auto grads = gradients.template of_block<kFirst, kSecond>(x, y);
        if (may_be_likely) {
          if constexpr (kFirst) likely_first.take(x, grads.first, first + i, start + i);
          if constexpr (kSecond) likely_second.take(y, grads.second, second + i, start + i);
        }
        if constexpr (kFirst) {
          fetch<kBytes>(to_first + i + kTileWords);
          store(grads.first, to_first + i);
        }
        if constexpr (kSecond) {
          fetch<kBytes>(to_second + i + kTileWords);
          store(grads.second, to_second + i);
        }
      }
      if (may_be_likely) {
        likely_first.end_tile();
        likely_second.end_tile();
      }
      if constexpr (kFirst) store_tile(grad_first, at, tile.size, to_first);
      if constexpr (kSecond) store_tile(grad_second, at, tile.size, to_second);
    }
  });
  const auto finish = [&](const Output& output, double of_word, double own, auto& likely) {
    if (target >= 0) {
      const Acc gradient = static_cast<Acc>(of_word + own);
      store_tile(output, index * words + target, 1, &gradient);
      likely.add(target, own);
    }
    likely.store(output, index, words);
  };
  if constexpr (kFirst) finish(grad_first, of_target.first, state.grad_logprob, likely_first);
  if constexpr (kSecond) {
    finish(grad_second, of_target.second, state.grad_ref_logprob, likely_second);
  }
}

template <typename Divergence, typename Acc>
void write_gradients(const DivergenceInputs& call, int64_t index, const RowState& state,
                     const EntropyState& entropy, const Output& first, const Output& second) {
  if (second.data == nullptr) {
    write_gradients<Divergence, true, false, Acc>(call, index, state, entropy, first, second);
  } else if (first.data == nullptr) {
    write_gradients<Divergence, false, true, Acc>(call, index, state, entropy, first, second);
  } else {
    write_gradients<Divergence, true, true, Acc>(call, index, state, entropy, first, second);
  }
}

template <typename Acc>
void write_gradients(const DivergenceInputs& call, int64_t index, const RowState& state,
                     const EntropyState& entropy, const Output& first, const Output& second) {
  if (first.data == nullptr && second.data == nullptr) return;
  visit_row(DivergenceTable(), call.divergence, [&](auto divergence) {
    write_gradients<decltype(divergence), Acc>(call, index, state, entropy, first, second);
  });
}

template <typename Acc>
void skip(const DivergenceForward& call, int64_t index, int64_t rows, int64_t words) {
  for (void* result : {call.rows, call.logprobs, call.ref_logprobs, call.entropy}) {
    store_number<Acc>(result, index, 0);
  }
  for (int field = 0; field < Saved::kCount; ++field) call.saved[field * rows + index] = 0;
  clear(call.grad_first, index, words);
  clear(call.grad_second, index, words);
}

template <typename Acc>
bool divergence_forward(const DivergenceForward& call, int64_t index) {
  const RowInputs& in = call.in.rows;
  const int64_t rows = in.shape.rows();
  if (!in.keeps(index)) {
    skip<Acc>(call, index, rows, in.shape.words);
    return true;
  }
  if (!is_valid<Acc>(in, index)) return false;
  Row first = row_at(in, call.in.first, index);
  Row second = row_at(in, call.in.second, index);
  const SummedRows sums = sum_rows<Acc>(call.in, index, first, second);
  const PairRow& row = sums.row;
  RowValue found = {row.kl, sums.is_peaked ? 1.0 : 0.0};
  visit_row(DivergenceTable(), call.in.divergence, [&](auto divergence) {
    using Divergence = decltype(divergence);
    if constexpr (!Divergence::kIsKl) {
      found = value_of_rows<Divergence, Acc>(in, index, first, second, row, call.in.parameter);
    }
  });
  found.value = static_cast<Acc>(found.value);  // the backward reads the rounded value
  store_number<Acc>(call.rows, index, found.value);
  store_number<Acc>(call.entropy, index, std::isnan(found.value) ? NAN : sums.entropy);
  if (in.token_ids != nullptr) {
    store_number<Acc>(call.logprobs, index, sums.logprob);
    store_number<Acc>(call.ref_logprobs, index, sums.ref_logprob);
  }
  save_row(call, index, row, found.slope);
  if (call.row_weights != nullptr) {
    const double weight = number_at<Acc>(call.row_weights, index);
    if (weight == 0) {
      clear(call.grad_first, index, in.shape.words);
      clear(call.grad_second, index, in.shape.words);
      return true;
    }
    const RowState state = {
        found.value, row.lse, row.shift, found.slope, row.origins, weight * in.scale(index), 0, 0};
    write_gradients<Acc>(call.in, index, state, {}, call.grad_first, call.grad_second);
  }
  return true;
}

template <typename Acc>
void divergence_backward(const DivergenceBackward& call, int64_t index) {
  const RowInputs& in = call.in.rows;
  if (!in.keeps(index) || !has_incoming<Acc>(call, index)) {
    clear(call.grad_first, index, in.shape.words);
    clear(call.grad_second, index, in.shape.words);
    return;
  }
  const RowState state = state_of<Acc>(call, index);
  EntropyState entropy;
  if (call.grad_entropy != nullptr) {
    entropy = {call.in.entropy_of, number_at<Acc>(call.entropy, index),
               number_at<Acc>(call.grad_entropy, index) * in.scale(index)};
  }
  write_gradients<Acc>(call.in, index, state, entropy, call.grad_first, call.grad_second);
}

bool token_logprobs_forward(const TokenLogprobsForward& call, int64_t row,
                            const PickMemory& memory) {
  return call.in.is_double ? token_logprobs_forward<double>(call, row, memory)
                           : token_logprobs_forward<float>(call, row, memory);
}

void token_logprobs_backward(const TokenLogprobsBackward& call, int64_t row) {
  call.in.is_double ? token_logprobs_backward<double>(call, row)
                    : token_logprobs_backward<float>(call, row);
}

bool divergence_forward(const DivergenceForward& call, int64_t row) {
  return call.in.rows.is_double ? divergence_forward<double>(call, row)
                                : divergence_forward<float>(call, row);
}

void divergence_backward(const DivergenceBackward& call, int64_t row) {
  call.in.rows.is_double ? divergence_backward<double>(call, row)
                         : divergence_backward<float>(call, row);
}

}  // namespace

KLFAST_TABLE(LogitsKernels, logits_kernels) = {token_logprobs_forward, token_logprobs_backward,
                                               divergence_forward, divergence_backward};

}  // namespace klfast::cpu
