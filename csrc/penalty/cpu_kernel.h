// The kernels over log-probs that are compiled per instruction set.

#pragma once

#include "device/cpu/segment.h"
#include "penalty/call.h"

namespace klfast::cpu {

// The sums of a segment. The terms are fp32 or fp64, and their order depends only on positions.
struct Partial : Statistics<double> {
  int64_t last_kept = -1;  // index among all tokens
  double weighted = 0;     // the sum of values times their `weighting`
  bool bad_mask = false;
  bool bad_weights = false;

  Partial() : Statistics<double>(empty_statistics<double>()) {}
};

// The task of a pass over a segment's tokens.
struct SegmentTask {
  const KlPenaltyInputs* inputs;
  View grad_out;          // per token, or absent
  double grad_scale = 1;  // factor of every token's gradient
  bool want_statistics = false;
  bool want_last_kept = false;
  Output value;  // coef * weighted value, in the arithmetic's type
  Output grad_logprobs;
  Output grad_ref_logprobs;
};

struct Kernels {
  Partial (*run_segment)(const SegmentTask&, const Segment&);
  Partial (*read_mask)(const KlPenaltyInputs&, const Segment&);  // only kLength and bad_mask
  void (*scale)(const Output&, int64_t n, double factor);        // in place
};

// The best kernels for this processor, or the kernels that KLFAST_CPU names.
const Kernels& kernels();

}  // namespace klfast::cpu
