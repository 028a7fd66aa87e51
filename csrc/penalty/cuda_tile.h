// A warp's pass over a tile of a sequence: loads, formulas, stores, lane sums.

#pragma once

#include "device/cuda/tokens.h"
#include "penalty/cuda_finish.h"

namespace klfast::cuda {

// The number of tokens of a lane's chunk. It is the same in all segments of a pass, because a
// token's position alone decides which lane has it.
template <typename T>
inline constexpr int kWidth = kSmoothWidth<T> > 4 ? 4 : kSmoothWidth<T>;

// The factors of stored values and gradients.
template <typename Acc>
struct Factors {
  Acc coef;
  Acc gradient;
};

// The tokens of a segment.
template <typename Acc>
struct Span {
  Factors<Acc> factors;
  int64_t index;  // of the first token among all tokens
  int size;
  bool is_aligned;  // the log-probs and a mask of bools, or without a mask
  // The offset of the first token in each input, in elements.
  int64_t logprobs;
  int64_t ref_logprobs;
  int64_t old_logprobs;
  int64_t mask;
  int64_t weighting;
  int64_t grad_out;
};

template <typename T, typename Acc = typename Source<T>::Acc>
__device__ __forceinline__ Span<Acc> span_of(const Task& task, const Segment& segment) {
  constexpr int W = kWidth<T>;
  const KlPenaltyInputs& in = task.in;
  Span<Acc> span = {};
  span.index = segment.start + segment.position;
  span.size = static_cast<int>(segment.size);
  span.logprobs = offset_of(in.logprobs, in.batch, segment);
  span.ref_logprobs = offset_of(in.ref_logprobs, in.batch, segment);
  span.old_logprobs = offset_of(in.old_logprobs, in.batch, segment);
  span.mask = offset_of(in.mask, in.batch, segment);
  span.weighting = offset_of(in.weighting, in.batch, segment);
  span.grad_out = offset_of(task.grad_out, in.batch, segment);
  if constexpr (std::is_same_v<T, typename Source<T>::Element>) {
    span.is_aligned =
        in.ref_logprobs.data != nullptr && has_aligned_chunks<T, W>(in.logprobs, span.logprobs) &&
        has_aligned_chunks<T, W>(in.ref_logprobs, span.ref_logprobs) &&
        (in.old_logprobs.data == nullptr ||
         has_aligned_chunks<T, W>(in.old_logprobs, span.old_logprobs)) &&
        (in.mask.data == nullptr ||
         (in.mask.dtype == DType::kBool && has_aligned_chunks<Bool, W>(in.mask, span.mask)));
  }
  return span;
}

// A lane's chunk of every input, as loaded.
template <typename T, int W>
struct Fetched {
  Chunk<typename Source<T>::Element, W> logprobs;
  Chunk<typename Source<T>::Element, W> ref_logprobs;
  Chunk<typename Source<T>::Element, W> old_logprobs;
  Chunk<typename Source<T>::Acc, W> weight;
};

// The tokens that a lane computes at a time, and their results.
template <typename Acc, int W>
struct Tokens {
  bool weighs;                   // there are importance weights
  Chunk<Acc, W> weight;          // from the mask
  Chunk<Acc, W> log_ratio;       // logprobs - ref_logprobs, 0 where masked
  Chunk<Acc, W> log_importance;  // logprobs - old_logprobs, 0 where masked or absent
  Chunk<Acc, W> value;
  Chunk<Acc, W> derivative;
  Chunk<Acc, W> ref_derivative;
  bool clipped[W];
};

// Loads aligned chunks.
template <typename T, int W, typename Acc>
__device__ __forceinline__ Fetched<T, W> fetch_aligned(const KlPenaltyInputs& in,
                                                       const Span<Acc>& span, const Place& at) {
  const auto load = [&](const View& view, int64_t offset) {
    return load_aligned<T, W>(static_cast<const T*>(view.data) + offset + at.position);
  };
  Fetched<T, W> fetched;
  fetched.logprobs = load(in.logprobs, span.logprobs);
  fetched.ref_logprobs = load(in.ref_logprobs, span.ref_logprobs);
  fetched.old_logprobs = fetched.logprobs;
  if (in.old_logprobs.data != nullptr) {
    fetched.old_logprobs = load(in.old_logprobs, span.old_logprobs);
  }
  Chunk<Bool, W> mask;
#pragma unroll
  for (int i = 0; i < W; ++i) mask.element[i] = {1};
  if (in.mask.data != nullptr) {
    mask = load_aligned<Bool, W>(static_cast<const Bool*>(in.mask.data) + span.mask + at.position);
  }
#pragma unroll
  for (int i = 0; i < W; ++i) fetched.weight.element[i] = convert<Acc>(mask.element[i]);
  return fetched;
}

template <typename T, int W, typename Acc>
__device__ __forceinline__ Fetched<T, W> fetch_all(const KlPenaltyInputs& in, const Span<Acc>& span,
                                                   const Place& at) {
  if constexpr (std::is_same_v<T, typename Source<T>::Element>) {
    if (span.is_aligned && at.end <= span.size) return fetch_aligned<T, W>(in, span, at);
  }
  Fetched<T, W> fetched;
  fetched.logprobs = fetch<T, W>(in.logprobs, span.logprobs, span.size, at);
  fetched.ref_logprobs = {};
  if (in.ref_logprobs.data != nullptr) {
    fetched.ref_logprobs = fetch<T, W>(in.ref_logprobs, span.ref_logprobs, span.size, at);
  }
  fetched.old_logprobs = fetched.logprobs;
  if (in.old_logprobs.data != nullptr) {
    fetched.old_logprobs = fetch<T, W>(in.old_logprobs, span.old_logprobs, span.size, at);
  }
  load_weights(in.mask, span.mask, span.size, at, fetched.weight);
  return fetched;
}

template <typename T, typename Acc, int W>
__device__ __forceinline__ void take_tokens(const Fetched<T, W>& fetched, bool weighs,
                                            Tokens<Acc, W>& tokens) {
  tokens.weighs = weighs;
#pragma unroll
  for (int i = 0; i < W; ++i) {
    const Acc weight = fetched.weight.element[i];
    const bool keep = weight != Acc(0);
    const Acc logprob = convert<Acc>(fetched.logprobs.element[i]);
    const Acc log_ratio = logprob - convert<Acc>(fetched.ref_logprobs.element[i]);
    tokens.weight.element[i] = weight;
    tokens.log_ratio.element[i] = keep ? log_ratio : Acc(0);
    const Acc log_importance = logprob - convert<Acc>(fetched.old_logprobs.element[i]);
    tokens.log_importance.element[i] = keep && weighs ? log_importance : Acc(0);
  }
}

// Computes a token again in fp64 if a factor may leave fp32's range although the product does not.
// Takes one token at a time, because such tokens are rare. The token alone decides whether it is
// computed again.
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

// The values and derivatives of a lane's tokens under one formula.
template <typename E, typename Acc, int W>
__device__ __forceinline__ void evaluate(const Limits<Acc>& limit, Tokens<Acc, W>& tokens) {
  [[maybe_unused]] bool extreme = false;
#pragma unroll
  for (int i = 0; i < W; ++i) {
    const Acc x = tokens.log_ratio.element[i];
    const Acc weight = tokens.weight.element[i];
    const Acc log_importance = tokens.log_importance.element[i];
    const Token<Acc> token =
        evaluate_token<E, Acc>(limit, tokens.weighs, weight != Acc(0), weight, x, log_importance);
    tokens.value.element[i] = token.value;
    tokens.derivative.element[i] = token.derivative;
    tokens.ref_derivative.element[i] = token.ref_derivative;
    tokens.clipped[i] = token.clipped;
    extreme = extreme || is_extreme(x) || is_extreme(log_importance);
  }
  if constexpr (std::is_same_v<Acc, float>) {
    if (tokens.weighs && extreme) evaluate_extremes<E>(limit, tokens);
  }
}

template <typename Acc, int W>
__device__ __forceinline__ void evaluate(int estimator, const Limits<Acc>& limit,
                                         Tokens<Acc, W>& tokens) {
  visit_row(estimators::EstimatorTable(), estimator,
            [&](auto formula) { evaluate<decltype(formula)>(limit, tokens); });
}

// Adds a lane's tokens to its sums. `offset` is the place of the first token in the segment.
template <typename Acc, int W>
__device__ __forceinline__ void add_tokens(const Tokens<Acc, W>& tokens, int offset,
                                           LaneSums<Acc>& sums) {
#pragma unroll
  for (int i = 0; i < W; ++i) {
    const Observation<Range::kAnywhere, Acc> token = {
        tokens.value.element[i], tokens.weight.element[i], tokens.log_ratio.element[i],
        tokens.clipped[i]};
    if (token.weight != Acc(0)) sums.last_kept = offset + i;
    add_token<Depth::kLimited>(token, [&](int i) -> Acc& { return sums.at[i]; });
  }
}

// Multiplies values and derivatives by the weights of a call, and adds the values to the lane's
// sums. All are 0 where such a weight or the mask is 0, and then store_gradient() writes 0 too.
template <typename Acc, int W>
__device__ __forceinline__ void weigh(const View& weighting, const Span<Acc>& span, const Place& at,
                                      Tokens<Acc, W>& tokens, LaneSums<Acc>& sums) {
  Chunk<Acc, W> weights;
  load_converted<false>(weighting, span.weighting, span.size, at, weights);
#pragma unroll
  for (int i = 0; i < W; ++i) {
    const bool keep = tokens.weight.element[i] != Acc(0) && weights.element[i] != Acc(0);
    const auto scale = [&](Acc& x) { x = keep ? x * weights.element[i] : Acc(0); };
    scale(tokens.value.element[i]);
    scale(tokens.derivative.element[i]);
    scale(tokens.ref_derivative.element[i]);
    if (!keep) tokens.weight.element[i] = Acc(0);
    sums.weighted += tokens.value.element[i];
  }
}

template <typename Acc>
__device__ __forceinline__ Factors<Acc> factors_of(const Task& task, int64_t sequence) {
  const double coef = coef_of(task.in);
  const Result result = task.in.reduction.result;
  double gradient = coef;
  if (task.backward) {
    gradient *= static_cast<const Acc*>(task.weights.data)[sequence * task.weights.column_stride];
    if ((task.stored & kTimesGradOut) == 0) {
      const View& grad_out = task.grad_out;
      const int64_t stride =
          result == Result::kToken ? grad_out.row_stride : grad_out.column_stride;
      const int64_t index = result == Result::kScalar ? 0 : sequence * stride;
      gradient *= static_cast<const Acc*>(grad_out.data)[index];
    }
  } else if (task.grad_logprobs.data != nullptr || task.grad_ref_logprobs.data != nullptr) {
    gradient *= weight_before_sums<Acc>(task, sequence);
  }
  return {static_cast<Acc>(coef), static_cast<Acc>(gradient)};
}

// Stores a chunk of a gradient in the dtype of its input. The token's own grad_out is a factor. The
// gradient of a masked token is 0, whatever its grad_out holds.
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

// The incoming gradient of each token, for results per token.
template <typename Acc, int W>
__device__ __forceinline__ Chunk<Acc, W> load_grad_out(const Task& task, const Span<Acc>& span,
                                                       const Place& at) {
  const Row<Acc> row = {static_cast<const Acc*>(task.grad_out.data) + span.grad_out,
                        task.grad_out.column_stride, span.size};
  return load_chunk<Acc, W>(row, at.position, at.end);
}

// Stores the values and gradients that are wanted.
template <typename T, typename Acc, int W>
__device__ __forceinline__ void store_results(const Task& task, const Span<Acc>& span,
                                              const Place& at, const Tokens<Acc, W>& tokens) {
  const int64_t index = span.index + at.position;
  const int count = span.size - at.position;
  if (task.value.data != nullptr) {
    Chunk<Acc, W> value;
#pragma unroll
    for (int i = 0; i < W; ++i) value.element[i] = span.factors.coef * tokens.value.element[i];
    store_chunk(static_cast<Acc*>(task.value.data) + index, count, value);
  }
  if (task.grad_logprobs.data == nullptr && task.grad_ref_logprobs.data == nullptr) return;
  Chunk<Acc, W> grad_out;
#pragma unroll
  for (int i = 0; i < W; ++i) grad_out.element[i] = Acc(1);
  if ((task.stored & kTimesGradOut) != 0) {
    grad_out = load_grad_out<Acc, W>(task, span, at);
  }
  if (task.grad_logprobs.data != nullptr) {
    store_gradient<T>(task.grad_logprobs, index, count, span.factors.gradient, tokens.derivative,
                      tokens.weight, grad_out);
  }
  if (task.grad_ref_logprobs.data != nullptr) {
    store_gradient<T>(task.grad_ref_logprobs, index, count, -span.factors.gradient,
                      tokens.ref_derivative, tokens.weight, grad_out);
  }
}

// Adds a lane's chunk to its sums, and stores its results.
template <typename T, int W, typename Acc>
__device__ __forceinline__ void run_chunk(const Task& task, const Limits<Acc>& limit,
                                          const Span<Acc>& span, const Place& at,
                                          LaneSums<Acc>& sums) {
  const Fetched<T, W> fetched = fetch_all<T, W>(task.in, span, at);
  Tokens<Acc, W> tokens;
  take_tokens(fetched, task.in.old_logprobs.data != nullptr, tokens);
  evaluate(task.in.options.estimator, limit, tokens);
  add_tokens(tokens, at.position, sums);
  if (task.in.is_weighted()) weigh(task.in.weighting, span, at, tokens, sums);
  if (task.stored != 0) store_results<T>(task, span, at, tokens);
}

// Zeroes the outputs of tokens that belong to no sequence.
__device__ __forceinline__ void store_zeros(const Task& task, const Segment& segment, int first,
                                            int step) {
  const int64_t index = segment.start + segment.position;
  store_zeros(task.value, index, segment.size, first, step);
  store_zeros(task.grad_logprobs, index, segment.size, first, step);
  store_zeros(task.grad_ref_logprobs, index, segment.size, first, step);
}

}  // namespace klfast::cuda
