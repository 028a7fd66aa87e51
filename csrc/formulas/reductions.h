// Reductions of a batch as weights of its sequences, on the host and on devices. No torch.
//
// Every reduction but that of tokens is sum_s weight(s) * (sum of the values of sequence s), or
// those terms one by one; the gradient of a token of s is weight(s) times its own.

#pragma once

#include "math/host_device.h"

namespace klfast {

// In the order of klfast.reduction.RESULTS and DENOMINATORS.
enum class Result { kToken, kSequence, kScalar };
enum class Over { kOne, kTokens, kSequences };

// klfast.reduction.Reduction as plain data.
struct Reduction {
  Result result = Result::kToken;
  bool own_length = false;  // a sequence's sum is divided by the sum of its mask
  Over over = Over::kOne;   // what the sum over the sequences is divided by

  // Whether the weights depend on the masks of all sequences.
  KLFAST_HOST_DEVICE bool uses_totals(bool is_normalized) const {
    return over != Over::kOne && !is_normalized;
  }
};

// The totals of the mask over a batch.
struct Totals {
  double tokens = 0;     // sum of the mask
  double sequences = 0;  // sequences with a kept token
};

// The weight of a sequence in the result. A normalizer, where there is one, is taken as it is;
// nothing else is divided by 0.
KLFAST_HOST_DEVICE double sequence_weight(const Reduction& reduction, double length,
                                          const Totals& totals, bool is_normalized,
                                          double normalizer) {
  if (reduction.own_length && !(length > 0)) return 0;
  double denominator = 1;
  if (reduction.uses_totals(is_normalized)) {
    denominator = reduction.over == Over::kTokens ? totals.tokens : totals.sequences;
    if (!(denominator > 0)) return 0;
  } else if (reduction.over != Over::kOne) {
    denominator = normalizer;
  }
  if (reduction.own_length) denominator *= length;
  return 1 / denominator;
}

}  // namespace klfast
