// What a launch is asked to do, in one argument.

#pragma once

#include "formulas/token.h"
#include "penalty/call.h"
#include "penalty/cuda_segments.h"

namespace klfast::cuda {

// What a kernel can do. The plain ones leave out limits and importance weights; only
// kPlainStatistics and kAny know statistics and the last kept token, and only kPlain has no
// gradient.
enum class Pass { kPlain, kPlainGradient, kPlainStatistics, kAny };

template <Pass pass>
inline constexpr bool is_plain = pass != Pass::kAny;
template <Pass pass>
inline constexpr bool adds_statistics = pass == Pass::kPlainStatistics || pass == Pass::kAny;
template <Pass pass>
inline constexpr bool has_gradient = pass != Pass::kPlain;

struct Task {
  KlPenaltyInputs in;
  Limits<double> limits;
  Grid grid;
  Output grad_logprobs;
  Output grad_ref_logprobs;
  bool backward = false;
  bool stores_tokens = false;  // a value or a gradient of each
  // Forward.
  Output value;  // per token: coef * weighted value
  View scores;
  bool weights_known = false;  // written by a pass over the lengths
  void* result = nullptr;      // of a reduction
  void* weights_out = nullptr;
  void* statistics = nullptr;
  double* partials = nullptr;
  unsigned* arrivals = nullptr;  // null: every block finishes its own sequences
  // Backward.
  View grad_out;
  View weights;
};

}  // namespace klfast::cuda
