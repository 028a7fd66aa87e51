// The single argument of a kernel over log-probs.

#pragma once

#include "formulas/token.h"
#include "penalty/call.h"
#include "penalty/cuda_segments.h"

namespace klfast::cuda {

// The variants of the kernel. The plain ones omit limits and importance weights; kPlainStatistics
// and kAny alone compute statistics and the last kept token; kPlain alone has no gradient.
enum class Pass { kPlain, kPlainGradient, kPlainStatistics, kAny };

template <Pass pass>
inline constexpr bool is_plain = pass != Pass::kAny;
template <Pass pass>
inline constexpr Depth depth_of = pass == Pass::kAny               ? Depth::kLimited
                                  : pass == Pass::kPlainStatistics ? Depth::kWanted
                                                                   : Depth::kAlways;
template <Pass pass>
inline constexpr bool has_gradient = pass != Pass::kPlain;

struct Task {
  KlPenaltyInputs in;
  Limits<double> limits;
  Grid grid;
  Output grad_logprobs;
  Output grad_ref_logprobs;
  bool backward = false;
  bool stores_tokens = false;  // a value or a gradient per token
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
