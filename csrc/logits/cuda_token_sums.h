// The sums of a row of one model, in one pass without a barrier before their end.
//
// Every warp finds the same guess of the row's greatest logit, from a sample of the row. If a lane
// finds words far above the guess in a tile, it sums that tile's words against their greatest
// logit. So even a row whose peak the sample missed is read once. A row is read again only if its
// sums are not usable. The guess is then the greatest logit of the whole row.

#pragma once

#include "formulas/divergences.h"
#include "logits/cuda_cluster.h"
#include "logits/cuda_tiles.h"

namespace klfast::cuda {

// The numbers of every thread and of every warp of a block. There are two sets, used in turns:
// while one block of a cluster writes the numbers of a total, another may still read the set
// before.
struct TileExchange {
  static constexpr int kNumbers = 2;
  double of_thread[2][kRowThreads][kNumbers];
  double of_warp[2][kRowThreads / kWarp][kNumbers];
};

// The blocks that sum a row: one block that takes all parts one after the other, or one block per
// part. A thread's numbers are combined over the parts first, and then over threads, so both ways
// give the same bits.
struct TileCluster : BlocksOfRow {
  TileExchange& exchange;
  int turn = 0;

  // All threads call all functions here.
  __device__ __forceinline__ TileCluster(const RowPlan& plan, TileExchange& exchange)
      : BlocksOfRow{plan}, exchange(exchange) {}

  template <typename How, int n>
  __device__ __forceinline__ void start() const {
#pragma unroll
    for (int i = 0; i < n; ++i) own()[i] = How::kEmpty;
  }

  // Combines a thread's numbers of a part with those before, and clears them.
  template <typename How, int n>
  __device__ __forceinline__ void hold(double (&numbers)[n]) const {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      own()[i] = How::combine(own()[i], numbers[i]);
      numbers[i] = How::kEmpty;
    }
  }

  // Combines all held numbers, always in the same order. The first warp of every block gets the
  // result. The caller puts a barrier of the block between two totals.
  template <typename How, int n>
  __device__ __forceinline__ void total(double (&numbers)[n]) {
    if (plan.blocks > 1) meet();
#pragma unroll
    for (int i = 0; i < n; ++i) numbers[i] = How::kEmpty;
#pragma unroll 1
    for (int part = 0; part < plan.blocks; ++part) {
      const double* const from = plan.blocks > 1 ? of_block(own(), part) : own();
#pragma unroll
      for (int i = 0; i < n; ++i) numbers[i] = How::combine(numbers[i], from[i]);
    }
    combine_numbers<How>(numbers);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int warps = static_cast<int>(blockDim.x) / kWarp;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (lane == 0) exchange.of_warp[turn][warp][i] = numbers[i];
    }
    __syncthreads();
    if (warp == 0) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        numbers[i] = lane < warps ? exchange.of_warp[turn][lane][i] : How::kEmpty;
      }
      combine_numbers<How>(numbers);
    }
    turn ^= 1;
  }

 private:
  __device__ __forceinline__ double* own() const { return exchange.of_thread[turn][threadIdx.x]; }
};

// The only pick of a row. The row's sums leave picks out, and the threads with the sums add their
// terms in double. In fp32 all other terms would lose their digits beside a term near 1: no digit
// of 1 - p would be right.
struct OnePick {
  int word;      // -1 if the pick is no word
  double logit;  // NaN if the pick is no word
};

// A row's results.
struct TokenResults {
  double entropy;
  double origin;
  double lse;  // of placed logits
  double unit;
  double scale;  // of the logits, in the base's unit, as in the sums
  // The log-sum-exp in two parts, as in divergences::log_prob.
  double center;
  double rest;

  template <math::Base base>
  __device__ __forceinline__ double log_prob(double logit) const {
    return divergences::log_prob<base>(logit, scale, unit, origin, center, rest);
  }
};

// The shared memory of a block.
struct TokenShared {
  TileExchange exchange;
  OnePick pick[kRowThreads / kWarp];  // a copy per warp, if rows have one pick
  double greatest;
  TokenResults results;
  bool is_done;
};

// The guess and the constants of a row's sums. Terms are powers of kBase. Their exponents are
// x * scale - guess, for placed logits x. Sums are relative to `center`. The guess is equal to
// `center`, unless all logits of the sample were -infinity. It then lies below all logits.
template <typename Acc>
struct RowGuess {
  Frame<Acc, 1> frame;
  Acc scale;
  Acc center;
  Acc guess;

