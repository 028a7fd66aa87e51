// The kernels of plain calls over log-probs: no limits, no importance weights, log-probs of one
// dtype without gaps, and a mask of bools or none. They wait for memory, so they have few registers
// and a short path.
//
// A tile has 4,096 tokens, for 256 lanes of 16 tokens. A lane's chunks of 16 bytes lie 256 chunks
// apart. Sums are added in this order, which token positions alone decide:
//   a lane's 16 tokens of a tile       fp32, one after the other
//   the 32 lanes of a virtual warp     fp32, a butterfly
//   the 8 virtual warps of a tile      fp64, one after the other
//   the tiles of a sequence            fp64, one after the other
// A masked or missing token adds +0. So the same bits come from one warp for a sequence or eight,
// from one block or a block for each tile, with and without padding, and packed.

#pragma once

#include "device/cuda/smooth.h"
#include "math/packed.h"
#include "penalty/cuda_tile.h"

namespace klfast::cuda {

inline constexpr int kRun = 16;         // tokens of a lane in a tile
inline constexpr int kRoundTiles = 16;  // tiles whose sums fit in shared memory, of one sequence
inline constexpr int kSumsOfBlock = kRoundTiles * kWarps;
inline constexpr int kWidthOfMask = 16;  // tokens of a chunk of a mask

// The variants of the kernel. Only kPlainStatistics computes statistics and the last kept token,
// and only kPlain has no gradient. A backward computes no statistics.
enum class Variant { kPlain, kPlainGradient, kPlainStatistics };

template <Variant variant>
inline constexpr Depth depth_of =
    variant == Variant::kPlainStatistics ? Depth::kWanted : Depth::kAlways;
template <Variant variant>
inline constexpr bool has_gradient = variant != Variant::kPlain;

// The sums of virtual warps in shared memory: [statistic][tile of the round][virtual warp]. The
// sequences of a block share the tiles of a round.
template <Depth depth>
struct WarpSums {
  static constexpr int kRows =
      depth == Depth::kAlways ? number_of_statistics<Depth::kAlways> : kStatistics;
  float at[kRows][kSumsOfBlock];
  Sums totals[kWarps];    // of the segment whose first warp this is
  int last_kept[kWarps];  // of each warp
};

__device__ __forceinline__ int lane_of_warp() { return static_cast<int>(threadIdx.x % kWarp); }

__device__ __forceinline__ int plain_tiles(int tokens) {
  return static_cast<int>((static_cast<unsigned>(tokens) + (kPlainTile - 1)) >> kLog2PlainTile);
}

// A lane's inputs: log-probs of type T, and a mask. The lane's chunks have W tokens.
template <typename T, int W, bool kAligned, int kInFlight_ = 1>
struct PlainInputs {
  static constexpr int kInFlight = kInFlight_;  // chunks of each input that a lane requests at once

  const char* first;
  const char* second;  // null: all 0
  const char* mask;    // null: all tokens are kept
  int size;            // of the segment

  // A dense input's chunk of n words at `byte`, of which `left` bytes exist. Only vectors that hold
  // an existing byte are read. With kWords each word is an element, and is read where it is: that
  // takes fewer registers than to cut the chunk out of two vectors.
  template <int n, bool kWords = false>
  struct Part {
    using Words = Chunk<uint32_t, n>;
    Words vector, rest;

