// The calls of the kernels over log-probs. No torch.

#pragma once

#include <cmath>

#include "formulas/reductions.h"
#include "formulas/statistics.h"
#include "tensors/view.h"

namespace klfast {

// In the order of klfast.types.names.GRADIENTS and IMPORTANCE.
enum class Gradient { kValue, kK2, kNone };
enum class ImportanceGradient { kDifferentiable, kDetached };
inline constexpr int kGradients = 3, kImportanceGradients = 2;

// The options of klfast.Estimator as plain data. An absent limit is infinite.
struct EstimatorOptions {
  int estimator = 0;  // index into EstimatorTable
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
  View ref_logprobs;  // if absent, logprobs holds the log-ratio
  View old_logprobs;
  View mask;
  View weighting;  // factors of values and gradients, in no denominator; with one column or one per
                   // token
  EstimatorOptions options;
  Reduction reduction;
  double coef = 1;
  double normalizer = 0;  // 0 means none
  // One-element tensors that replace coef and normalizer on a device. To read them, the host would
  // have to wait for the device.
  View coef_tensor;
  View normalizer_tensor;
  bool negate = false;  // the penalty is subtracted from a score
  bool is_double = false;

  KLFAST_HOST_DEVICE bool is_weighted() const { return weighting.data != nullptr; }
  KLFAST_HOST_DEVICE bool is_normalized() const {
    return normalizer > 0 || normalizer_tensor.data != nullptr;
  }
};

struct KlPenaltyForward {
  View scores;                 // [1, S], each added at its sequence's last kept token
  void* result = nullptr;      // in the type of the arithmetic, shape by reduction
  void* weights = nullptr;     // [S], see sequence_weight: all that the backward reads.
                               // Null if not wanted, and on a GPU with a gradient.
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