  __device__ __forceinline__ static RowGuess of(Acc greatest, double scale) {
    constexpr Acc kBelowAll = -1e30f;
    const bool is_finite = std::isfinite(greatest);
    RowGuess base;
    base.frame = Frame<Acc, 1>::of({is_finite ? divergences::origin_of(greatest, scale) : 0.0, 0});
    base.scale =
        static_cast<Acc>(scale * (base.has_origin() ? 2 / kNatsOf<Acc> : 1 / kNatsOf<Acc>));
    base.center = is_finite ? base.guess_of(greatest) : Acc(0);
    base.guess = is_finite ? base.center : kBelowAll;
    return base;
  }

  __device__ __forceinline__ bool has_origin() const { return frame.if_any() != nullptr; }
  __device__ __forceinline__ Acc placed(Acc x) const {
    return divergences::placed(x, frame.unit, frame.origin[0]);
  }
  __device__ __forceinline__ Acc guess_of(Acc x) const { return placed(x) * scale; }
};

// A lane's sums over a tile.
template <typename Acc>
struct Terms {
  Acc mass = 0;    // of w = base^s
  Acc moment = 0;  // of w s
};

// kPlaces is true if the row may have an origin.
template <bool kEntropy, bool kPlaces, typename T>
__device__ __forceinline__ void add_chunk(const Raw& raw, const RowGuess<AccOf<T>>& base,
                                          AccOf<T> guess, Terms<AccOf<T>>& terms) {
  using Acc = AccOf<T>;
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) {
    const Acc word = convert<Acc>(element_of<T>(raw, i));
    const Acc s = math::fma(kPlaces ? base.placed(word) : word, base.scale, -guess);
    const Acc w = math::exp_term<kBase<Acc>>(s);
    terms.mass += w;
    // The limit keeps 0 * -infinity from making NaN. A NaN logit makes `mass` NaN.
    if constexpr (kEntropy) terms.moment = math::fma(w, std::fmax(s, Acc(-1000)), terms.moment);
  }
}

// True if no term lies so far above the guess that the rounding of its exponent shows. An entropy
// near 0 is a difference of two sums that are as large as this exponent. In fp32 it is off by up to
// 2^-24 of the exponent, which is 3.4e-7 nats at 8 bits and 6.7e-7 at 16.
template <bool kEntropy, typename Acc>
__device__ __forceinline__ bool is_near_guess(const Terms<Acc>& terms) {
  return terms.mass < Acc(kEntropy ? 1 << 8 : 1 << 20);
}

// Adds terms or sums, which have a mass and a moment.
template <bool kEntropy, typename Terms>
__device__ __forceinline__ void add_terms(const Terms& terms, double (&sums)[1 + kEntropy]) {
  sums[0] += terms.mass;
  if constexpr (kEntropy) sums[1] += terms.moment;
}

// A lane's sums over a tile, relative to the center.
struct TileSums {
  double mass;
  double moment;
};

// The sums of terms whose guess lies `lift` above the center.
template <typename Acc>
__device__ __forceinline__ TileSums lifted(const Terms<Acc>& terms, double lift) {
  const double factor = math::exp_term(lift * kNatsOf<Acc>);
  const double mass = terms.mass;
  return {mass * factor, (static_cast<double>(terms.moment) + lift * mass) * factor};
}

template <typename T, bool kSmooth>
__device__ __forceinline__ AccOf<T> greatest_of_tile(const TiledRow<T, kSmooth>& row, int tile) {
  AccOf<T> greatest = -INFINITY;
  row.for_each_chunk(tile, [&](const Raw& raw, int) { greatest = greatest_of<T>(raw, greatest); });
  return greatest;
}

// The tiles of a warp in the parts that its block sums.
struct Walk {
  int tile;
  int step;  // to the warp's next tile
  int end;   // of the part
  int of_part;
  int stop;

  template <typename T, bool kSmooth>
  __device__ __forceinline__ static Walk of(const RowPlan& plan, const TiledRow<T, kSmooth>& row) {
    Walk walk;
    walk.step = static_cast<int>(blockDim.x) / kWarp;
    walk.of_part = plan.part / kTileWords<T>;
    walk.tile = static_cast<int>(threadIdx.x) / kWarp;
    walk.end = walk.of_part;
    walk.stop = row.tiles();
    if (plan.blocks > 1) {
      // Warps take tiles in turns, starting at the row's first tile.
      const int begin = plan.rank_of_block() * walk.of_part;
      const int turn = begin % walk.step;
      walk.tile += begin - turn + (walk.tile < turn ? walk.step : 0);
      walk.end += begin;
      walk.stop = least(walk.end, walk.stop);
    }
    return walk;
  }