    __device__ static __forceinline__ unsigned shift_of(const char* from) {
      return static_cast<unsigned>(reinterpret_cast<uintptr_t>(from) % sizeof(Words));
    }
    __device__ static __forceinline__ Words load_vector(const char* from) {
      return load_aligned<uint32_t, n>(reinterpret_cast<const uint32_t*>(from));
    }
    // What an absent input or a missing chunk has instead.
    __device__ __forceinline__ void fill(uint32_t word) {
#pragma unroll
      for (int i = 0; i < n; ++i) vector.element[i] = word;
      if constexpr (!kAligned && !kWords) rest = vector;
    }
    __device__ __forceinline__ void load(const char* from, unsigned byte, int left) {
      if constexpr (kAligned) {
        vector = load_vector(from + byte);
      } else if constexpr (kWords) {
#pragma unroll
        for (int i = 0; i < n; ++i) {
          const auto* const word = reinterpret_cast<const uint32_t*>(from + byte) + i;
          vector.element[i] = 4 * i < left ? __ldg(word) : 0;
        }
      } else {
        const unsigned shift = shift_of(from);
        const char* const at = from - shift + byte;
        vector = rest = load_vector(at);
        constexpr int kBytes = n * 4;
        if (shift != 0 && left > kBytes - static_cast<int>(shift)) rest = load_vector(at + kBytes);
      }
    }
    __device__ __forceinline__ Words chunk(const char* from) const {
      if constexpr (kAligned || kWords) return vector;
      union {
        Words vectors[2];
        Chunk<uint32_t, 2 * n> words;
      } const both = {{vector, rest}};
      const unsigned shift = shift_of(from);
      return shift == 0 ? vector : cut<n, n>(both.words, shift);
    }
  };
  struct Parts {
    Part<4, sizeof(T) == 4> first, second;
    Part<W / 4> mask;
  };

  // Any values do beyond the end, because kept() clears them. An aligned chunk is then the first
  // one.
  __device__ __forceinline__ void load(int position, Parts& parts) const {
    if constexpr (kAligned) position = position < size ? position : 0;
    const bool exists = kAligned || position < size;
    const unsigned byte = static_cast<unsigned>(position) * sizeof(T);
    // At most a chunk, because a product with all bytes of a sequence could overflow.
    const int left = size - position < W ? size - position : W;
    const auto load = [&](auto& part, const char* from, bool given, int bytes, uint32_t otherwise) {
      if (exists && given) {
        part.load(from, byte / sizeof(T) * bytes, left * bytes);
      } else {
        part.fill(otherwise);
      }
    };
    if constexpr (sizeof(T) > 1) {
      load(parts.first, first, true, sizeof(T), 0);
      load(parts.second, second, second != nullptr, sizeof(T), 0);
    }
    load(parts.mask, mask, mask != nullptr, 1, 0x01010101u);
  }

  __device__ __forceinline__ Kept<W> kept(int position, const Parts& parts) const {
    Chunk<uint32_t, W / 4> bytes = parts.mask.chunk(mask);
    const int left = size - position;
#pragma unroll
    for (int i = 0; i < W / 4; ++i) {
      const int exist = left - 4 * i;  // of this word's tokens
      if constexpr (kAligned) {
        if (exist <= 0) bytes.element[i] = 0;
      } else {
        if (exist < 4) bytes.element[i] &= exist <= 0 ? 0u : 0xffffffffu >> (32 - 8 * exist);
      }
    }
    return Kept<W>::of(bytes);
  }
};

// A weight of 1 in any type.
struct One {
  template <typename Acc>
  friend __device__ __forceinline__ Acc operator*(One, Acc value) {
    return value;
  }
};

// Eight tokens of a lane: as many as take the short formula together.
inline constexpr int kGroup = 8;

// What a call stores of each token: no call stores both a value and a gradient. kLogRatio is the
// derivative of k2.
enum class Kind { kValue, kDerivative, kLogRatio };

__device__ __forceinline__ Kind stored_kind(const Task& task) {
  if ((task.stored & kStoresValue) != 0) return Kind::kValue;
  return task.in.options.gradient == Gradient::kK2 ? Kind::kLogRatio : Kind::kDerivative;
}

// An estimator whose values no statistic sums.
struct NoSum {};

// Adds a token to the lane's sums, but for those of E and the number of tokens (add_rest). Returns
// what is stored.
template <Variant variant, Range range, typename E>
__device__ __forceinline__ float add_formula(Kind kind, const estimators::Formula<float>& formula,
                                             float x, LaneSums<float>& sums) {
  const Observation<range, float, One> token = {formula.value, {}, x, 0};
  klfast::add_token<depth_of<variant>, E>(token, [&](int row) -> float& { return sums.at[row]; });
  if (variant != Variant::kPlainGradient && kind == Kind::kValue) return formula.value;
  return has_gradient<variant> && kind != Kind::kLogRatio ? formula.derivative : x;
}

// Adds a group of tokens under k3 to the lane's sums, and replaces x by what is stored.
template <Variant variant, Range range>
__device__ __forceinline__ void evaluate_k3(Kind kind, float (&x)[kGroup], LaneSums<float>& sums) {
  using E = estimators::k3;
  using Number = std::conditional_t<range == Range::kNear, math::Packed<float>, float>;
  constexpr int kTokens = sizeof(Number) / sizeof(float);
#pragma unroll
  for (int i = 0; i < kGroup; i += kTokens) {
    const auto formula = E::at<range>(math::packed<Number>(&x[i]));
    const auto values = math::unpacked<float>(formula.value);
    const auto derivatives = math::unpacked<float>(formula.derivative);
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      float& token = x[i + j];
      token = add_formula<variant, range, E>(
          kind, {values.element[j], derivatives.element[j], token}, token, sums);
    }
  }
}

