// Rows of logits. setup.py compiles this file once per instruction set, with KLFAST_INSTRUCTION_SET
// naming it; everything but the table at the end is internal to each copy.
//
// A row is read in tiles, a tile in groups of kLanes (lanes.h). The last group is padded with words
// that do not exist: their logits are -infinity. formulas/divergences.h has the
// formulas, formulas/passes.h the passes that a row takes.

#include "logits/cpu_kernel.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

#include "device/cpu/ahead.h"
#include "device/cpu/instruction_set_table.h"
#include "device/cpu/lanes.h"
#include "device/cpu/tiles.h"
#include "formulas/divergences.h"

namespace klfast::cpu {
namespace {

using divergences::Guess;
using divergences::Origins;
using divergences::Pair;
using divergences::PairRow;
using divergences::PairSums;
using divergences::RowGradient;
using divergences::RowState;
using math::Range;
using passes::Step;
using passes::Verdict;

constexpr int64_t kTileWords =
    1024;  // words between conversions; buffers stay in the first-level cache

template <typename Acc>
constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity();

template <typename Acc>
using Bits = typename math::Constants<Acc>::Bits;

// A row of logits as a view, and the unit and origin by which its logits are placed.
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

// The words of a tile.
struct Tile {
  int64_t first;
  int64_t size;
  int64_t padded;  // size rounded up to whole groups
};

Tile tile_at(int64_t first, int64_t words) {
  const int64_t size = std::min(kTileWords, words - first);
  return {first, size, (size + kLanes - 1) / kLanes * kLanes};
}

// The words of a tile as Acc, placed and padded: their own memory if they lie so, else the buffer.
template <typename Acc>
KLFAST_HOST_DEVICE const Acc* load(const Row& row, const Tile& tile, Acc* buffer) {
  const Acc* const loaded = load_tile(row.words, 0, tile.first, tile.size, tile.padded, buffer);
  if (loaded == buffer) std::fill(buffer + tile.size, buffer + tile.padded, -kInfinity<Acc>);
  if (row.unit == 1) return loaded;
  const Acc unit = static_cast<Acc>(row.unit);
  const Acc origin = static_cast<Acc>(row.origin);
#pragma GCC ivdep
  for (int64_t i = 0; i < tile.padded; ++i) {
    buffer[i] = divergences::placed(loaded[i], unit, origin);
  }
  return buffer;
}

// The memory of each row's next tile.
Ahead ahead_of(std::initializer_list<const Row*> rows, const Tile& tile) {
  Ahead ahead;
  for (const Row* row : rows) ahead.add(row->words, 0, tile.first + kTileWords);
  return ahead;
}

// The same without one word, which may be of another tile or none.
template <typename Acc>
KLFAST_HOST_DEVICE const Acc* load_without(int64_t left_out, const Row& row, const Tile& tile,
                                           Acc* buffer) {
  const Acc* const loaded = load(row, tile, buffer);
  const int64_t place = left_out - tile.first;
  if (place < 0 || place >= tile.size) return loaded;
  if (loaded != buffer) std::copy_n(loaded, tile.padded, buffer);
  buffer[place] = -kInfinity<Acc>;
  return buffer;
}

double word_at(const Row& row, int64_t index) {
  double word = 0;
  visit_dtype(row.words.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (is_floating<T>) {
      word =
          convert<double>(static_cast<const T*>(row.words.data)[index * row.words.column_stride]);
    }
  });
  return word;
}

// The greatest word of a tile. NaN is ignored here, as it shows in every sum.
template <typename Acc>
KLFAST_HOST_DEVICE Acc greatest(const Acc* words, int64_t padded) {
  alignas(64) Acc lanes[kLanes];
  std::fill(lanes, lanes + kLanes, -kInfinity<Acc>);
  for (int64_t i = 0; i < padded; i += kLanes) {
#pragma GCC ivdep
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const Acc word = words[i + lane];
      lanes[lane] = word > lanes[lane] ? word : lanes[lane];
    }
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) {
      lanes[lane] = lanes[lane + half] > lanes[lane] ? lanes[lane + half] : lanes[lane];
    }
  }
  return lanes[0];
}

// The greatest of the first `words` words of a row, not placed.
template <typename Acc>
Acc greatest(const Row& placed_row, int64_t words) {
  const Row row = placed_row.from(1, 0);
  alignas(64) Acc buffer[kTileWords];
  Acc found = -kInfinity<Acc>;
  for (int64_t first = 0; first < words; first += kTileWords) {
    const Tile tile = tile_at(first, words);
    found = std::max(found, greatest(load(row, tile, buffer), tile.padded));
  }
  return found;
}

