// A warp's pass over a tile of a sequence: loads, formulas, stores, lane sums.

#pragma once

#include "device/cuda/load.h"
#include "penalty/cuda_finish.h"

namespace klfast::cuda {

// The tokens that a lane loads at a time: 16 bytes of an input, or 4 tokens where a pass has no
// registers for more.
template <typename T, Pass pass>
inline constexpr int kWidth = sizeof(typename Source<T>::Element) == 2 && pass == Pass::kAny
                                  ? 4
                                  : 16 / static_cast<int>(sizeof(typename Source<T>::Element));

// The tokens of a tile.
struct Tile {
  int64_t index;   // of the first among all tokens
  int size;        // up to the sequence's end: more than kTileTokens where the sequence goes on
  bool is_smooth;  // vectors of every input are aligned, and the mask is of bools
  // The offset of the first in each input, in elements.
  int64_t logprobs;
  int64_t ref_logprobs;
  int64_t old_logprobs;
  int64_t mask;
  int64_t grad_out;
};

__device__ __forceinline__ int64_t offset_of(const View& view, const Batch& batch,
                                             const Segment& segment, int64_t position) {
  return batch.packed() ? (segment.start + position) * view.column_stride
                        : segment.sequence * view.row_stride + position * view.column_stride;
}

template <typename T, int W>
__device__ __forceinline__ bool is_smooth(const View& view, int64_t offset) {
  const T* const first = static_cast<const T*>(view.data) + offset;
  return view.column_stride == 1 && reinterpret_cast<uintptr_t>(first) % Vectors<T, W>::kBytes == 0;
}

template <typename T, Pass pass>
__device__ __forceinline__ Tile tile_at(const Task& task, const Segment& segment,
                                        int64_t position) {
  constexpr int W = kWidth<T, pass>;
  const KlPenaltyInputs& in = task.in;
  const int64_t rest = segment.length - position;
  Tile tile;
  tile.index = segment.start + position;
  tile.size = static_cast<int>(rest < 2 * kTileTokens ? rest : 2 * kTileTokens);
  tile.logprobs = offset_of(in.logprobs, in.batch, segment, position);
  tile.ref_logprobs = offset_of(in.ref_logprobs, in.batch, segment, position);
  tile.old_logprobs = offset_of(in.old_logprobs, in.batch, segment, position);
  tile.mask = offset_of(in.mask, in.batch, segment, position);
  tile.grad_out = offset_of(task.grad_out, in.batch, segment, position);
  tile.is_smooth = false;
  if constexpr (std::is_same_v<T, typename Source<T>::Element>) {
    tile.is_smooth =
        is_smooth<T, W>(in.logprobs, tile.logprobs) && in.ref_logprobs.data != nullptr &&
        is_smooth<T, W>(in.ref_logprobs, tile.ref_logprobs) &&
        (in.old_logprobs.data == nullptr || is_smooth<T, W>(in.old_logprobs, tile.old_logprobs)) &&
        (in.mask.data == nullptr ||
         (in.mask.dtype == DType::kBool && is_smooth<Bool, W>(in.mask, tile.mask)));
  }
  return tile;
}

// The place of a lane in a tile.
struct Place {
  int position;  // of the lane's first token
  int end;       // of the warp's tokens
};

// A chunk of any dtype, converted.
template <bool kAnyDtype, typename Acc, int W>
__device__ __forceinline__ void load_converted(const View& view, int64_t offset, int size,
                                               const Place& at, Chunk<Acc, W>& values) {
  offset = opaque(offset);
  visit_dtype(view.dtype, [&](auto zero) {
    using From = decltype(zero);
    if constexpr (kAnyDtype || is_floating<From>) {
      const Row<From> row = {static_cast<const From*>(view.data) + offset, view.column_stride,
                             size};
      const Chunk<From, W> chunk = load_chunk<From, W>(row, at.position, at.end);
#pragma unroll
      for (int i = 0; i < W; ++i) values.element[i] = convert<Acc>(chunk.element[i]);
    }
  });
}

// A chunk as loaded: it is converted later, so that all inputs are requested before the first is
// used. Under AnyDtype it is converted at once.
template <typename T, int W>
__device__ __forceinline__ Chunk<typename Source<T>::Element, W> fetch(const View& view,
                                                                       int64_t offset, int size,
                                                                       const Place& at) {
  if constexpr (std::is_same_v<T, typename Source<T>::Element>) {
    const Row<T> row = {static_cast<const T*>(view.data) + offset, view.column_stride, size};
    return load_chunk<T, W>(row, at.position, at.end);
  } else {
    Chunk<typename Source<T>::Element, W> chunk;
    load_converted<false>(view, offset, size, at, chunk);
    return chunk;
  }
}

// The weights of a chunk: the mask, or ones; zeros beyond the sequence's end.
template <typename Acc, int W>
__device__ __forceinline__ void load_weights(const View& mask, const Tile& tile, const Place& at,
                                             Chunk<Acc, W>& weights) {
  if (mask.data != nullptr) {
    return load_converted<true>(mask, tile.mask, tile.size, at, weights);
  }
#pragma unroll
  for (int i = 0; i < W; ++i) weights.element[i] = at.position + i < tile.size ? Acc(1) : Acc(0);
}

// A lane's chunk of every input, as loaded.
template <typename T, int W>
struct Fetched {
  Chunk<typename Source<T>::Element, W> logprobs;
  Chunk<typename Source<T>::Element, W> ref_logprobs;
  Chunk<typename Source<T>::Element, W> old_logprobs;
  Chunk<typename Source<T>::Acc, W> weight;
};

// The tokens that a lane computes at a time, and their results: a part of its chunk, to save
// registers.
template <typename Acc, int W>
struct Tokens {
  bool weighs;                   // by importance
  Chunk<Acc, W> weight;          // the mask's
  Chunk<Acc, W> log_ratio;       // logprobs - ref_logprobs, 0 where masked
  Chunk<Acc, W> log_importance;  // logprobs - old_logprobs, 0 where masked or without
  Chunk<Acc, W> value;
  Chunk<Acc, W> derivative;
  Chunk<Acc, W> ref_derivative;
  bool clipped[W];
};

// The chunks of a smooth tile, which most tiles are.
template <typename T, Pass pass, int W>
__device__ __forceinline__ Fetched<T, W> fetch_smooth(const KlPenaltyInputs& in, const Tile& tile,
                                                      const Place& at) {
  using Acc = typename Source<T>::Acc;
  const auto load = [&](const View& view, int64_t offset) {
    return load_aligned<T, W>(static_cast<const T*>(view.data) + offset + at.position);
  };
  Fetched<T, W> fetched;
  fetched.logprobs = load(in.logprobs, tile.logprobs);
  fetched.ref_logprobs = load(in.ref_logprobs, tile.ref_logprobs);
  fetched.old_logprobs = fetched.logprobs;
  if (!is_plain<pass> && in.old_logprobs.data != nullptr) {
    fetched.old_logprobs = load(in.old_logprobs, tile.old_logprobs);
  }
  Chunk<Bool, W> mask;
#pragma unroll
  for (int i = 0; i < W; ++i) mask.element[i] = {1};
  if (in.mask.data != nullptr) {
    mask = load_aligned<Bool, W>(static_cast<const Bool*>(in.mask.data) + tile.mask + at.position);
  }
#pragma unroll
  for (int i = 0; i < W; ++i) fetched.weight.element[i] = convert<Acc>(mask.element[i]);
  return fetched;
}

template <typename T, Pass pass, int W>
__device__ __forceinline__ Fetched<T, W> fetch_all(const KlPenaltyInputs& in, const Tile& tile,
                                                   const Place& at) {
  if constexpr (std::is_same_v<T, typename Source<T>::Element>) {
    if (tile.is_smooth && at.end <= tile.size) return fetch_smooth<T, pass, W>(in, tile, at);
  }
  Fetched<T, W> fetched;
  fetched.logprobs = fetch<T, W>(in.logprobs, tile.logprobs, tile.size, at);
  fetched.ref_logprobs = {};
  if (in.ref_logprobs.data != nullptr) {
    fetched.ref_logprobs = fetch<T, W>(in.ref_logprobs, tile.ref_logprobs, tile.size, at);
  }
  fetched.old_logprobs = fetched.logprobs;
  if (!is_plain<pass> && in.old_logprobs.data != nullptr) {
    fetched.old_logprobs = fetch<T, W>(in.old_logprobs, tile.old_logprobs, tile.size, at);
  }
  load_weights(in.mask, tile, at, fetched.weight);
  return fetched;
}

template <Pass pass, typename T, int kFetched, typename Acc, int W>
__device__ __forceinline__ void take_tokens(const Fetched<T, kFetched>& fetched, int first,
                                            bool weighs, Tokens<Acc, W>& tokens) {
  tokens.weighs = weighs;
#pragma unroll
  for (int i = 0; i < W; ++i) {
    const Acc weight = fetched.weight.element[first + i];
    const bool keep = weight != Acc(0);
    const Acc logprob = convert<Acc>(fetched.logprobs.element[first + i]);
    const Acc log_ratio = logprob - convert<Acc>(fetched.ref_logprobs.element[first + i]);
    tokens.weight.element[i] = weight;
    tokens.log_ratio.element[i] = keep ? log_ratio : Acc(0);
    if constexpr (!is_plain<pass>) {
      const Acc log_importance = logprob - convert<Acc>(fetched.old_logprobs.element[first + i]);
      tokens.log_importance.element[i] = keep && weighs ? log_importance : Acc(0);
    }
  }
}

// Element i of a chunk, without indexing registers at run time.
template <typename Acc, int W>
__device__ __forceinline__ Acc pick(const Chunk<Acc, W>& chunk, int i) {
  Acc picked = chunk.element[0];
#pragma unroll
  for (int j = 1; j < W; ++j) picked = i == j ? chunk.element[j] : picked;
  return picked;
}

template <typename Acc, int W>
__device__ __forceinline__ void replace(Chunk<Acc, W>& chunk, int i, Acc value) {
#pragma unroll
  for (int j = 0; j < W; ++j) chunk.element[j] = i == j ? value : chunk.element[j];
}

// Computes tokens again in fp64 whose factors may leave fp32's range where their product does not.
// One token at a time, as they are rare. The token alone decides whether it is computed again.
template <typename E, int W>
__device__ __forceinline__ void evaluate_extremes(const Limits<float>& limit,
                                                  Tokens<float, W>& tokens) {
#pragma unroll 1
  for (int i = 0; i < W; ++i) {
    const float x = pick(tokens.log_ratio, i);
    const float log_importance = pick(tokens.log_importance, i);
    if (!is_extreme(x) && !is_extreme(log_importance)) continue;
    const float weight = pick(tokens.weight, i);
    const Token<double> token = evaluate_token<E, float, double>(
        limits_as<double>(limit), true, weight != 0.0f, weight, x, log_importance);
    replace(tokens.value, i, static_cast<float>(token.value));
    replace(tokens.derivative, i, static_cast<float>(token.derivative));
    replace(tokens.ref_derivative, i, static_cast<float>(token.ref_derivative));
#pragma unroll
    for (int j = 0; j < W; ++j) {
      tokens.clipped[j] = i == j ? token.clipped != 0 : tokens.clipped[j];
    }
  }
}

// The values and derivatives of a lane's tokens under one formula. Bit i of `far` is set if a lane
// of the warp has |x| > 1 at i; otherwise the shorter formula gives the same bits.
template <Pass pass, typename E, typename Acc, int W>
__device__ __forceinline__ void evaluate(const Limits<Acc>& limit, unsigned far,
                                         Tokens<Acc, W>& tokens) {
  [[maybe_unused]] bool extreme = false;
#pragma unroll
  for (int i = 0; i < W; ++i) {
    const Acc x = tokens.log_ratio.element[i];
    const Acc weight = tokens.weight.element[i];
    if constexpr (is_plain<pass>) {
      const bool is_far = (far >> i & 1) != 0;
      const auto formula =
          is_far ? E::template at<Range::kAnywhere>(x) : E::template at<Range::kNear>(x);
      tokens.value.element[i] = weight * formula.value;
      if constexpr (has_gradient<pass>) tokens.derivative.element[i] = weight * formula.derivative;
    } else {
      const Acc log_importance = tokens.log_importance.element[i];
      const Token<Acc> token =
          evaluate_token<E, Acc>(limit, tokens.weighs, weight != Acc(0), weight, x, log_importance);
      tokens.value.element[i] = token.value;
      tokens.derivative.element[i] = token.derivative;
      tokens.ref_derivative.element[i] = token.ref_derivative;
      tokens.clipped[i] = token.clipped;
      extreme = extreme || is_extreme(x) || is_extreme(log_importance);
    }
  }
  if constexpr (!is_plain<pass> && std::is_same_v<Acc, float>) {
    if (tokens.weighs && extreme) evaluate_extremes<E>(limit, tokens);
  }
}

template <Pass pass, typename Acc, int W>
__device__ __forceinline__ void evaluate(int estimator, const Limits<Acc>& limit,
                                         Tokens<Acc, W>& tokens) {
  unsigned far = 0;
  if constexpr (is_plain<pass>) {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const bool is_far = !math::is_near(tokens.log_ratio.element[i]);
      far |= __any_sync(0xffffffffu, is_far) ? 1u << i : 0u;
    }
  }
  visit_row(estimators::Table(), estimator,
            [&](auto formula) { evaluate<pass, decltype(formula)>(limit, far, tokens); });
}

