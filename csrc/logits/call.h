// The calls of the kernels over logits. No torch.
//
// A kernel maps rows of logits [A, T, V] to numbers [R], R = A * T. The kernels over log-probs
// apply masks, layouts and reductions to these numbers. A word is an entry of the vocabulary. A row
// may have several token ids, its picks.

#pragma once

#include <cmath>

#include "formulas/entropy.h"
#include "tensors/view.h"

namespace klfast {

// Logits of shape [A, T, V] with any strides, in elements.
struct Logits {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;
  int64_t word_stride = 1;
};

struct LogitsShape {
  int64_t outer = 0;  // A
  int64_t inner = 0;  // T
  int64_t words = 0;  // V

  KLFAST_HOST_DEVICE int64_t rows() const { return outer * inner; }

  // The start of a row, in elements. It needs no division if there is one batch.
  KLFAST_HOST_DEVICE int64_t offset(const Logits& logits, int64_t row) const {
    if (outer == 1) return row * logits.inner_stride;
    return row / inner * logits.outer_stride + row % inner * logits.inner_stride;
  }
};

// The id of a pick that does not exist. Its log-prob is 0 and has no gradient.
inline constexpr int64_t kNoId = INT64_MIN;

// The inputs of all kernels over logits. Everything per row is contiguous. A row with 0 in `keep`
// is not read, and its outputs are 0.
struct RowInputs {
  LogitsShape shape;
  const int64_t* token_ids = nullptr;  // [R, picks], null if no token's log-prob is wanted
  int64_t picks = 1;                   // token ids per row, 1 for rows of two models
  bool may_lack_ids = false;           // a pick may be kNoId
  const uint8_t* keep = nullptr;       // null if all rows are kept
  double inverse_temperature = 1;
  const double* inverse_temperature_at = nullptr;  // on the device, replaces the number
  bool has_temperatures = false;                   // one number per row, or one for all
  bool is_double = false;  // of the arithmetic, the results and their gradients

  KLFAST_HOST_DEVICE bool keeps(int64_t row) const { return keep == nullptr || keep[row] != 0; }
  KLFAST_HOST_DEVICE double scale(int64_t row) const {
    if (inverse_temperature_at == nullptr) return inverse_temperature;
    const double inverse = inverse_temperature_at[has_temperatures ? row : 0];
    return inverse > 0 ? inverse : NAN;
  }
  KLFAST_HOST_DEVICE bool is_word(int64_t id) const { return id >= 0 && id < shape.words; }
  KLFAST_HOST_DEVICE bool is_none(int64_t id) const { return may_lack_ids && id == kNoId; }
  // True if the log-probs of picks and their gradients are double. 1 minus the probability of
  // several picks has no more digits than their log-probs.
  KLFAST_HOST_DEVICE bool has_double_picks() const { return is_double || may_lack_ids; }
};

// The fields per row that the forward over one model saves, [kCount, R].
struct WordSaved {
  enum : int {
    kOrigin,  // see divergences.h
    kLse,     // log of the sum of exp((logits - origin) / temperature), -infinity
              // for a row in which all logits are -infinity
    kCount
  };
};

// Results per row are in the type of the arithmetic. Those of picks are double if a row may have
// several. Numbers that are saved for a backward are double. In fp32 the rounding of a log-sum-exp
// of 12 would change every probability by up to 1e-6.
struct TokenLogprobsForward {
  RowInputs in;
  Logits logits;
  void* logprobs = nullptr;  // [R, picks]
  void* entropy = nullptr;   // null if not wanted
  double* saved = nullptr;
};

struct TokenLogprobsBackward {
  RowInputs in;
  Logits logits;
  const double* saved = nullptr;
  const void* logprobs = nullptr;  // [R, picks], like its gradient
  const void* entropy = nullptr;
  const void* grad_logprobs = nullptr;
  const void* grad_entropy = nullptr;  // null if there is none
  const void* grad_lse = nullptr;      // of the log-sum-exp, for a row that is part of another, in
                                       // the type of the picks' results
  Output grad;                         // [A, T, V], may be the logits' own memory
};

// p is the first model's distribution, q the second's.
struct DivergenceInputs {
  RowInputs rows;
  Logits first;
  Logits second;
  int divergence = 0;                       // a row of DivergenceTable (formulas/divergences.h)
  double parameter = 0.5;                   // of the divergence, if it has one
  EntropyOf entropy_of = EntropyOf::kNone;  // kSecond only for a KL and a skewed KL
};

// The fields per row that a divergence's forward saves, [kCount, R]. lse and shift are in bits in
// fp32, and in nats in fp64.
struct Saved {
  enum : int {
    kLse,          // of the first model, without its origin. -infinity if both exclude all words.
    kShift,        // the second lse minus the first. Near 0 it has more digits than either lse.
    kSlope,        // the mean under p of PairWord::of_first. KL on a CPU: 1 if p is peaked.
    kFirstOrigin,  // see divergences.h
    kSecondOrigin,
    kCount
  };
};

struct DivergenceForward {
  DivergenceInputs in;
  void* rows = nullptr;
  void* logprobs = nullptr;  // of the tokens, under each model. Null without token ids.
  void* ref_logprobs = nullptr;
  void* entropy = nullptr;  // null if not wanted, NaN if the divergence is NaN
  double* saved = nullptr;
  const void* row_weights = nullptr;  // per row, the factor of its gradient. Null if no gradient is
                                      // written, or if an entropy is wanted.
  Output grad_first;                  // [A, T, V], of sum(row_weights * rows). Without token ids it
  Output grad_second;                 // may be the logits' own memory.
};

struct DivergenceBackward {
  DivergenceInputs in;
  const void* rows = nullptr;
  const double* saved = nullptr;
  const void* grad_rows = nullptr;
  const void* grad_logprobs = nullptr;  // null without token ids
  const void* grad_ref_logprobs = nullptr;
  const void* grad_lse = nullptr;  // of the log-sum-exps, for a row that is part of another
  const void* grad_ref_lse = nullptr;
  const void* entropy = nullptr;
  const void* grad_entropy = nullptr;  // if null, the entropy is not read
  Output grad_first;                   // both may be the logits' own memory
  Output grad_second;
};

}  // namespace klfast
