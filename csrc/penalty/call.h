// The fused KL penalty: what its kernels are asked. No torch.

#pragma once

#include <cmath>

#include "formulas/reductions.h"
#include "formulas/statistics.h"
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
  View ref_logprobs;  // absent: logprobs holds the log-ratio
  View old_logprobs;
  View mask;
  EstimatorOptions options;
  Reduction reduction;
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

struct KlPenaltyForward {
  View scores;                 // [1, S], added at the last kept token of each sequence
  void* result = nullptr;      // arithmetic's type, like the next two; shape by reduction
  void* weights = nullptr;     // [S], of the tokens of each sequence in the result; null if not
                               // wanted, but for gradients
  void* statistics = nullptr;  // [kStatistics, S]; null if not wanted
  Output grad_logprobs;        // gradient of a scalar result
  Output grad_ref_logprobs;
};

struct KlPenaltyBackward {
  View grad_out;  // in the shape of the result: per token, [1, S], or one element
  View weights;   // [1, S], of the forward
  Output grad_logprobs;
  Output grad_ref_logprobs;
};

}  // namespace klfast