// Adds a lane's tokens to its sums; `offset` is the place of its first token in the tile.
template <Pass pass, typename Acc, int W>
__device__ __forceinline__ void add_tokens(const Tokens<Acc, W>& tokens, int offset,
                                           LaneSums<Acc>& sums) {
#pragma unroll
  for (int i = 0; i < W; ++i) {
    Observation<Range::kAnywhere, Acc> token = {tokens.value.element[i], tokens.weight.element[i],
                                                tokens.log_ratio.element[i], 0};
    if constexpr (!is_plain<pass>) token.clipped = tokens.clipped[i];
    if constexpr (depth_of<pass> != Depth::kAlways) {
      if (token.weight != Acc(0)) sums.last_kept = offset + i;
    }
    add_token<depth_of<pass>>(token, [&](int i) -> Acc& { return sums.at[i]; });
  }
}

// The factors of stored values and gradients.
template <typename Acc>
struct Factors {
  Acc coef;
  Acc gradient;
};

// Stores a chunk of a gradient in the dtype of its input. The token's own grad_out is a factor, and
// the gradient of a masked token 0 whatever its grad_out holds.
template <typename T, typename Acc, int W>
__device__ __forceinline__ void store_gradient(const Output& output, int64_t index, int count,
                                               Acc factor, const Chunk<Acc, W>& derivative,
                                               const Chunk<Acc, W>& weight,
                                               const Chunk<Acc, W>& grad_out) {
  Chunk<Acc, W> gradient;
#pragma unroll
  for (int i = 0; i < W; ++i) {
    const Acc product = (factor * derivative.element[i]) * grad_out.element[i];
    gradient.element[i] = weight.element[i] != Acc(0) ? product : Acc(0);
  }
  if constexpr (std::is_same_v<T, AnyDtype<Acc>>) {
    visit_dtype(output.dtype, [&](auto zero) {
      using To = decltype(zero);
      if constexpr (is_floating<To>) {
        store_chunk(static_cast<To*>(output.data) + index, count, gradient);
      }
    });
  } else {
    store_chunk(static_cast<T*>(output.data) + index, count, gradient);
  }
}