// Adds the statistics that add_formula() leaves out for an estimator.
template <Depth depth>
__device__ __forceinline__ void add_rest(int estimator, int kept, LaneSums<float>& sums) {
  sums.at[kLength] = static_cast<float>(kept);
  for_each_statistic<depth>([&](auto row) {
    using E = typename decltype(row)::Of;
    if constexpr (!std::is_void_v<E>) {
      if (estimator == IndexIn<E, estimators::EstimatorTable>::value) {
        sums.at[index_of<decltype(row)>] = sums.at[kKl];
      }
    }
  });
}

// True if every |x| <= 1. The squares are compared as integers: x^2 is not negative, and the bits
// of NaN are greater than all others.
__device__ __forceinline__ bool are_near(const float (&x)[kGroup]) {
  static_assert(kGroup == 8);
  const auto square = [&](int i) { return math::bit_cast<unsigned>(x[i] * x[i]); };
  const unsigned some = __vimax3_u32(square(0), square(1), square(2));
  const unsigned more = __vimax3_u32(square(3), square(4), square(5));
  return __vimax3_u32(__vimax3_u32(some, more, square(6)), square(7), 0) <=
         math::bit_cast<unsigned>(1.0f);
}

// The value and derivative of any token under another estimator than k3. Statistics need k3 of each
// token, so it is computed here for the compiler to find.
template <Depth depth>
__device__ __forceinline__ estimators::Formula<float> formula_of(int estimator, float x) {
  estimators::Formula<float> formula;
  if constexpr (depth != Depth::kAlways) formula = estimators::k3::at(x);
  visit_row(estimators::EstimatorTable(), estimator, [&](auto row) {
    using E = decltype(row);
    if constexpr (!std::is_same_v<E, estimators::k3>) formula = E::at(x);
  });
  return formula;
}

// The same under another estimator. All formulas for eight tokens would be 11 KB of code, so a loop
// takes two tokens at a time. The group is rotated, because registers cannot be indexed at run
// time.
template <Variant variant>
__device__ __forceinline__ void evaluate_in_turns(int estimator, Kind kind, float (&x)[kGroup],
                                                  LaneSums<float>& sums) {
  constexpr int kTurn = 2;
#pragma unroll 1
  for (int turn = 0; turn < kGroup / kTurn; ++turn) {
    float results[kTurn];
#pragma unroll
    for (int i = 0; i < kTurn; ++i) {
      const auto formula = formula_of<depth_of<variant>>(estimator, x[i]);
      results[i] = add_formula<variant, Range::kAnywhere, NoSum>(kind, formula, x[i], sums);
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      x[i] = i + kTurn < kGroup ? x[(i + kTurn) % kGroup] : results[(i + kTurn) % kGroup];
    }
  }
}

// k3 has a short formula for near tokens, and one vote of the warp decides on it. The bits of the
// other formula are the same. One far token in 256 calls for the other formula, so it has no loop,
// whose instructions would come on top.
template <Variant variant>
__device__ __forceinline__ void evaluate_group(int estimator, Kind kind, float (&x)[kGroup],
                                               LaneSums<float>& sums) {
  const bool is_far = __any_sync(0xffffffffu, !are_near(x));
  if (estimator != IndexIn<estimators::k3, estimators::EstimatorTable>::value) {
    evaluate_in_turns<variant>(estimator, kind, x, sums);
  } else if (is_far) {
    evaluate_k3<variant, Range::kAnywhere>(kind, x, sums);
  } else {
    evaluate_k3<variant, Range::kNear>(kind, x, sums);
  }
}