  // Returns `other` if it is a remaining tile of this warp before `stop`. Otherwise returns `stop`.
  __device__ __forceinline__ int stop_before(int other, int stop) const {
    return other >= tile && other < stop && (other - tile) % step == 0 ? other : stop;
  }

  // Goes on to the warp's next tile. plan_tiles ensures that a warp has a tile in every part but
  // the last.
  template <typename How, int n>
  __device__ __forceinline__ void next(const TileCluster& cluster, double (&numbers)[n]) {
    tile += step;
    if (tile >= end) {
      cluster.hold<How>(numbers);
      end += of_part;
    }
  }
};

// Adds the term of a left-out word.
template <bool kEntropy, typename Acc>
__device__ __forceinline__ void add_term(const RowGuess<Acc>& base, double logit,
                                         double (&sums)[1 + kEntropy]) {
  const double unit = base.frame.unit;
  const double x = divergences::placed(logit, unit, double{base.frame.origin[0]});
  const double s = x * static_cast<double>(base.scale) - static_cast<double>(base.center);
  add_terms<kEntropy>(divergences::left_out_word_of<kBase<Acc>>(s), sums);
}

// The left-out words of rows with one pick, and of rows with any number. Both serve one block.
template <typename T, bool kSmooth, bool kMany>
struct LeftOut;

template <typename T, bool kSmooth>
struct LeftOut<T, kSmooth, false> {
  const OnePick& pick;

  __device__ __forceinline__ LeftOut(const RowInputs& in, int64_t index,
                                     const TiledRow<T, kSmooth>& row, TokenShared& shared)
      : pick(shared.pick[threadIdx.x / kWarp]) {
    find(in, index, row, shared.pick[threadIdx.x / kWarp]);
  }

  // The next tile of the warp, before `stop`, that has a left-out word, or `stop`.
  __device__ __forceinline__ int stop_before(const Walk& walk, int stop) const {
    return walk.stop_before(pick.word / kTileWords<T>, stop);
  }
  // Tells the left-out words among the lane's words of a tile.
  __device__ __forceinline__ auto in_tile(int) const {
    const int word = pick.word;
    return [word](int at, int i) { return i == word - at; };
  }
  // Adds the terms. The first lane of the first warp gets the sums.
  template <bool kEntropy>
  __device__ __forceinline__ void add_terms(const RowGuess<AccOf<T>>& base,
                                            double (&sums)[1 + kEntropy]) const {
    if (pick.word >= 0) add_term<kEntropy>(base, pick.logit, sums);
  }
  __device__ __forceinline__ double logit(int64_t) const { return pick.logit; }

 private:
  __device__ __noinline__ static void find(const RowInputs& in, int64_t index,
                                           TiledRow<T, kSmooth> row, OnePick& found) {
    const int64_t id = in.token_ids[index];
    OnePick own = {-1, NAN};
    if (in.is_word(id)) own = {static_cast<int>(id), convert<AccOf<T>>(row.word(id))};
    if (threadIdx.x % kWarp == 0) found = own;
    __syncwarp();
  }
};

template <typename T, bool kSmooth>
struct LeftOut<T, kSmooth, true> {
  const RowInputs& in;
  const int64_t* const ids;
  const TiledRow<T, kSmooth>& row;

  __device__ __forceinline__ LeftOut(const RowInputs& in, int64_t index,
                                     const TiledRow<T, kSmooth>& row, TokenShared&)
      : in(in), ids(in.token_ids + index * in.picks), row(row) {}

  __device__ __noinline__ int stop_before(Walk walk, int stop) const {
    for (int64_t pick = threadIdx.x % kWarp; pick < in.picks; pick += kWarp) {
      const int64_t id = ids[pick];
      if (in.is_word(id)) stop = walk.stop_before(static_cast<int>(id) / kTileWords<T>, stop);
    }
#pragma unroll 1
    for (int step = kWarp / 2; step > 0; step /= 2) {
      stop = least(stop, __shfl_xor_sync(0xffffffffu, stop, step));
    }
    return stop;
  }
  __device__ __forceinline__ auto in_tile(int tile) const {
    const int own = tile * kTileWords<T> + static_cast<int>(threadIdx.x % kWarp) * kChunk<T>;
    const uint32_t bits = bits_of(own);
    return [bits, own](int at, int i) {
      return (bits >> ((at - own) / kStepWords<T> * kChunk<T> + i) & 1) != 0;
    };
  }
  template <bool kEntropy>
  __device__ __noinline__ void add_terms(const RowGuess<AccOf<T>>& base,
                                         double (&sums)[1 + kEntropy]) const {
    double terms[1 + kEntropy] = {};
    for (int64_t pick = threadIdx.x; pick < in.picks; pick += kWarp) {
      const int64_t id = ids[pick];
      bool counts = in.is_word(id);
      for (int64_t i = 0; counts && i < pick; ++i) counts = ids[i] != id;
      if (counts) add_term<kEntropy>(base, logit(id), terms);
    }
    combine_numbers<Sum>(terms);
#pragma unroll
    for (int i = 0; i < 1 + kEntropy; ++i) sums[i] += terms[i];
  }
  __device__ __forceinline__ double logit(int64_t id) const {
    return convert<AccOf<T>>(row.word(id));
  }

