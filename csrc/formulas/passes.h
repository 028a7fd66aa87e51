// The passes over a row of logits, and the rule by which a row is summed again. Host and device, no
// torch.
//
// A sum of e^(x - m) needs a guess m near the row's greatest x. To find that takes a pass over the
// row, so the first guess is the greatest of the row's first logits. The sums tell what a guess was
// worth:
//   good     the sums are exact.
//   poor     the sums have lost digits, but give a guess from which the next sums are exact.
//   useless  the terms were lost to 0 or held at exp's limit, or a logit is NaN: the next guess is
//            the greatest logit of the whole row.
// A row so takes one pass as a rule, and at most four.
//
// The CPU's kernels over logits and CUDA's over two models follow this rule. CUDA's take a sample
// spread over the row in place of its first logits, and sum against it even if it is useless: so
// are the sums then. CUDA's over one model raise a guess where it is too low, and read a row again
// only if a sum is not usable (logits/cuda_token_sums.h). The Triton kernels have a rule of their
// own (klfast/backends/triton/logits_kernels.py).

#pragma once

#include "math/host_device.h"

namespace klfast::passes {

enum class Verdict { kUseless, kPoor, kGood };

// The passes: kFind passes find a greatest logit, kSum passes sum the row.
enum class Step {
  kFindFirst,   // among the row's first logits
  kSumFirst,    // from what kFindFirst found
  kFindInRow,   // among all of the row's logits
  kSumFromRow,  // from what kFindInRow found
  kSumAgain,    // from what the sums before told
  kDone
};

// The step after one with this verdict. A greatest logit is good if it is finite, and useless
// otherwise.
KLFAST_HOST_DEVICE Step next_step(Step step, Verdict verdict) {
  switch (step) {
    case Step::kFindFirst:
      return verdict == Verdict::kUseless ? Step::kFindInRow : Step::kSumFirst;
    case Step::kSumFirst:
      if (verdict == Verdict::kUseless) return Step::kFindInRow;
      return verdict == Verdict::kPoor ? Step::kSumAgain : Step::kDone;
    case Step::kFindInRow:
      return verdict == Verdict::kUseless ? Step::kDone : Step::kSumFromRow;
    case Step::kSumFromRow:
      return verdict == Verdict::kPoor ? Step::kSumAgain : Step::kDone;
    case Step::kSumAgain:
    case Step::kDone:
      break;
  }
  return Step::kDone;
}

// Whether a sum of e^(x - m) has a logarithm that is about right.
KLFAST_HOST_DEVICE bool is_usable(double sum) { return sum > 1e-20 && sum < 1e30; }

// Whether m is near enough to the greatest x that the rounding of x - m does not show in the sum:
// one below `most`.
inline constexpr double kMost = 1e7;
inline constexpr double kMostInBits = 4e9;  // 2^32: differences in bits round alike from 16 to 32
KLFAST_HOST_DEVICE bool is_exact(double sum, double most = kMost) {
  return sum > 1e-2 && sum < most;
}

// The verdict on the sums of one model.
KLFAST_HOST_DEVICE Verdict verdict_of(double mass) {
  if (!is_usable(mass)) return Verdict::kUseless;
  return is_exact(mass) ? Verdict::kGood : Verdict::kPoor;
}

// The verdict on the sums of two models: `mass` is the sum of e^(x - m), `total` the sum of
// e^(y - m - c) over `mass`; `cancels` if the KL formed of them has lost digits; `most` is for
// is_exact.
KLFAST_HOST_DEVICE Verdict verdict_of(double mass, double total, bool cancels,
                                      double most = kMost) {
  if (!is_usable(mass) || !is_usable(total)) return Verdict::kUseless;
  const bool is_near = total > 0.125 && total < 1e4;
  return is_exact(mass, most) && is_near && !cancels ? Verdict::kGood : Verdict::kPoor;
}

}  // namespace klfast::passes