// x of a group's tokens, or 0 if the token is masked.
template <typename T, int W, typename Inputs>
__device__ __forceinline__ void log_ratios(const Inputs& inputs,
                                           const typename Inputs::Parts (&parts)[Inputs::kInFlight],
                                           const Kept<W> (&kept)[kGroup / W], float (&x)[kGroup]) {
#pragma unroll
  for (int c = 0; c < kGroup / W; ++c) {
    Chunk<uint32_t, 4> a = parts[c].first.chunk(inputs.first);
    Chunk<uint32_t, 4> b = parts[c].second.chunk(inputs.second);
    if constexpr (sizeof(T) == 2) {  // a word of two tokens is cleared before it is split
      a = kept[c].template clear<2>(a);
      b = kept[c].template clear<2>(b);
    }
    Chunk<float, W> differences;
#pragma unroll
    for (int i = 0; i < W; ++i) differences.element[i] = element_of<T>(a, i) - element_of<T>(b, i);
    if constexpr (sizeof(T) == 4) {
      const auto words = math::bit_cast<Chunk<uint32_t, 4>>(differences);
      differences = math::bit_cast<Chunk<float, W>>(kept[c].template clear<4>(words));
    }
#pragma unroll
    for (int i = 0; i < W; ++i) x[c * W + i] = differences.element[i];
  }
}

// The first `left` elements of a chunk at its place. In an aligned segment all of them exist.
template <bool kAligned, typename To, int W>
__device__ __forceinline__ void store_plain(const Output& output, int64_t index, int left,
                                            const Chunk<To, W>& chunk) {
  To* const to = static_cast<To*>(output.data) + index;
  if constexpr (kAligned) {
    if (left > 0) store_aligned(to, chunk);
  } else {
    store_chunk(to, left, chunk);
  }
}

// Stores the wanted results of chunk `c` of a group. `index` is the index of its first token among
// all tokens. The gradient of a masked token is 0.
template <typename T, Variant variant, bool kAligned, int W>
__device__ __forceinline__ void store_results(const Task& task, const Factors<float>& factors,
                                              const float* grad_out, int64_t index, int left,
                                              const float (&results)[kGroup], int c,
                                              const Kept<W>& kept) {
  const auto scaled = [&](float factor) {
    Chunk<float, W> chunk;
#pragma unroll
    for (int i = 0; i < W; ++i) chunk.element[i] = factor * results[c * W + i];
    return chunk;
  };
  if constexpr (variant != Variant::kPlainGradient) {
    if ((task.stored & kStoresValue) != 0) {
      store_plain<kAligned>(task.value, index, left, scaled(factors.coef));
    }
  }
  if constexpr (has_gradient<variant>) {
    const auto store = [&](const Output& output, float factor) KLFAST_INLINE_LAMBDA {
      Chunk<float, W> gradient = scaled(factor);
      if (variant == Variant::kPlainGradient && (task.stored & kTimesGradOut) != 0) {
        const Row<float> row = {grad_out, 1, left};
        const Chunk<float, W> of_token = load_chunk<float, W>(row, 0, W);
#pragma unroll
        for (int i = 0; i < W; ++i) gradient.element[i] *= of_token.element[i];
      }
      const auto words = math::bit_cast<Chunk<uint32_t, 4>>(convert_chunk<T>(gradient));
      store_plain<kAligned>(output, index, left,
                            math::bit_cast<Chunk<T, W>>(kept.template clear<sizeof(T)>(words)));
    };
    if ((task.stored & kStoresGradient) != 0) store(task.grad_logprobs, factors.gradient);
    if ((task.stored & kStoresRefGradient) != 0) store(task.grad_ref_logprobs, -factors.gradient);
  }
}

