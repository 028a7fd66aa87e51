// Gradients of a row of two models, for the forward and the backward.

#pragma once

#include "formulas/divergences.h"
#include "logits/cuda_gradients.h"
#include "logits/cuda_pairs.h"

namespace klfast::cuda {

// The dtype of both models, or AnyDtype if the dtypes differ or the arithmetic is fp64.
template <typename T>
struct PairOf {
  using Type = T;
};

template <typename Visitor>
void visit_pair(const DivergenceInputs& in, const Visitor& visit) {
  if (in.rows.is_double) return visit(PairOf<AnyDtype<double>>());
  if (in.first.dtype != in.second.dtype) return visit(PairOf<AnyDtype<float>>());
  visit_dtype(in.first.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (is_floating<T> && !std::is_same_v<T, double>) visit(PairOf<T>());
  });
}

// True if a gradient is written over its model's logits.
inline bool is_over_logits(const DivergenceInputs& in, const Output& first, const Output& second) {
  const auto is_over = [](const Output& grad, const Logits& logits) {
    return grad.data != nullptr && grad.data == logits.data;
  };
  return is_over(first, in.first) || is_over(second, in.second);
}

// The divergences that a kernel serves. A launch chooses one of them.
template <typename Rows>
struct Served;
template <typename First, typename... Others>
struct Served<List<First, Others...>> {
  static constexpr bool kIsAlone = sizeof...(Others) == 0;
  static constexpr bool kIsKl = First::kIsKl;
  static constexpr bool kHasRest = First::kHasRest;

  // Calls visit(Row()) for the launch's divergence.
  template <typename Visitor>
  __device__ static __forceinline__ void visit(int divergence, const Visitor& visit) {
    if constexpr (kIsAlone) {
      visit(First());
    } else {
      using divergences::DivergenceTable;
      if (divergence == IndexIn<First, DivergenceTable>::value) return visit(First());
      Served<List<Others...>>::visit(divergence, visit);
    }
  }
};

// All rows with the first pass of a KL share kernels, which halves the time to build them. A KL and
// a JSD have kernels of their own, so that no choice takes time or registers there.
template <typename Row>
using SharesKernels = std::bool_constant<Row::kHasRest && !Row::kIsKl>;
template <typename Row>
using ServedWith =
    Served<std::conditional_t<SharesKernels<Row>::value,
                              Where<SharesKernels, divergences::DivergenceTable>, List<Row>>>;

// Calls visit(PairOf, Served, EntropyTag, fit) with what chooses the kernel of a call, and with the
// polynomials of its divergence.
template <typename Visitor>
void visit_kernel(const DivergenceInputs& in, EntropyOf entropy_of, const Visitor& visit) {
  using namespace divergences;
  visit_pair(in, [&](auto source) {
    visit_entropy(entropy_of, [&](auto tag) {
      using Of = decltype(tag);
      visit_row(DivergenceTable(), in.divergence, [&](auto row) {
        using Row = decltype(row);
        if constexpr (Row::kIsKl) {
          visit(source, ServedWith<Row>(), Of(), Fit());
        } else if constexpr (Row::kHasRest || Of::value != EntropyOf::kSecond) {
          visit(source, ServedWith<Row>(), Of(), Row::fit(in.parameter));
        }
      });
    });
  });
}

