// Gradients of a row of two models, for the forward and the backward.

#pragma once

#include "formulas/divergences.h"
#include "logits/cuda_gradients.h"

namespace klfast::cuda {

// The dtype of both models: T, or AnyDtype.
template <typename T>
struct PairOf {
  using Type = T;
};

template <typename Visitor>
void visit_pair(const DivergenceInputs& in, const Visitor& visit) {
  if (in.in.is_double) return visit(PairOf<AnyDtype<double>>());
  if (in.first.dtype != in.second.dtype) return visit(PairOf<AnyDtype<float>>());
  visit_dtype(in.first.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (is_floating<T> && !std::is_same_v<T, double>) visit(PairOf<T>());
  });
}

// A part of a row without a target token.
template <typename T>
__device__ __forceinline__ GradientPart<T, 2> gradient_part(const DivergenceInputs& in,
                                                            const Output& first,
                                                            const Output& second, int64_t row,
                                                            const Part& part,
                                                            const Frame<AccOf<T>, 2>* frame) {
  const LogitsShape& shape = in.in.shape;
  return {{address_of<T>(shape, in.first, row, part.begin),
           address_of<T>(shape, in.second, row, part.begin)},
          {in.first.dtype, in.second.dtype},
          {in.first.word_stride, in.second.word_stride},
          {first, second},
          row * shape.words + part.begin,
          part.size,
          -1,
          {},
          frame};
}

template <Memory memory, Divergence divergence, typename T>
__device__ __forceinline__ void write_gradients(const GradientPart<T, 2>& part,
                                                const divergences::RowGradient<AccOf<T>>& row) {
  using Acc = AccOf<T>;
  write_gradients<T, memory>(part, [&](const Acc(&words)[2], int model) {
    const auto of_word = divergence == Divergence::kKl
                             ? divergences::kl_gradients(words[0], words[1], row)
                             : divergences::jsd_gradients(words[0], words[1], row);
    return model == 0 ? of_word.first : of_word.second;
  });
}

}  // namespace klfast::cuda