// Runs the passes of a row (passes.h). find(words) finds the greatest of so many first words,
// sum(again) sums the row; both return a verdict.
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

template <typename Acc>
void store(void* data, int64_t index, double value) {
  if (data != nullptr) static_cast<Acc*>(data)[index] = static_cast<Acc>(value);
}

template <typename Acc>
double element(const void* data, int64_t index) {
  return data == nullptr ? 0.0 : static_cast<double>(static_cast<const Acc*>(data)[index]);
}

// Zeroes a row's gradient.
void clear(const Output& output, int64_t row, int64_t words) {
  if (output.data == nullptr) return;
  const int64_t bytes = words * element_size(output.dtype);
  std::fill_n(static_cast<char*>(output.data) + row * bytes, bytes, 0);
}

// Whether what a row is given is valid: its temperature, and its token ids, each a word or none.
template <typename Acc>
bool is_valid(const RowInputs& in, int64_t row) {
  const Acc scale = static_cast<Acc>(in.scale(row));
  if (!(scale > 0 && std::isfinite(scale))) return false;
  if (in.token_ids == nullptr) return true;
  const int64_t* const ids = in.token_ids + row * in.picks;
  return std::all_of(ids, ids + in.picks,
                     [&](int64_t id) { return in.is_word(id) || in.is_none(id); });
}

// The place of the row's target token in a tile, or -1.
int64_t target_in(const RowInputs& in, int64_t row, const Tile& tile) {
  if (in.token_ids == nullptr) return -1;
  const int64_t place = in.token_ids[row] - tile.first;
  return place >= 0 && place < tile.size ? place : -1;
}

// The log-prob of a row's pick; 0 where there is none.
template <typename Acc>
double log_prob(const RowInputs& in, const Row& row, int64_t index, double lse, int64_t pick = 0) {
  const int64_t id = in.token_ids[index * in.picks + pick];
  if (in.is_none(id)) return 0;
  const double scale = static_cast<Acc>(in.scale(index));  // rounded, as in the sums
  return divergences::log_prob(word_at(row, id), scale, row.unit, row.origin, lse);
}

// The most likely of a row's picks, or -1: the word that sums of one model leave out. Its term is
// added in double, as in fp32 a term near 1 takes the digits of all others: 1 - p would have none.
int64_t likeliest_pick(const RowInputs& in, const Row& row, int64_t index) {
  int64_t found = -1;
  double greatest = 0;
  for (int64_t pick = 0; pick < in.picks; ++pick) {
    const int64_t id = in.token_ids[index * in.picks + pick];
    if (!in.is_word(id)) continue;
    const double word = word_at(row, id);
    if (found >= 0 && !(word > greatest)) continue;
    found = id;
    greatest = word;
  }
  return found;
}

// ---------------------------------------------------------------- one model

struct WordSums {
  double mass = 0;
  double moment = 0;
};

template <bool kEntropy, typename Acc>
WordSums sum_words(const Row& row, int64_t left_out, Acc scale, Acc guess) {
  alignas(64) Acc buffer[kTileWords];
  alignas(64) Acc mass[kLanes] = {};
  alignas(64) Acc moment[kLanes] = {};
  alignas(64) double wide_mass[kLanes] = {};
  alignas(64) double wide_moment[kLanes] = {};
  for (int64_t first = 0; first < row.size; first += kTileWords) {
    const Tile tile = tile_at(first, row.size);
    const Ahead ahead = ahead_of({&row}, tile);
    const Acc* const words = load_without(left_out, row, tile, buffer);
    for (int64_t i = 0; i < tile.padded; i += kLanes) {
      ahead.fetch(i / kLanes);
#pragma GCC ivdep
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const divergences::Word<Acc> word = divergences::word_of(words[i + lane], scale, guess);
        mass[lane] += word.mass;
        if constexpr (kEntropy) moment[lane] += word.moment;
      }
    }
    flush(mass, wide_mass);
    if constexpr (kEntropy) flush(moment, wide_moment);
  }
  WordSums sums = {add_lanes(wide_mass), kEntropy ? add_lanes(wide_moment) : 0.0};
  if (left_out >= 0) {
    const double x = divergences::placed(word_at(row, left_out), row.unit, row.origin);
    const double s = x * static_cast<double>(scale) - static_cast<double>(guess);
    const divergences::Word<double> word = divergences::left_out_word_of(s);
    sums.mass += word.mass;
    sums.moment += word.moment;
  }
  return sums;
}

