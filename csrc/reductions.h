// Reductions of a batch as weights of its sequences, on the host and on devices. No torch.
//
// Every reduction but "none" is sum_s weight(s) * (sum of the values of sequence s), or those terms
// one by one; the gradient of a token of s is weight(s) times its own. So one function says it all.

#pragma once

#include "host_device.h"

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
KLFAST_HOST_DEVICE bool uses_totals(Reduction r, double normalizer) {
  return r >= Reduction::kTokenMean && !(normalizer > 0);
}

// What the mask adds up to over a batch.
struct Totals {
  double tokens = 0;     // sum of the mask
  double sequences = 0;  // sequences with a kept token
};

// normalizer <= 0 stands for none.
KLFAST_HOST_DEVICE double sequence_weight(Reduction reduction, double length, const Totals& totals,
                                          double normalizer) {
  const bool by_tokens = reduction == Reduction::kTokenMean;
  double denominator = 1;
  if (reduction >= Reduction::kTokenMean) {
    const double count = by_tokens ? totals.tokens : totals.sequences;
    denominator = uses_totals(reduction, normalizer) ? count : normalizer;
  }
  if (uses_own_length(reduction)) denominator *= length;
  return denominator > 0 ? 1 / denominator : 0;
}

}  // namespace klfast