// A part of a row without a target token.
template <typename T>
__device__ __forceinline__ GradientPart<T, 2> gradient_part(const DivergenceInputs& in,
                                                            const Output& first,
                                                            const Output& second, int64_t row,
                                                            const Part& part,
                                                            const Frame<AccOf<T>, 2>* frame) {
  const LogitsShape& shape = in.rows.shape;
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

// The constants of a row's gradients, in shared memory.
template <typename Acc>
struct PairGradient {
  divergences::RowGradient<Acc, kBase<Acc>> row;
  Acc limit;  // of |u| in chunks for write_near(), negative if the row has none

  // `only_first` is true if the second model has no gradient.
  __device__ static PairGradient of(const divergences::RowGradient<Acc, kBase<Acc>>& row,
                                    bool is_kl, bool only_first, const Frame<Acc, 2>& frame) {
    // For the first model's gradient of a KL, near words need no formula of their own. But a word
    // without probability has a gradient of 0, so no slope may overflow: 0 times infinity is NaN.
    constexpr Acc kFarthest = Acc(0x1p40);
    const bool is_safe = std::isfinite(fabs(row.first) * kFarthest + fabs(row.first_constant));
    const bool has_near = is_safe && (is_kl || kBase<Acc> == math::Base::kTwo);
    const Acc limit = has_near ? near_limit<Acc>(row.exact, frame) : Acc(-1);
    return {row, limit > 0 && is_kl && only_first ? kFarthest : limit};
  }
};

// The formulas of cuda_gradients.h for a row, plus the gradient of one model's entropy if it is
// wanted.
template <typename Divergence, typename T, EntropyOf of = EntropyOf::kNone>
struct PairFormula {
  using Acc = AccOf<T>;
  static constexpr int W = kChunk<T>;
  static constexpr math::Base kOwnBase = kBase<Acc>;
  using Words = Converted<T, 2>;
  using Near = LogRatios<Acc, W>;
  using Gradient = Chunk<Acc, W>;

  const divergences::RowGradient<Acc, kOwnBase> row;
  const divergences::Fit& fit;
  const Acc limit;
  const divergences::EntropyGradient<Acc> of_entropy;

  __device__ __forceinline__ PairFormula(const PairGradient<Acc>& gradient,
                                         const divergences::Fit& fit,
                                         const divergences::EntropyGradient<Acc>& of_entropy = {})
      : row(opaque(&gradient.row)), fit(fit), limit(gradient.limit), of_entropy(of_entropy) {}

  __device__ __forceinline__ Near near_of(const Words& words, bool may_be) const {
    return Near(words.of[0], words.of[1], row.exact, limit, may_be);
  }

  __device__ __forceinline__ void write_near(const Words& words, const Near& u, int model,
                                             Gradient& gradient) const {
    constexpr bool is_packed =
        Divergence::kIsKl || std::is_base_of_v<divergences::Fitted, Divergence>;
    using Number = std::conditional_t<is_packed, math::Packed<Acc>, Acc>;
    constexpr int kWords = sizeof(Number) / sizeof(Acc);
#pragma unroll
    for (int i = 0; i < W; i += kWords) {
      const auto gradients = math::unpacked<Acc>(
          divergences::near_gradient<Divergence>(math::packed<Number>(&words.of[0].element[i]),
                                                 math::packed<Number>(&words.of[1].element[i]),
                                                 math::packed<Number>(&u.of[i]), model, row, fit));
#pragma unroll
      for (int j = 0; j < kWords; ++j) gradient.element[i + j] = gradients.element[j];
    }
    add_entropy(words, model, gradient);
  }

  __device__ __forceinline__ void write_any(const Words& words, int model,
                                            Gradient& gradient) const {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const auto of_word = divergences::gradients_of<Divergence>(words.of[0].element[i],
                                                                 words.of[1].element[i], row, fit);
      gradient.element[i] = model == 0 ? of_word.first : of_word.second;
    }
    add_entropy(words, model, gradient);
  }

 private:
  __device__ __forceinline__ void add_entropy(const Words& words, int model,
                                              Gradient& gradient) const {
    if constexpr (of != EntropyOf::kNone) {
      if (model != (of == EntropyOf::kFirst ? 0 : 1)) return;
#pragma unroll
      for (int i = 0; i < W; ++i) {
        gradient.element[i] += divergences::entropy_gradient<of>(
            words.of[0].element[i], words.of[1].element[i], row.exact, of_entropy);
      }
    }
  }
};

}  // namespace klfast::cuda