struct WordRow {
  double lse;
  double entropy;
};

// The results of a row. Sets the row's placement.
template <bool kEntropy, typename Acc>
WordRow sum_row(const RowInputs& in, int64_t index, Row& row) {
  const int64_t left_out = likeliest_pick(in, row, index);
  Acc scale = 0;
  Acc guess = 0;
  WordSums sums;
  const auto find = [&](int64_t words) {
    sums.mass = NAN;
    Acc top = greatest<Acc>(row, words);
    // The sum over nothing but -infinity is 0, and NaN if there is a NaN.
    if (top == -INFINITY && words == row.size) top = 0;
    if (!std::isfinite(top)) return Verdict::kUseless;
    const double origin = divergences::origin_of(top, in.scale(index));
    row = row.from(divergences::unit_of({origin, 0}), origin);
    scale = static_cast<Acc>(in.scale(index) / row.unit);
    guess = divergences::placed(top, static_cast<Acc>(row.unit), static_cast<Acc>(origin)) * scale;
    return Verdict::kGood;
  };
  const auto sum = [&](bool again) {
    if (again) guess = static_cast<Acc>(guess + std::log(sums.mass));
    sums = sum_words<kEntropy>(row, left_out, scale, guess);
    return passes::verdict_of(sums.mass);
  };
  run_passes(row.size, find, sum);
  const double log_mass = std::log(sums.mass);
  return {static_cast<double>(guess) + log_mass,
          divergences::entropy_of(log_mass, sums.moment / sums.mass)};
}

template <typename Acc>
bool token_logprobs_forward(const TokenLogprobsForward& call, int64_t index) {
  const RowInputs& in = call.in;
  const int64_t rows = in.shape.rows();
  const int64_t first = index * in.picks;
  if (!in.keeps(index)) {
    for (int64_t i = 0; i < in.picks; ++i) store<Acc>(call.logprobs, first + i, 0);
    store<Acc>(call.entropy, index, 0);
    for (int field = 0; field < WordSaved::kCount; ++field) call.saved[field * rows + index] = 0;
    return true;
  }
  if (!is_valid<Acc>(in, index)) return false;
  Row row = row_at(in, call.logits, index);
  const WordRow found = call.entropy != nullptr ? sum_row<true, Acc>(in, index, row)
                                                : sum_row<false, Acc>(in, index, row);
  for (int64_t i = 0; i < in.picks; ++i) {
    store<Acc>(call.logprobs, first + i, log_prob<Acc>(in, row, index, found.lse, i));
  }
  store<Acc>(call.entropy, index, found.entropy);
  call.saved[WordSaved::kOrigin * rows + index] = row.origin;
  call.saved[WordSaved::kLse * rows + index] = found.lse;
  return true;
}

// The sum of the incoming gradients of those of a row's log-probs whose ids count.
template <typename Acc, typename Counts>
double sum_incoming(const TokenLogprobsBackward& call, int64_t index, const Counts& counts) {
  const int64_t first = index * call.in.picks;
  double sum = 0;
  for (int64_t i = first; i < first + call.in.picks; ++i) {
    if (counts(call.in.token_ids[i])) sum += element<Acc>(call.grad_logprobs, i);
  }
  return sum;
}

// Writes the gradients of the words whose log-probs are results, each once.
template <typename Acc>
void write_picks(const TokenLogprobsBackward& call, int64_t index, double all) {
  const RowInputs& in = call.in;
  const int64_t* const ids = in.token_ids + index * in.picks;
  const double of_entropy = element<Acc>(call.grad_entropy, index) * in.scale(index);
  for (int64_t pick = 0; pick < in.picks; ++pick) {
    const int64_t id = ids[pick];
    if (!in.is_word(id) || std::find(ids, ids + pick, id) != ids + pick) continue;
    const auto is_own = [&](int64_t other) { return other == id; };
    const double own = sum_incoming<Acc>(call, index, is_own) * in.scale(index);
    const double gradient =
        divergences::pick_gradient(element<Acc>(call.logprobs, index * in.picks + pick), own, all,
                                   of_entropy, element<Acc>(call.entropy, index));
    const Acc rounded = static_cast<Acc>(gradient);
    store_tile(call.grad, index * in.shape.words + id, 1, &rounded);
  }
}

