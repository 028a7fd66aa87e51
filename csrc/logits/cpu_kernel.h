// The kernels over logits that are compiled per instruction set, each for one row.

#pragma once

#include "logits/call.h"

namespace klfast::cpu {

struct LogitsKernels {
  // Returns false if a token id of the row is no word.
  bool (*token_logprobs_forward)(const TokenLogprobsForward&, int64_t row);
  void (*token_logprobs_backward)(const TokenLogprobsBackward&, int64_t row);
  bool (*divergence_forward)(const DivergenceForward&, int64_t row);
  void (*divergence_backward)(const DivergenceBackward&, int64_t row);
};

// The best kernels for this processor, or those that KLFAST_CPU names.
const LogitsKernels& logits_kernels();

}  // namespace klfast::cpu
