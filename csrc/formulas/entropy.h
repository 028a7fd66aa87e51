// The entropy of a row's distribution, -sum p log p. Host and device, no torch.
//
// A row is summed against a guess m: with w = e^(x - m), their sum W, and the sum M of w (x - m),
// the entropy is log W - M / W. Of two models' rows (divergences.h) one model's entropy is wanted:
// the first's, or the second's, whose terms follow from the first's where the models are near.

#pragma once

#include <type_traits>

#include "math/host_device.h"

namespace klfast {

// The model of two whose entropy is wanted. klfast.args.rows.ENTROPIES
enum class EntropyOf { kNone, kFirst, kSecond };

inline constexpr int kEntropies = 3;

template <EntropyOf of>
using EntropyTag = std::integral_constant<EntropyOf, of>;

// Calls visit() with the tag. On a host.
template <typename Visitor>
auto visit_entropy(EntropyOf of, const Visitor& visit) {
  switch (of) {
    case EntropyOf::kFirst:
      return visit(EntropyTag<EntropyOf::kFirst>());
    case EntropyOf::kSecond:
      return visit(EntropyTag<EntropyOf::kSecond>());
    case EntropyOf::kNone:
      break;
  }
  return visit(EntropyTag<EntropyOf::kNone>());
}

namespace divergences {

// A row's entropy of log W and M / W. Rounding may have left it below 0; NaN stays.
KLFAST_HOST_DEVICE double entropy_of(double log_mass, double mean) {
  const double entropy = log_mass - mean;
  return entropy < 0 ? 0 : entropy;
}

}  // namespace divergences
}  // namespace klfast