// A warp's pass over the tokens of one of its virtual warps in a tile. `position` is the lane's
// first token in the segment.
template <typename T, Variant variant, bool kAligned, typename Span>
__device__ __forceinline__ void run_lane(const Task& task, const Span* span, int size, int position,
                                         LaneSums<float>& sums) {
  using Inputs = decltype(span->inputs);
  constexpr int W = kSmoothWidth<T>;
  constexpr int kInFlight = Inputs::kInFlight;
  constexpr int kOfGroup = kGroup / W;       // chunks
  constexpr int kApart = kBlockThreads * W;  // tokens between two chunks of a lane
  const int estimator = task.in.options.estimator;
  const Kind kind = stored_kind(task);
  const int first = position - lane_of_warp() * W;  // of the warp
  int kept_tokens = 0;
#pragma unroll 1
  for (int done = 0; done < kRun / W * kApart; done += kInFlight * kApart) {
    if (first + done >= size) break;
    typename Inputs::Parts parts[kInFlight];
    const Inputs& inputs = opaque(span).inputs;
#pragma unroll
    for (int c = 0; c < kInFlight; ++c) inputs.load(position + done + c * kApart, parts[c]);
    // The loop is not unrolled, which would double the code.
#pragma unroll 1
    for (int g = 0; g < kInFlight / kOfGroup; ++g) {
      const int at = done + g * kOfGroup * kApart;
      if (first + at >= size) break;
      Kept<W> kept[kOfGroup];
#pragma unroll
      for (int c = 0; c < kOfGroup; ++c) {
        kept[c] = inputs.kept(position + at + c * kApart, parts[c]);
        kept_tokens += kept[c].count();
      }
      float x[kGroup];
      log_ratios<T>(inputs, parts, kept, x);
      evaluate_group<variant>(estimator, kind, x, sums);
#pragma unroll
      for (int c = 0; c < kOfGroup; ++c) {
        const int place = position + at + c * kApart;
        if constexpr (depth_of<variant> != Depth::kAlways) {
          if (kept[c].last() >= 0) sums.last_kept = place + kept[c].last();
        }
        if (variant == Variant::kPlainGradient || task.stored != 0) {
          const Span& own = opaque(span);
          store_results<T, variant, kAligned>(task, own.factors, own.grad_out + place,
                                              own.index + place, size - place, x, c, kept[c]);
        }
      }
      // The next group moves to the front, because registers cannot be indexed at run time.
#pragma unroll
      for (int c = 0; c + kOfGroup < kInFlight; ++c) parts[c] = parts[c + kOfGroup];
    }
  }
  add_rest<depth_of<variant>>(estimator, kept_tokens, sums);
}

__device__ __forceinline__ int add_lanes_exactly(int count) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_add_sync(0xffffffffu, count);
#else
  return add_lanes(count);
#endif
}