// Stores the values and gradients that are wanted.
template <typename T, Pass pass, typename Acc, int W>
__device__ __forceinline__ void store_results(const Task& task, const Factors<Acc>& factors,
                                              const Tile& tile, const Place& at,
                                              const Tokens<Acc, W>& tokens) {
  const int64_t index = tile.index + at.position;
  const int count = tile.size - at.position;
  if (task.value.data != nullptr) {
    Chunk<Acc, W> value;
#pragma unroll
    for (int i = 0; i < W; ++i) value.element[i] = factors.coef * tokens.value.element[i];
    store_chunk(static_cast<Acc*>(task.value.data) + index, count, value);
  }
  if constexpr (!has_gradient<pass>) return;
  if (task.grad_logprobs.data == nullptr && task.grad_ref_logprobs.data == nullptr) return;
  Chunk<Acc, W> grad_out;
#pragma unroll
  for (int i = 0; i < W; ++i) grad_out.element[i] = Acc(1);
  if (task.backward && task.in.reduction.result == Result::kToken) {
    const Row<Acc> row = {static_cast<const Acc*>(task.grad_out.data) + tile.grad_out,
                          task.grad_out.column_stride, tile.size};
    grad_out = load_chunk<Acc, W>(row, at.position, at.end);
  }
  if (task.grad_logprobs.data != nullptr) {
    store_gradient<T>(task.grad_logprobs, index, count, factors.gradient, tokens.derivative,
                      tokens.weight, grad_out);
  }
  if (task.grad_ref_logprobs.data != nullptr) {
    const Chunk<Acc, W>& derivative = is_plain<pass> ? tokens.derivative : tokens.ref_derivative;
    store_gradient<T>(task.grad_ref_logprobs, index, count, -factors.gradient, derivative,
                      tokens.weight, grad_out);
  }
}

