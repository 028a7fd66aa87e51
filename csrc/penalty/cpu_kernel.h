// The kernels over log-probs that are compiled per instruction set.

#pragma once

#include "device/cpu/segment.h"
#include "penalty/call.h"

namespace klfast::cpu {

// The sums of a segment: of fp32 (fp64) terms, in an order that depends on positions alone.
struct Partial : Statistics<double> {
  int64_t last_kept = -1;  // index among all tokens
  bool bad_mask = false;

  Partial() : Statistics<double>(empty_statistics<double>()) {}
};

// The task of a pass over a segment's tokens.
struct SegmentTask {
  const KlPenaltyInputs* inputs;
  View grad_out;          // per token, or absent
  double grad_scale = 1;  // factor of every token's gradient
  bool want_statistics = false;
  bool want_last_kept = false;
  Output value;  // arithmetic's type; coef * weighted value
  Output grad_logprobs;
  Output grad_ref_logprobs;
};

struct Kernels {
  Partial (*run_segment)(const SegmentTask&, const Segment&);
  Partial (*read_mask)(const KlPenaltyInputs&, const Segment&);  // kLength and bad_mask alone
  void (*scale)(const Output&, int64_t n, double factor);        // in place
};

// The best kernels for this processor, or those that KLFAST_CPU names.
const Kernels& kernels();

}  // namespace klfast::cpu
