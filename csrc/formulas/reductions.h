// Reductions of a batch as weights of its sequences, on the host and on devices. No torch.
//
// A scalar result is sum_s weight(s) * (sum of the values of sequence s). A result per sequence has
// these terms one by one. The gradient of a token of s is weight(s) times the gradient of its
// value. A result per token has no weights.

#pragma once

#include "math/host_device.h"

namespace klfast {

// In the order of klfast.types.reduction.RESULTS and DENOMINATORS.
enum class Result { kToken, kSequence, kScalar };
enum class Denominator { kOne, kTokens, kSequences };
inline constexpr int kResults = 3, kDenominators = 3;

// klfast.types.reduction.Reduction as plain data.
struct Reduction {
  Result result = Result::kToken;
  bool own_length = false;               // a sequence's sum is divided by the sum of its mask
  Denominator over = Denominator::kOne;  // what the sum over the sequences is divided by

  // True if all weights are 1.
  KLFAST_HOST_DEVICE bool is_sum() const { return !own_length && over == Denominator::kOne; }

  // True if the weights depend on the masks of all sequences.
  KLFAST_HOST_DEVICE bool uses_total(bool is_normalized) const {
    return over != Denominator::kOne && !is_normalized;
  }
};

// The term of a sequence in the denominator. The total is the sum of these terms over the batch.
KLFAST_HOST_DEVICE double denominator_term(const Reduction& reduction, double length) {
  switch (reduction.over) {
    case Denominator::kOne:
      break;
    case Denominator::kTokens:
      return length;
    case Denominator::kSequences:
      return length > 0 ? 1 : 0;
  }
  return 0;
}

// The weight of a sequence in the result. A given normalizer is used as it is. Without one, a
// weight that would divide by 0 is 0.
KLFAST_HOST_DEVICE double sequence_weight(const Reduction& reduction, double length, double total,
                                          bool is_normalized, double normalizer) {
  if (reduction.own_length && !(length > 0)) return 0;
  double denominator = 1;
  if (reduction.uses_total(is_normalized)) {
    if (!(total > 0)) return 0;
    denominator = total;
  } else if (reduction.over != Denominator::kOne) {
    denominator = normalizer;
  }
  if (reduction.own_length) denominator *= length;
  return denominator == 1 ? 1 : 1 / denominator;  // a division takes long on a GPU
}

}  // namespace klfast
