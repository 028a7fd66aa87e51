// The call of the kernels of rollout_correction. No torch.

#pragma once

#include "tensors/view.h"

namespace klfast::rollout {

// In the order of klfast.args.rollout.WEIGHTS and OUTSIDE, klfast.args.rejection.OVER.
enum class Weight { kNone, kToken, kSequence, kGeometric };
enum class Outside { kTruncate, kMask };
enum class Over { kToken, kSum, kMean, kGreatest, kLeast };
inline constexpr int kWeights = 4, kOutsides = 2, kOvers = 5;

// A rule is a rejection criterion (klfast.Rejection). Absent bounds are infinite.
struct Rule {
  int formula = 0;  // index into RuleTable
  Over over = Over::kToken;
  bool outward_only = false;
  double low = 0;
  double high = 0;
};

inline constexpr int kMostRules = 45;  // nine statistics, each with five kinds of Over

// The weight of a token is e^u. `weight` says what u is. Absent bounds on u are infinite.
struct Options {
  Weight weight = Weight::kToken;
  Outside outside = Outside::kTruncate;
  double log_floor = 0;
  double log_cap = 0;
  double log_least = 0;  // `below` counts the weights below it
  double floor = 0;
  double cap = 0;
  int rules_count = 0;
  Rule rules[kMostRules];

  KLFAST_HOST_DEVICE bool weighs_sequences() const {
    return weight == Weight::kSequence || weight == Weight::kGeometric;
  }
  bool judges_sequences() const {
    for (int i = 0; i < rules_count; ++i) {
      if (rules[i].over != Over::kToken) return true;
    }
    return false;
  }
};

struct Inputs {
  Batch batch;
  View logprobs;
  View rollout_logprobs;
  View mask;
  View advantages;  // per token, or [1, S]
  bool has_advantage_per_token = false;
  bool is_double = false;
  Options options;
};

struct Outputs {
  Output weights;         // type of the arithmetic, absent for Weight::kNone
  Output mask;            // dtype of the mask, or bools without a mask
  void* table = nullptr;  // [rows_of(rules), S] in the type of the arithmetic
};

struct Call {
  Inputs in;
  Outputs out;
};

}  // namespace klfast::rollout