template <typename Acc>
void token_logprobs_backward(const TokenLogprobsBackward& call, int64_t index) {
  const RowInputs& in = call.in;
  const int64_t words = in.shape.words;
  if (!in.keeps(index)) return clear(call.grad, index, words);
  const int64_t rows = in.shape.rows();
  const double origin = call.saved[WordSaved::kOrigin * rows + index];
  const double lse = call.saved[WordSaved::kLse * rows + index];
  const double unit = divergences::unit_of({origin, 0});
  const Row row = row_at(in, call.logits, index).from(unit, origin);
  const double scale = in.scale(index);
  const auto exists = [&](int64_t id) { return !in.is_none(id); };
  const double of_lse = element<Acc>(call.grad_lse, index);
  const double of_logprob = (sum_incoming<Acc>(call, index, exists) - of_lse) * scale;
  const double of_entropy = element<Acc>(call.grad_entropy, index) * scale;
  const divergences::TokenRow<Acc> own = divergences::token_row_of<Acc>(
      scale / unit, lse, of_logprob, of_entropy, element<Acc>(call.entropy, index));
  alignas(64) Acc buffer[kTileWords];
  alignas(64) Acc out_buffer[kTileWords];
  for (int64_t first = 0; first < words; first += kTileWords) {
    const Tile tile = tile_at(first, words);
    const Acc* const logits = load(row, tile, buffer);
    Acc* const grad =
        output_tile(call.grad, index * words + first, tile.size, tile.padded, out_buffer);
    Ahead ahead = ahead_of({&row}, tile);
    ahead.add(call.grad, index * words + first + kTileWords);
    for (int64_t i = 0; i < tile.padded; i += kLanes) {
      ahead.fetch(i / kLanes);
#pragma GCC ivdep
      for (int64_t lane = i; lane < i + kLanes; ++lane) {
        grad[lane] = divergences::token_gradient(logits[lane], own);
      }
    }
    store_tile(call.grad, index * words + first, tile.size, grad);
  }
  write_picks<Acc>(call, index, of_logprob);
}

// --------------------------------------------------------------- two models

template <typename Acc>
struct PairLanes {
  Acc mass[kLanes] = {};
  Acc spread[kLanes] = {};
  Acc slope[kLanes] = {};
  Acc other[kLanes] = {};
  Bits<Acc> excluded[kLanes] = {};
};

// The sums of the moment of one model (entropy.h).
template <typename Acc>
struct MomentLanes {
  alignas(64) Acc lanes[kLanes] = {};
  alignas(64) double wide[kLanes] = {};
};

// Adds a group of which every log-ratio is near.
template <EntropyOf of, typename Acc>
KLFAST_HOST_DEVICE void add_near_group(const Acc* first, const Acc* log_ratio,
                                       const Guess<Acc>& guess, PairLanes<Acc>& sums,
                                       [[maybe_unused]] MomentLanes<Acc>& moment) {
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const Pair<Acc> pair = divergences::near_pair_of(first[lane], log_ratio[lane], guess);
    sums.mass[lane] += pair.mass;
    sums.spread[lane] += pair.spread;
    sums.slope[lane] += pair.slope;
    if constexpr (of != EntropyOf::kNone) {
      const auto term =
          divergences::near_moment_of<of>(pair.mass, first[lane], log_ratio[lane], guess);
      moment.lanes[lane] += term.mass * term.exponent;
    }
  }
}

// Not inlined: its constants would take the registers of the loop over groups.
template <EntropyOf of, typename Acc>
__attribute__((noinline)) void add_far_group(const Acc* first, const Acc* second,
                                             const Guess<Acc>& guess, PairLanes<Acc>& sums,
                                             [[maybe_unused]] MomentLanes<Acc>& moment) {
#pragma GCC ivdep
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const Pair<Acc> pair = divergences::pair_of<Range::kAnywhere>(first[lane], second[lane], guess);
    sums.mass[lane] += pair.mass;
    sums.spread[lane] += pair.spread;
    sums.slope[lane] += pair.slope;
    sums.other[lane] += pair.other;
    sums.excluded[lane] |= pair.excluded;
    if constexpr (of != EntropyOf::kNone) {
      const auto term = divergences::moment_of<of>(pair, first[lane], second[lane], guess);
      moment.lanes[lane] += term.mass * term.exponent;
    }
  }
}

// The lane sums of a row, in double after every tile.
template <Range range, typename Acc>
struct PairAccumulator {
  alignas(64) PairLanes<Acc> lanes;
  alignas(64) double mass[kLanes] = {};
  alignas(64) double spread[kLanes] = {};
  alignas(64) double slope[kLanes] = {};
  alignas(64) double other[kLanes] = {};
  alignas(64) Acc most[kLanes] = {};  // that a lane's words have of the mass in one tile