 private:
  // A bit for each word of the lane in a tile. The lane's first word is `own`.
  __device__ __noinline__ uint32_t bits_of(int own) const {
    static_assert(kTile * kChunk<T> <= 32);
    uint32_t bits = 0;
    for (int64_t pick = 0; pick < in.picks; ++pick) {
      const int64_t place = ids[pick] - own;
      const bool is_own = place >= 0 && place < kTileWords<T> && place % kStepWords<T> < kChunk<T>;
      if (is_own) bits |= 1u << (place / kStepWords<T> * kChunk<T> + place % kStepWords<T>);
    }
    return bits;
  }
};

// Sums any tile, without the left-out words. If a lane has words far above the guess, it sums them
// against their greatest logit.
template <bool kEntropy, typename T, bool kSmooth, bool kMany>
__device__ __forceinline__ TileSums sum_any_tile(const TiledRow<T, kSmooth>& row, int tile,
                                                 const RowGuess<AccOf<T>>& base,
                                                 const LeftOut<T, kSmooth, kMany>& left_out) {
  using Acc = AccOf<T>;
  const auto leaves_out = left_out.in_tile(tile);
  Acc guess = base.guess;
#pragma unroll 1
  for (bool is_first = true;; is_first = false) {
    Terms<Acc> terms;
    row.for_each_chunk(tile, [&](const Raw& raw, int at) {
      const Raw left = without<T>(raw, [&](int i) { return leaves_out(at, i); });
      add_chunk<kEntropy, true, T>(left, base, guess, terms);
    });
    if (!is_first) return lifted(terms, static_cast<double>(guess) - base.center);
    if (is_near_guess<kEntropy>(terms)) return {terms.mass, terms.moment};
    guess = base.guess_of(greatest_of_tile(row, tile));
    if (!std::isfinite(guess)) return {terms.mass, terms.moment};
  }
}

// The greatest logit of a sample of a row. Each lane has one chunk, and the chunks are spread over
// the row.
template <typename T, bool kSmooth>
__device__ __forceinline__ AccOf<T> sample_greatest(const TiledRow<T, kSmooth>& row) {
  const int apart = row.words / (kWarp * kChunk<T>);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  return greatest_of_sample<T>(row.load_chunk(lane * (apart == 0 ? 1 : apart) * kChunk<T>));
}

// Adds a warp's smooth tiles before `stop`, up to a tile with words far above the guess. `next`
// holds the first tile. Each chunk of the next tile is loaded as soon as the chunk before it in
// `next` has been used.
template <bool kEntropy, typename T, bool kSmooth>
__device__ __forceinline__ void add_smooth_tiles(const TiledRow<T, kSmooth>& row,
                                                 const RowGuess<AccOf<T>>& base, int stop,
                                                 Raw (&next)[kTile], const TileCluster& cluster,
                                                 Walk& walk, double (&sums)[1 + kEntropy]) {
  const char* own = row.own_chunk(walk.tile);
  const int64_t step = static_cast<int64_t>(walk.step) * (kTile * kStepBytes);
#pragma unroll 1
  do {
    const bool goes_on = walk.tile + walk.step < stop;
    if (goes_on) own += step;
    own = reinterpret_cast<const char*>(opaque(reinterpret_cast<int64_t>(own)));
    Terms<AccOf<T>> terms;
#pragma unroll
    for (int k = 0; k < kTile; ++k) {
      add_chunk<kEntropy, false, T>(next[k], base, base.guess, terms);
      next[k] = row.load_smooth(own, k);
    }
    if (__any_sync(0xffffffffu, !is_near_guess<kEntropy>(terms))) return;
    add_terms<kEntropy>(terms, sums);
    walk.next<Sum>(cluster, sums);
  } while (walk.tile < stop);
}

