// Reductions of a batch as weights of its sequences, on the host and on devices. No torch.
//
// Every reduction but "none" is sum_s weight(s) * (sum of the values of sequence s), or those terms
// one by one; the gradient of a token of s is weight(s) times its own. So one function says it all.

#pragma once

#include "math/host_device.h"

namespace klfast {

enum class Reduction {
  kNone,
  kSequenceSum,
  kSequenceMean,
  kTokenSum,
  kTokenMean,
  kSequenceMeanTokenSum,
  kSequenceMeanTokenMean
};

inline constexpr const char* kReductionNames[] = {"none",
                                                  "seq-sum",
                                                  "seq-mean",
                                                  "token-sum",
                                                  "token-mean",
                                                  "seq-mean-token-sum",
                                                  "seq-mean-token-mean"};

KLFAST_HOST_DEVICE bool is_scalar(Reduction r) { return r >= Reduction::kTokenSum; }

// Whether a sequence's weight depends on its own mask, and whether on everybody's.
KLFAST_HOST_DEVICE bool uses_own_length(Reduction r) {
  return r == Reduction::kSequenceMean || r == Reduction::kSequenceMeanTokenMean;
}
KLFAST_HOST_DEVICE bool uses_totals(Reduction r, bool is_normalized) {
  return r >= Reduction::kTokenMean && !is_normalized;
}

// What the mask adds up to over a batch.
struct Totals {
  double tokens = 0;     // sum of the mask
  double sequences = 0;  // sequences with a kept token
};

// A normalizer, where there is one, is taken as it is; nothing else is divided by 0.
KLFAST_HOST_DEVICE double sequence_weight(Reduction reduction, double length, const Totals& totals,
                                          bool is_normalized, double normalizer) {
  if (uses_own_length(reduction) && !(length > 0)) return 0;
  double denominator = 1;
  if (uses_totals(reduction, is_normalized)) {
    denominator = reduction == Reduction::kTokenMean ? totals.tokens : totals.sequences;
    if (!(denominator > 0)) return 0;
  } else if (reduction >= Reduction::kTokenMean) {
    denominator = normalizer;
  }
  if (uses_own_length(reduction)) denominator *= length;
  return 1 / denominator;
}

}  // namespace klfast