// Waits for the warps that share a segment. One warp of a packed batch may take another number of
// rounds than the other warps of its block.
template <bool kPadded>
__device__ __forceinline__ void wait_for_sharing(int warps) {
  if (!kPadded && warps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Stores the sums of a virtual warp's lanes.
template <Depth depth>
__device__ __forceinline__ void put(float* to, const LaneSums<float>& sums) {
  for_each_statistic<depth>([&](auto row) {
    using Row = decltype(row);
    constexpr int i = index_of<Row>;
    const float sum = i == kLength
                          ? static_cast<float>(add_lanes_exactly(static_cast<int>(sums.at[i])))
                          : combine_lanes<Row>(sums.at[i]);
    if (threadIdx.x % kWarp == 0) to[i * kSumsOfBlock] = sum;
  });
}

// Which rows of a table of statistics combine by their maximum, and which a depth lacks, as bits.
template <typename... Rows>
constexpr unsigned maxima_in(List<Rows...>) {
  using math::MaximumOrNan;
  static_assert(
      ((std::is_base_of_v<math::Sum, Rows> || std::is_base_of_v<MaximumOrNan, Rows>) && ...),
      "add_round() and the empty totals need sums and maxima that begin at 0");
  return (0u | ... | (unsigned{std::is_base_of_v<MaximumOrNan, Rows>} << index_of<Rows>));
}
template <Depth depth, typename... Rows>
constexpr unsigned absent_in(List<Rows...>) {
  return ((~0u << sizeof...(Rows)) | ... | (unsigned{Rows::depth > depth} << index_of<Rows>));
}
inline constexpr unsigned kMaxima = maxima_in(statistics::StatisticTable());
template <Depth depth>
inline constexpr unsigned kAbsent = absent_in<depth>(statistics::StatisticTable());

// Adds the sums of at most `most` tiles to a segment's. `tokens` is what the segment has from the
// first of them on. A lane adds the virtual warps of one tile, for every second statistic.
template <Depth depth, int W>
__device__ __forceinline__ void add_round(const float* from, int most, int tokens, Sums& totals) {
  const int lane = lane_of_warp(), tile = lane % kRoundTiles;
  const int tiles = plain_tiles(tokens) < most ? plain_tiles(tokens) : most;
  const int left = tile < tiles ? tokens - tile * kPlainTile : 0;
  constexpr bool kHasAll = depth == Depth::kAlways;  // neither maxima nor absent rows
  // The loop is not unrolled, because seven copies would be 5 KB of code. All lanes take as many
  // turns, so the last turn may have a row beyond the last.
#pragma unroll 1
  for (int turn = 0; turn < WarpSums<depth>::kRows; turn += kWarp / kRoundTiles) {
    const int row = turn + lane / kRoundTiles;
    const bool is_maximum = !kHasAll && (kMaxima >> row & 1) != 0;
    const bool is_absent = !kHasAll && (kAbsent<depth> >> row & 1) != 0;
    const auto combine = [&](double sum, double part) {
      return is_maximum ? math::MaximumOrNan::combine(sum, part) : sum + part;
    };
    const int first = in_register(row * kSumsOfBlock + tile * kWarps);
    double sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w * kWarp * W < (is_absent ? 0 : left)) sum = combine(sum, from[first + w]);
    }
    double total = is_absent ? 0 : totals.at[row];
#pragma unroll 1
    for (int other = 0; other < tiles; ++other) {
      total = combine(total, __shfl_sync(0xffffffffu, sum, lane - tile + other));
    }
    __syncwarp();  // all lanes have read the total
    if (tile == 0 && !is_absent) totals.at[row] = total;
  }
  __syncwarp();
}

// The segment of a slot of a padded batch, by a short path.
__device__ __forceinline__ Segment padded_segment(const Batch& batch, const Grid& grid,
                                                  int64_t slot) {
  int64_t sequence = slot, position = 0;
  if (grid.slots_per_row > 1) {
    sequence = row_of_slot(grid, slot);
    position = (slot - sequence * grid.slots_per_row) << grid.log2_segment;
  }
  const bool exists = slot < grid.slots;
  const int64_t rest = exists ? batch.width - position : 0;
  return {slot,        sequence, sequence * batch.width,
          batch.width, position, rest < grid.segment() ? rest : grid.segment(),
          exists};
}

__device__ __noinline__ inline Segment any_segment(const Batch& batch, const Grid& grid,
                                                   int64_t slot) {
  return batch.packed() ? segment_of_slot(batch, grid, slot) : padded_segment(batch, grid, slot);
}

// Called before the pass over the tokens.
template <Variant variant>
__device__ __noinline__ Factors<float> plain_factors(const Task& task, int64_t sequence) {
  if constexpr (!has_gradient<variant>) return {static_cast<float>(coef_of(task.in)), 0};
  return factors_of<float>(task, sequence);
}

// The inputs and outputs of a segment.
template <typename Inputs_>
struct PlainSpan {
  using Inputs = Inputs_;
  Inputs inputs;
  Factors<float> factors;
  const float* grad_out;
  int64_t index;  // of the first token among all tokens
};

// Runs this block's segments. One lane of a warp makes locate(segment), a span. All lanes call
// run(span, size, position, sums), which adds the tokens of a virtual warp to a lane's sums. One
// thread then calls finish(segment, sums). Segments and spans lie in shared memory, so they take no
// registers.
template <Depth depth, int W, bool kPadded, typename Span, typename Locate, typename Run,
          typename Finish>
