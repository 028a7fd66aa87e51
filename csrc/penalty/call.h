// The fused KL penalty: what its kernels are asked. No torch.

#pragma once

#include <cmath>

#include "formulas/reductions.h"
#include "tensors/view.h"

namespace klfast {

// In the order of klfast.estimator.GRADIENTS and IMPORTANCE.
enum class Gradient { kValue, kK2, kNone };
enum class ImportanceGradient { kDifferentiable, kDetached };

// What is computed per token: klfast.Estimator as plain data. Limits are infinite where absent.
struct EstimatorOptions {
  int estimator = 0;  // index into estimators::kNames
  Gradient gradient = Gradient::kValue;
  ImportanceGradient importance = ImportanceGradient::kDifferentiable;
  bool clip_weighted = false;
  double importance_cap = INFINITY;
  double log_ratio_low = -INFINITY;
  double log_ratio_high = INFINITY;
  double linear_tail = INFINITY;
  double kl_clip = INFINITY;

  bool has_limits() const {
    return std::isfinite(log_ratio_low) || std::isfinite(log_ratio_high) ||
           std::isfinite(linear_tail) || std::isfinite(kl_clip);
  }
};

struct KlPenaltyInputs {
  Batch batch;
  View logprobs;
  View ref_logprobs;
  View old_logprobs;
  View mask;
  EstimatorOptions options;
  Reduction reduction = Reduction::kNone;
  double coef = 1;
  double normalizer = 0;  // 0 stands for none
  View coef_tensor;  // one element each, in place of the numbers: where reading them on the host
  View normalizer_tensor;  // would stall a device
  bool negate = false;     // a penalty that is taken off a score
  bool is_double = false;

  KLFAST_HOST_DEVICE bool is_normalized() const {
    return normalizer > 0 || normalizer_tensor.data != nullptr;
  }
};

inline constexpr int kStatistics = 8;  // fields of klfast.KLStats; length first, then in its order

// What the forward keeps per sequence, in the arithmetic's type: row 0 is the weight of its tokens
// in the result (sequence_weight), which is all that the backward needs; the statistics follow if
// wanted.
constexpr int per_sequence_rows(bool statistics) { return statistics ? 1 + kStatistics : 1; }

struct KlPenaltyForward {
  View scores;  // [1, S], added at the last kept token of each sequence
  bool want_statistics = false;
  void* result = nullptr;        // arithmetic's type; shape by reduction
  void* per_sequence = nullptr;  // [per_sequence_rows, S]
  Output grad_logprobs;          // gradient of a scalar result
  Output grad_ref_logprobs;
};

struct KlPenaltyBackward {
  View grad_out;  // per token for reduction "none"; [1, S] per sequence; one element for a scalar
  View weights;   // [1, S], row 0 of the forward's per_sequence
  Output grad_logprobs;
  Output grad_ref_logprobs;
};

}  // namespace klfast
