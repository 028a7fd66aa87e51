// The positions of choices and numbers in the lists that ops take. klfast/ops/load.py compares the
// lengths of these lists with Python's.

#pragma once

#include <cstddef>

namespace klfast::binding {

// The positions in klfast.args.penalty.Choices and Numbers.
struct PenaltyChoice {
  enum : std::size_t {
    kEstimator,
    kGradient,
    kImportance,
    kClipWeighted,
    kResult,
    kOwnLength,
    kOver,
    kCount
  };
};
struct PenaltyNumber {
  enum : std::size_t {
    kImportanceCap,
    kLogRatioLow,
    kLogRatioHigh,
    kLinearTail,
    kKlClip,
    kCoef,
    kNormalizer,
    kCount
  };
};

// The positions in klfast.args.rollout.RolloutChoices, RolloutNumbers, RuleChoices and RuleBounds.
struct RolloutChoice {
  enum : std::size_t { kWeight, kOutside, kCount };
};
struct RolloutNumber {
  enum : std::size_t { kLogFloor, kLogCap, kLogLeast, kFloor, kCap, kCount };
};
struct RuleChoice {
  enum : std::size_t { kFormula, kOver, kOutwardOnly, kCount };
};
struct RuleBound {
  enum : std::size_t { kLow, kHigh, kCount };
};

}  // namespace klfast::binding