  void end_tile() {
#pragma GCC ivdep
    for (int64_t lane = 0; lane < kLanes; ++lane)
      most[lane] = std::max(most[lane], lanes.mass[lane]);
    flush(lanes.mass, mass);
    flush(lanes.spread, spread);
    flush(lanes.slope, slope);
    if constexpr (range != Range::kNear) flush(lanes.other, other);
  }

  Acc greatest_lane() const { return *std::max_element(most, most + kLanes); }

  PairSums total() {
    PairSums sums = {add_lanes(mass), add_lanes(spread), add_lanes(slope), add_lanes(other), false};
    for (Bits<Acc> excluded : lanes.excluded) sums.excluded |= excluded != 0;
    return sums;
  }
};

// The sums of a pair of rows, and the moment of the model whose entropy is wanted.
struct RowSums {
  PairSums pairs;
  double moment;
  bool is_peaked;  // one word of the first model may have more than half of the mass
};

template <EntropyOf of, typename Acc>
RowSums sum_pairs(const Row& first_row, const Row& second_row, const Guess<Acc>& guess) {
  alignas(64) Acc first_buffer[kTileWords];
  alignas(64) Acc second_buffer[kTileWords];
  PairAccumulator<Range::kNear, Acc> near;
  PairAccumulator<Range::kAnywhere, Acc> anywhere;
  MomentLanes<Acc> moment;
  const Guess<Acc> own = guess;
  for (int64_t start = 0; start < first_row.size; start += kTileWords) {
    const Tile tile = tile_at(start, first_row.size);
    const Ahead ahead = ahead_of({&first_row, &second_row}, tile);
    const Acc* const first = load(first_row, tile, first_buffer);
    const Acc* const second = load(second_row, tile, second_buffer);
    bool any_far = false;
    for (int64_t i = 0; i < tile.padded; i += kLanes) {
      ahead.fetch(i / kLanes);
      alignas(64) Acc log_ratio[kLanes];
#pragma GCC ivdep
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        log_ratio[lane] = divergences::log_ratio(first[i + lane], second[i + lane], own);
      }
      if (are_within(log_ratio, Acc(1))) {
        add_near_group<of>(first + i, log_ratio, own, near.lanes, moment);
      } else {
        any_far = true;
        add_far_group<of>(first + i, second + i, own, anywhere.lanes, moment);
      }
    }
    near.end_tile();
    if (any_far) anywhere.end_tile();
    if constexpr (of != EntropyOf::kNone) flush(moment.lanes, moment.wide);
  }
  RowSums sums = {divergences::add(near.total(), anywhere.total()),
                  of == EntropyOf::kNone ? 0.0 : add_lanes(moment.wide), false};
  sums.is_peaked = std::max(near.greatest_lane(), anywhere.greatest_lane()) > sums.pairs.mass / 2;
  return sums;
}

// The entropy of one of two models from a row's sums.
template <EntropyOf of>
double entropy_of(const RowSums& sums) {
  if constexpr (of == EntropyOf::kNone) return 0;
  const double mass = of == EntropyOf::kFirst ? sums.pairs.mass : sums.pairs.other;
  return divergences::entropy_of_sums<math::Base::kE>(mass, sums.moment);
}

// The results of a pair of rows, and the entropy that is wanted.
struct SummedRows {
  PairRow row;
  double entropy;
  bool is_peaked;
};

// Sets the rows' placement.
template <EntropyOf of, typename Acc>
SummedRows sum_rows(const RowInputs& in, int64_t index, Row& first, Row& second) {
  const double scale = in.scale(index);
  PairRow row;
  RowSums sums = {};
  Guess<Acc> guess;
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
    guess = divergences::guess_of_greatest<Acc>(scale, origins, top, other_top);
    return Verdict::kGood;
  };
  const auto sum = [&](bool again) {
    if (again) guess = divergences::guess_of<Acc>(scale / first.unit, row.lse, row.shift);
    sums = sum_pairs<of>(first, second, guess);
    row = divergences::row_of(sums.pairs, guess, origins);
    return row.verdict;
  };
  run_passes(in.shape.words, find, sum);
  return {row, entropy_of<of>(sums), sums.is_peaked};
}

template <typename Acc>
SummedRows sum_rows(const DivergenceInputs& call, int64_t index, Row& first, Row& second) {
  return visit_entropy(call.entropy_of, [&](auto of) {
    return sum_rows<decltype(of)::value, Acc>(call.rows, index, first, second);
  });
}