// Holds the sums of a block's parts, without the left-out words. find_base() finds the guess. It is
// called after the first loads are requested.
template <bool kEntropy, typename T, bool kSmooth, bool kMany, typename FindBase>
__device__ __forceinline__ RowGuess<AccOf<T>> sum_parts(const TiledRow<T, kSmooth>& row,
                                                        const TileCluster& cluster,
                                                        const LeftOut<T, kSmooth, kMany>& left_out,
                                                        const FindBase& find_base) {
  Walk walk = Walk::of(cluster.plan, row);
  const int smooth = least(walk.stop, row.smooth_tiles());
  Raw next[kTile];
  if (kSmooth && walk.tile < smooth) row.load_smooth_tile(walk.tile, next);
  const RowGuess<AccOf<T>> base = find_base();
  const int plain = base.has_origin() ? 0 : smooth;
  double sums[1 + kEntropy] = {};
  cluster.template start<Sum, 1 + kEntropy>();
  bool is_loaded = true;
#pragma unroll 1
  for (;; is_loaded = false) {
    const int stop = left_out.stop_before(walk, plain);
    if (kSmooth && walk.tile < stop) {
      if (!is_loaded) row.load_smooth_tile(walk.tile, next);
      add_smooth_tiles<kEntropy>(row, base, stop, next, cluster, walk, sums);
    }
    if (walk.tile >= walk.stop) break;
    add_terms<kEntropy>(sum_any_tile<kEntropy>(row, walk.tile, base, left_out), sums);
    walk.next<Sum>(cluster, sums);
  }
  cluster.template hold<Sum>(sums);
  return base;
}

template <typename T, bool kSmooth>
__device__ __forceinline__ void find_in_parts(const TiledRow<T, kSmooth>& row,
                                              const TileCluster& cluster) {
  Walk walk = Walk::of(cluster.plan, row);
  double greatest[1] = {Maximum::kEmpty};
  cluster.template start<Maximum, 1>();
#pragma unroll 1
  while (walk.tile < walk.stop) {
    const double of_tile = greatest_of_tile(row, walk.tile);
    greatest[0] = Maximum::combine(greatest[0], of_tile);
    walk.next<Maximum>(cluster, greatest);
  }
  cluster.template hold<Maximum>(greatest);
}

// Sums a row: its mass, and the moment for its entropy. The first thread gets the sums. The mass is
// NaN if the row has a NaN or +infinity, and 0 if all logits are -infinity.
template <bool kEntropy, typename T, bool kSmooth, bool kMany>
__device__ __forceinline__ RowGuess<AccOf<T>> sum_row(const TiledRow<T, kSmooth>& row,
                                                      const LeftOut<T, kSmooth, kMany>& left_out,
                                                      double scale, TileCluster& cluster,
                                                      TokenShared& shared,
                                                      double (&sums)[1 + kEntropy]) {
  using Acc = AccOf<T>;
  const bool decides = threadIdx.x == 0;
#pragma unroll 1
  for (bool is_first = true;; is_first = false) {
    const RowGuess<Acc> base = sum_parts<kEntropy>(row, cluster, left_out, [&] {
      const Acc greatest = is_first ? sample_greatest(row) : static_cast<Acc>(shared.greatest);
      return RowGuess<Acc>::of(greatest, scale);
    });
    cluster.template total<Sum>(sums);
    if (kMany ? threadIdx.x < kWarp : decides) left_out.template add_terms<kEntropy>(base, sums);
    if (decides) shared.is_done = !is_first || passes::is_usable(sums[0]);
    __syncthreads();
    if (shared.is_done) return base;
    find_in_parts(row, cluster);
    double greatest[1];
    cluster.template total<Maximum>(greatest);
    if (decides) shared.greatest = greatest[0];
    __syncthreads();
    if (!std::isfinite(shared.greatest)) {
      // If all logits are -infinity, the sum is 0. It is NaN if there is a NaN, which `greatest`
      // ignores.
      if (shared.greatest != -INFINITY) sums[0] = NAN;
      return base;
    }
  }
}

template <bool kEntropy, typename Acc>
__device__ __forceinline__ TokenResults results_of(const RowGuess<Acc>& base,
                                                   const double (&sums)[1 + kEntropy]) {
  TokenResults row;
  row.origin = base.frame.origin[0];
  row.center = base.center;
  row.rest = std::log(sums[0]);
  row.lse = row.center * kNatsOf<Acc> + row.rest;
  row.unit = base.frame.unit;
  row.scale = static_cast<double>(base.scale) * row.unit;
  row.entropy = 0;
  if constexpr (kEntropy) {
    row.entropy = divergences::entropy_of(row.rest, sums[1] * kNatsOf<Acc> / sums[0]);
  }
  return row;
}

}  // namespace klfast::cuda
