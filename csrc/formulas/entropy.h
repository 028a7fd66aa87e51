// The entropy of a row's distribution, -sum p log p. Host and device, no torch.
//
// A row is summed against a guess m. With w = e^(x - m), W the sum of w, and M the sum of w (x -
// m), the entropy is log W - M / W. A call over two models (divergences.h) may want the entropy of
// either. The second model's terms follow from the first model's if the models are near.

#pragma once

#include <type_traits>

#include "math/host_device.h"

namespace klfast {

// The model whose entropy a call over two models wants. klfast.args.rows.ENTROPIES
enum class EntropyOf { kNone, kFirst, kSecond };

inline constexpr int kEntropies = 3;

template <EntropyOf of>
using EntropyTag = std::integral_constant<EntropyOf, of>;

// Calls visit() with the tag. On the host.
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

// A row's entropy from log W and M / W. If rounding puts it below 0, it becomes 0. NaN stays NaN.
KLFAST_HOST_DEVICE double entropy_of(double log_mass, double mean) {
  const double entropy = log_mass - mean;
  return entropy < 0 ? 0 : entropy;
}

}  // namespace divergences
}  // namespace klfast