// The divergence of a pair of rows, and what the backward is told: of a JSD the slope, of a KL
// whether the first model's row is peaked.
struct RowValue {
  double value;
  double slope;
};

template <typename Acc>
RowValue jsd_of_rows(const RowInputs& in, int64_t index, const Row& first_row,
                     const Row& second_row, const PairRow& row, double beta) {
  if (std::isnan(row.lse + row.shift)) return {NAN, NAN};
  alignas(64) Acc first_buffer[kTileWords];
  alignas(64) Acc second_buffer[kTileWords];
  alignas(64) Acc value[kLanes] = {};
  alignas(64) Acc slope[kLanes] = {};
  alignas(64) double wide_value[kLanes] = {};
  alignas(64) double wide_slope[kLanes] = {};
  const double scale = in.scale(index) / first_row.unit;
  const Guess<Acc> exact = divergences::guess_of<Acc>(scale, row.lse, row.shift);
  const divergences::Mixture<Acc> mixture = divergences::mixture_of<Acc>(beta);
  for (int64_t start = 0; start < first_row.size; start += kTileWords) {
    const Tile tile = tile_at(start, first_row.size);
    const Acc* const first = load(first_row, tile, first_buffer);
    const Acc* const second = load(second_row, tile, second_buffer);
    for (int64_t i = 0; i < tile.padded; i += kLanes) {
#pragma GCC ivdep
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const divergences::JsdWord<Acc> word =
            divergences::jsd_word_of(first[i + lane], second[i + lane], exact, mixture);
        value[lane] += word.value;
        slope[lane] += word.p * word.log_m_over_p;
      }
    }
    flush(value, wide_value);
    flush(slope, wide_slope);
  }
  const double rest = divergences::rest_of(exact, row.lse);
  return {divergences::jsd_of(add_lanes(wide_value) * rest, beta), add_lanes(wide_slope) * rest};
}

// The memory in which a tile's gradients are computed: not the logits', which are read once more.
template <typename Acc>
Acc* gradient_tile(const Output& output, const Logits& logits, int64_t at, const Tile& tile,
                   Acc* buffer) {
  if (output.data == logits.data) return buffer;
  return output_tile(output, at, tile.size, tile.padded, buffer);
}

// A row's entropy, of the model that has an incoming gradient of it, and that over the temperature.
struct EntropyState {
  EntropyOf of = EntropyOf::kNone;
  double value = 0;
  double grad = 0;
};

// Adds the gradients of one model's entropy to those of a tile. Not inlined, and a loop of its own:
// it takes nothing from the other gradients' registers.
template <EntropyOf of, typename Acc>
__attribute__((noinline)) void add_entropy_gradients(const Acc* first, const Acc* second,
                                                     int64_t padded, const Guess<Acc> exact,
                                                     const divergences::EntropyGradient<Acc> row,
                                                     Acc* grads) {
#pragma GCC ivdep
  for (int64_t i = 0; i < padded; ++i) {
    grads[i] += divergences::entropy_gradient<of>(first[i], second[i], exact, row);
  }
}

// The word of more than half of a row's probability. Its gradient is a small difference of large
// numbers, but also what the sum of all others leaves of the row's: that is the incoming gradient
// of the log-sum-exp, which is 0 but in a shard of a vocabulary.
template <typename Acc>
class LikelyWord {
 public:
  // `scale` and `lse` of placed logits; `total` of the row's gradients.
  LikelyWord(double scale, double lse, double total)
      : least_(static_cast<Acc>((lse - std::log(2.0)) / scale)), total_(total) {}

  // Takes a tile's gradients into the sum.
  KLFAST_HOST_DEVICE void take(const Acc* words, const Tile& tile, const Acc* gradients) {
    alignas(64) Acc lanes[kLanes] = {};
    const int64_t whole = tile.size / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) {
#pragma GCC ivdep
      for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += gradients[i + lane];
    }
    for (int64_t i = whole; i < tile.size; ++i) lanes[i - whole] += gradients[i];
    if (index_ < 0 && greatest(words, tile.padded) > least_) {
      const int64_t place = std::max_element(words, words + tile.size) - words;
      index_ = tile.first + place;
      // Summed anew: beside the word's own gradient the others may have lost digits.
      std::fill(lanes, lanes + kLanes, Acc(0));
      for (int64_t i = 0; i < tile.size; ++i) {
        if (i != place) lanes[i % kLanes] += gradients[i];
      }
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) others_ += lanes[lane];
  }

  // Writes the word's gradient, if there is such a word.
  void store(const Output& output, int64_t index, int64_t words) const {
    const Acc gradient = static_cast<Acc>(total_ - others_);
    if (index_ >= 0 && std::isfinite(gradient)) {
      store_tile(output, index * words + index_, 1, &gradient);
    }
  }

 private:
  Acc least_;
  double total_;
  int64_t index_ = -1;
  double others_ = 0;
};