__device__ __forceinline__ void run_plain(const Task& task, const Locate& locate, const Run& run,
                                          const Finish& finish) {
  __shared__ WarpSums<depth> memory;
  __shared__ Segment segments[kWarps];
  __shared__ Span spans[kWarps];
  const Batch& batch = task.in.batch;
  const int log2_warps = task.grid.log2_warps, warps = 1 << log2_warps;
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = lane_of_warp();
  const int group = warp >> log2_warps, own = warp & (warps - 1);
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * (kWarps >> log2_warps) + group;
  const Segment segment =
      kPadded ? padded_segment(batch, task.grid, slot) : any_segment(batch, task.grid, slot);
  if (lane == 0) {
    segments[warp] = segment;
    if (depth != Depth::kAlways) memory.last_kept[warp] = -1;
    memory.totals[warp].last_kept = -1;
#pragma unroll
    for (int i = 0; i < WarpSums<depth>::kRows; ++i) memory.totals[warp].at[i] = 0;
    spans[warp] = locate(segment);
  }
  __syncwarp();
  const bool follows = segment.sequence == batch.sequences;
  if (!kPadded && follows && segment.size > 0) {
    store_zeros(task, segment, static_cast<int>(threadIdx.x) % (warps * kWarp), warps * kWarp);
  }
  const int size = !kPadded && follows ? 0 : static_cast<int>(segment.size);
  // All segments of a padded batch take as many rounds as a whole one, for the barriers. A segment
  // that is a part of a row is one tile.
  const bool may_differ = !kPadded && batch.packed();
  const int64_t whole = batch.width < task.grid.segment() ? batch.width : task.grid.segment();
  const int tiles = plain_tiles(may_differ ? size : static_cast<int>(whole));
  const int round = kRoundTiles / kWarps << log2_warps;  // tiles
  float* const own_sums = &memory.at[0][group * kRoundTiles << log2_warps];
  int tile = 0;
  do {
#pragma unroll 1
    for (int w = own; w < kWarps; w += warps) {  // virtual warps
      const int at = tile * kPlainTile + w * (kWarp * W);
      if (at >= size) break;
      LaneSums<float> sums = empty_lane<float>();
      run(&spans[warp], size, at + lane * W, sums);
      if (task.backward) continue;
      put<depth>(own_sums + (tile & (round - 1)) * kWarps + w, sums);
      if constexpr (depth != Depth::kAlways) {
        if ((task.stored & kNotesLastKept) != 0) {
          const int last = combine_lanes<math::Maximum>(sums.last_kept);
          if (lane == 0 && last > memory.last_kept[warp]) memory.last_kept[warp] = last;
        }
      }
    }
    ++tile;
    if (task.backward || ((tile & (round - 1)) != 0 && tile < tiles)) continue;
    wait_for_sharing<kPadded>(warps);
    const int first = (tile - 1) & -round;
    if (own == 0) {
      add_round<depth, W>(own_sums, round, size - first * kPlainTile, memory.totals[warp]);
    }
    if (tile < tiles) wait_for_sharing<kPadded>(warps);
  } while (tile < tiles);
  if (task.backward || own != 0 || lane != 0) return;
  const Segment& found = opaque(&segments[warp]);
  if (!found.exists) return;
  Sums& totals = memory.totals[warp];
  if constexpr (depth != Depth::kAlways) {
    for (int w = 0; w < warps; ++w) {
      const int last = memory.last_kept[warp + w];
      if (last >= 0) {
        totals.last_kept = greater(totals.last_kept, found.start + found.position + last);
      }
    }
  }
  finish(found, totals);
}

// What the last block does after all others, if there is one. It is called, so that it takes no
// registers of the pass over the tokens.
template <Depth depth>
__device__ __noinline__ void finish_plain(const Task& task) {
  if (arrives_last(task.arrivals)) {
    finish_batch<depth, float>(task);
  }
}

// The place of a segment's first token in a dense input, or null if the input is absent.
template <bool kPadded>
__device__ __forceinline__ const char* first_of(const View& view, const Batch& batch,
                                                const Segment& segment, int size) {
  if (view.data == nullptr) return nullptr;
  const int64_t offset = kPadded ? segment.sequence * view.row_stride + segment.position
                                 : offset_of(view, batch, segment);
  return static_cast<const char*>(view.data) + offset * size;
}

}  // namespace klfast::cuda