__device__ __forceinline__ void store_zero(const Output& output, int64_t index) {
  if (output.data == nullptr) return;
  visit_dtype(output.dtype, [&](auto zero) {
    using To = decltype(zero);
    if constexpr (is_floating<To>) static_cast<To*>(output.data)[index] = To{};
  });
}

// Zeroes the outputs of tokens that belong to no sequence.
__device__ __forceinline__ void store_zeros(const Task& task, const Segment& segment, int first,
                                            int step) {
#pragma unroll 1
  for (int64_t i = first; i < segment.size; i += step) {
    const int64_t index = segment.start + segment.position + i;
    store_zero(task.value, index);
    store_zero(task.grad_logprobs, index);
    store_zero(task.grad_ref_logprobs, index);
  }
}

// Calls visit(tile, place) for every chunk of a lane in a tile, from position `first` on. The tile
// is read from shared memory again for each chunk: that saves a dozen registers, and so leaves room
// for more warps.
template <int W, typename Visitor>
__device__ __forceinline__ void visit_chunks(const Tile& tile, int first, const Visitor& visit) {
  const int lane = threadIdx.x % kWarp;
  const int size = tile.size;
#pragma unroll 1
  for (int done = first; done < kTileTokens && done < size; done += kWarp * W) {
    visit(opaque(&tile), Place{done + lane * W, done + kWarp * W});
  }
}

}  // namespace klfast::cuda