template <Divergence divergence, bool kFirst, bool kSecond, typename Acc>
void write_gradients(const DivergenceInputs& call, int64_t index, const RowState& state,
                     const EntropyState& entropy, const Output& grad_first,
                     const Output& grad_second) {
  constexpr bool is_kl = divergence == Divergence::kKl;
  const RowInputs& in = call.rows;
  const int64_t words = in.shape.words;
  const double unit = divergences::unit_of(state.origins);
  const Row first_row = row_at(in, call.first, index).from(unit, state.origins.first);
  const Row second_row = row_at(in, call.second, index).from(unit, state.origins.second);
  const RowGradient<Acc> row = divergences::gradient_of(
      is_kl, divergences::guess_of<Acc>(in.scale(index) / unit, state.lse, state.shift), call.beta,
      state);
  divergences::EntropyGradient<Acc> of_entropy = {};
  if (entropy.of != EntropyOf::kNone) {
    of_entropy = divergences::entropy_gradient_of(row.exact, state.lse, state.shift, entropy.of,
                                                  entropy.value, entropy.grad);
  }
  const double scale = in.scale(index) / unit;
  LikelyWord<Acc> likely_first(scale, state.lse, state.grad_lse);
  LikelyWord<Acc> likely_second(scale, state.lse + state.shift, state.grad_ref_lse);
  const bool may_be_likely = !is_kl || state.slope != 0 || state.grad_logprob != 0 ||
                             state.grad_ref_logprob != 0 || entropy.grad != 0 ||
                             state.grad_lse != 0 || state.grad_ref_lse != 0;
  alignas(64)
      Acc buffers[4][kTileWords + kLanes];  // not a page apart, which would alias in the cache
  for (int64_t start = 0; start < words; start += kTileWords) {
    const Tile tile = tile_at(start, words);
    const int64_t at = index * words + start;
    const Acc* const first = load(first_row, tile, buffers[0]);
    const Acc* const second = load(second_row, tile, buffers[1]);
    Acc* const to_first = gradient_tile(grad_first, call.first, at, tile, buffers[2]);
    Acc* const to_second = gradient_tile(grad_second, call.second, at, tile, buffers[3]);
    Ahead ahead = ahead_of({&first_row, &second_row}, tile);
    ahead.add(grad_first, at + kTileWords);
    ahead.add(grad_second, at + kTileWords);
    for (int64_t group = 0; group < tile.padded; group += kLanes) {
      ahead.fetch(group / kLanes);
#pragma GCC ivdep
      for (int64_t i = group; i < group + kLanes; ++i) {
        const divergences::WordGradients<Acc> grads =
            is_kl ? divergences::kl_gradients(first[i], second[i], row)
                  : divergences::jsd_gradients(
                        divergences::jsd_word_of(first[i], second[i], row.exact, row.mixture),
                        first[i], second[i], row);
        if constexpr (kFirst) to_first[i] = grads.first;
        if constexpr (kSecond) to_second[i] = grads.second;
      }
    }
    if (kFirst && entropy.of == EntropyOf::kFirst) {
      add_entropy_gradients<EntropyOf::kFirst>(first, second, tile.padded, row.exact, of_entropy,
                                               to_first);
    }
    if (kSecond && entropy.of == EntropyOf::kSecond) {
      add_entropy_gradients<EntropyOf::kSecond>(first, second, tile.padded, row.exact, of_entropy,
                                                to_second);
    }
    if (const int64_t place = target_in(in, index, tile); place >= 0) {
      if constexpr (kFirst) to_first[place] += static_cast<Acc>(state.grad_logprob);
      if constexpr (kSecond) to_second[place] += static_cast<Acc>(state.grad_ref_logprob);
    }
    if constexpr (kFirst) {
      if (may_be_likely) likely_first.take(first, tile, to_first);
      store_tile(grad_first, at, tile.size, to_first);
    }
    if constexpr (kSecond) {
      if (may_be_likely) likely_second.take(second, tile, to_second);
      store_tile(grad_second, at, tile.size, to_second);
    }
  }
  if constexpr (kFirst) likely_first.store(grad_first, index, words);
  if constexpr (kSecond) likely_second.store(grad_second, index, words);
}

