// The passes over a row of logits, and how to decide whether a row is summed again. Host and
// device, no torch.
//
// A sum of e^(x - m) needs a guess m near the row's greatest x. To find the greatest x takes a pass
// over the row, so the first guess is the greatest of the row's first logits. The sums then show
// how good the guess was:
//   good     the sums are exact.
//   poor     the sums have lost digits, but they give a guess from which the next sums are exact.
//   useless  the terms underflowed to 0 or reached exp's limit, or a logit is NaN. The next guess
//            is the greatest logit of the whole row.
// Most rows take one pass. No row takes more than four.
//
// The CPU's kernels over logits and CUDA's kernels over two models work this way. CUDA's kernels
// take a sample spread over the row instead of its first logits. They sum against this guess even
// if it is useless, because the sums are then useless too. CUDA's kernels over one model raise a
// guess that is too low, and read a row again only if a sum is not usable
// (logits/cuda_token_sums.h). The Triton kernels decide in their own way
// (klfast/backends/triton/logits_kernels.py).

#pragma once

#include "math/host_device.h"

namespace klfast::passes {

enum class Verdict { kUseless, kPoor, kGood };

// The passes. A kFind pass finds a greatest logit, and a kSum pass sums the row.
enum class Step {
  kFindFirst,   // among the row's first logits
  kSumFirst,    // with the guess of kFindFirst
  kFindInRow,   // among all of the row's logits
  kSumFromRow,  // with the guess of kFindInRow
  kSumAgain,    // with the guess from the last sums
  kDone
};

// The step that follows a step with this verdict. The verdict on a greatest logit is good if it is
// finite, and useless otherwise.
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

// True if the logarithm of a sum of e^(x - m) is about right. Some instruction sets limit a term to
// 2^126 or e^88, and others make it infinite, so the bound is far below these limits.
KLFAST_HOST_DEVICE bool is_usable(double sum) { return sum > 1e-20 && sum < 1e30; }

// True if m is so near to the greatest x that the rounding of x - m does not show in the sum. The
// sum must be below `most`.
inline constexpr double kMost = 1e7;
inline constexpr double kMostInBits = 4e9;  // 2^32: rounding in bits is the same from 16 to 32
KLFAST_HOST_DEVICE bool is_exact(double sum, double most = kMost) {
  return sum > 1e-2 && sum < most;
}

// The verdict on the sums of one model.
KLFAST_HOST_DEVICE Verdict verdict_of(double mass) {
  if (!is_usable(mass)) return Verdict::kUseless;
  return is_exact(mass) ? Verdict::kGood : Verdict::kPoor;
}

// The verdict on the sums of two models. `mass` is the sum of e^(x - m), and `other` is the sum of
// e^(y - m - c). Each sum is judged by itself, because a term at exp's limit shows in its own sum,
// and not in other / mass. `cancels` is true if the KL from these sums has lost digits. `most` is
// an argument of is_exact.
KLFAST_HOST_DEVICE Verdict verdict_of(double mass, double other, bool cancels,
                                      double most = kMost) {
  if (!is_usable(mass) || !is_usable(other)) return Verdict::kUseless;
  const bool is_near = other > 0.125 * mass && other < 1e4 * mass;
  return is_exact(mass, most) && is_near && !cancels ? Verdict::kGood : Verdict::kPoor;
}

}  // namespace klfast::passes