template <Divergence divergence, typename Acc>
void write_gradients(const DivergenceInputs& call, int64_t index, const RowState& state,
                     const EntropyState& entropy, const Output& first, const Output& second) {
  if (second.data == nullptr) {
    write_gradients<divergence, true, false, Acc>(call, index, state, entropy, first, second);
  } else if (first.data == nullptr) {
    write_gradients<divergence, false, true, Acc>(call, index, state, entropy, first, second);
  } else {
    write_gradients<divergence, true, true, Acc>(call, index, state, entropy, first, second);
  }
}

template <typename Acc>
void write_gradients(const DivergenceInputs& call, int64_t index, const RowState& state,
                     const EntropyState& entropy, const Output& first, const Output& second) {
  if (first.data == nullptr && second.data == nullptr) return;
  if (call.divergence == Divergence::kKl) {
    write_gradients<Divergence::kKl, Acc>(call, index, state, entropy, first, second);
  } else {
    write_gradients<Divergence::kJsd, Acc>(call, index, state, entropy, first, second);
  }
}

template <typename Acc>
void skip(const DivergenceForward& call, int64_t index, int64_t rows, int64_t words) {
  for (void* result : {call.rows, call.logprobs, call.ref_logprobs, call.entropy}) {
    store<Acc>(result, index, 0);
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
  const bool is_kl = call.in.divergence == Divergence::kKl;
  const SummedRows sums = sum_rows<Acc>(call.in, index, first, second);
  const PairRow& row = sums.row;
  RowValue found = {row.kl, sums.is_peaked ? 1.0 : 0.0};
  if (!is_kl) found = jsd_of_rows<Acc>(in, index, first, second, row, call.in.beta);
  found.value = static_cast<Acc>(found.value);  // rounded, as the backward reads it
  store<Acc>(call.rows, index, found.value);
  store<Acc>(call.entropy, index, std::isnan(found.value) ? NAN : sums.entropy);
  if (in.token_ids != nullptr) {
    store<Acc>(call.logprobs, index, log_prob<Acc>(in, first, index, row.lse));
    store<Acc>(call.ref_logprobs, index, log_prob<Acc>(in, second, index, row.lse + row.shift));
  }
  call.saved[Saved::kLse * rows + index] = row.lse;
  call.saved[Saved::kShift * rows + index] = row.shift;
  call.saved[Saved::kSlope * rows + index] = found.slope;
  call.saved[Saved::kFirstOrigin * rows + index] = row.origins.first;
  call.saved[Saved::kSecondOrigin * rows + index] = row.origins.second;
  if (call.row_weights != nullptr) {
    const double weight = element<Acc>(call.row_weights, index) * in.scale(index);
    const RowState state = {found.value, row.lse, row.shift, found.slope,
                            row.origins, weight,  0,         0};
    write_gradients<Acc>(call.in, index, state, {}, call.grad_first, call.grad_second);
  }
  return true;
}

template <typename Acc>
void divergence_backward(const DivergenceBackward& call, int64_t index) {
  const RowInputs& in = call.in.rows;
  const int64_t rows = in.shape.rows();
  if (!in.keeps(index)) {
    clear(call.grad_first, index, in.shape.words);
    clear(call.grad_second, index, in.shape.words);
    return;
  }
  const double scale = in.scale(index);
  const RowState state = {element<Acc>(call.rows, index),
                          call.saved[Saved::kLse * rows + index],
                          call.saved[Saved::kShift * rows + index],
                          call.saved[Saved::kSlope * rows + index],
                          {call.saved[Saved::kFirstOrigin * rows + index],
                           call.saved[Saved::kSecondOrigin * rows + index]},
                          element<Acc>(call.grad_rows, index) * scale,
                          element<Acc>(call.grad_logprobs, index) * scale,
                          element<Acc>(call.grad_ref_logprobs, index) * scale,
                          element<Acc>(call.grad_lse, index) * scale,
                          element<Acc>(call.grad_ref_lse, index) * scale};
  EntropyState entropy;
  if (call.grad_entropy != nullptr) {
    entropy = {call.in.entropy_of, element<Acc>(call.entropy, index),
               element<Acc>(call.grad_entropy, index) * scale};
  }
  write_gradients<Acc>(call.in, index, state, entropy, call.grad_first, call.grad_second);
}

bool token_logprobs_forward(const TokenLogprobsForward& call, int64_t row) {
  return call.in.is_double ? token_logprobs_forward<double>(call, row)
                           : token_logprobs_forward<float>(call, row);
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
