// The calls of the kernels over logits. No torch.
//
// A kernel maps rows of logits [A, T, V] to numbers [R], R = A * T. Masks, layouts and reductions
// of these numbers belong to the kernels over log-probs. A word is an entry of the vocabulary.

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

  // The start of a row, in elements. Rows of one batch take no division.
  KLFAST_HOST_DEVICE int64_t offset(const Logits& logits, int64_t row) const {
    if (outer == 1) return row * logits.inner_stride;
    return row / inner * logits.outer_stride + row % inner * logits.inner_stride;
  }
};

// In place of one of several token ids of a row: there is none. Its log-prob is 0 and has no
// gradient.
inline constexpr int64_t kNoId = INT64_MIN;

// The inputs that all kernels over logits have. Everything per row is contiguous. A row with 0 in
// `keep` is not read, and its outputs are 0.
struct RowInputs {
  LogitsShape shape;
  const int64_t* token_ids = nullptr;  // [R, picks]; null where no token's log-prob is wanted
  int64_t picks = 1;                   // token ids of a row; of two models' rows 1
  bool may_lack_ids = false;           // a pick may be kNoId
  const uint8_t* keep = nullptr;       // null for all
  double inverse_temperature = 1;
  const double* inverse_temperature_at = nullptr;  // on the device, in place of the number:
  bool has_temperatures = false;                   // one number a row, or one for all
  bool is_double = false;  // arithmetic, and the type of results and their gradients

  KLFAST_HOST_DEVICE bool keeps(int64_t row) const { return keep == nullptr || keep[row] != 0; }
  KLFAST_HOST_DEVICE double scale(int64_t row) const {
    if (inverse_temperature_at == nullptr) return inverse_temperature;
    const double inverse = inverse_temperature_at[has_temperatures ? row : 0];
    return inverse > 0 ? inverse : NAN;
  }
  KLFAST_HOST_DEVICE bool is_word(int64_t id) const { return id >= 0 && id < shape.words; }
  KLFAST_HOST_DEVICE bool is_none(int64_t id) const { return may_lack_ids && id == kNoId; }
};

// The fields that the forward over one model saves per row, [kCount, R].
struct WordSaved {
  enum : int {
    kOrigin,  // see divergences.h
    kLse,     // log of the sum of exp(logits / temperature), of logits less their origin; -infinity
              // of a row of nothing but -infinity
    kCount
  };
};

// Results per row are in the arithmetic's type. Numbers saved for a backward are double: in fp32
// the rounding of a log-sum-exp of 12 changes every probability by up to 1e-6.
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
  const void* logprobs = nullptr;  // [R, picks], like the gradient of them
  const void* entropy = nullptr;
  const void* grad_logprobs = nullptr;
  const void* grad_entropy = nullptr;  // null if there is none
  const void* grad_lse = nullptr;      // of the log-sum-exp: where a row is a part of another
  Output grad;                         // [A, T, V]; may be the logits' own memory
};

enum class Divergence { kKl, kJsd };  // klfast.args.rows.DIVERGENCES

inline constexpr int kDivergences = 2;

// KL(p || q), or JSD with weight beta on q; p is of the first model, q of the second.
struct DivergenceInputs {
  RowInputs rows;
  Logits first;
  Logits second;
  Divergence divergence = Divergence::kKl;
  double beta = 0.5;
  EntropyOf entropy_of = EntropyOf::kNone;  // of a JSD not the second's
};

// The fields that a divergence's forward saves per row, [kCount, R]. lse and shift are in the
// base's unit of the kernels that save and read them: bits in CUDA's fp32, or else nats.
struct Saved {
  enum : int {
    kLse,          // of the first model, less its origin; -infinity where neither model has a word
    kShift,        // the second's lse minus the first's: near 0 it has more digits than either
    kSlope,        // for JSD: the mean under p of log(m / p); on a CPU for KL 1 where p is peaked
    kFirstOrigin,  // see divergences.h
    kSecondOrigin,
    kCount
  };
};

struct DivergenceForward {
  DivergenceInputs in;
  void* rows = nullptr;
  void* logprobs = nullptr;  // of the tokens, under either model; null without token ids
  void* ref_logprobs = nullptr;
  void* entropy = nullptr;  // null if not wanted; NaN where the divergence is
  double* saved = nullptr;
  const void* row_weights = nullptr;  // per row: factor of its gradient; null where none is written
                                      // and where an entropy is wanted
  Output grad_first;                  // [A, T, V]; of sum(row_weights * rows); may be the logits'
  Output grad_second;                 // own memory where there are no token ids
};

struct DivergenceBackward {
  DivergenceInputs in;
  const void* rows = nullptr;
  const double* saved = nullptr;
  const void* grad_rows = nullptr;
  const void* grad_logprobs = nullptr;  // null without token ids
  const void* grad_ref_logprobs = nullptr;
  const void* grad_lse = nullptr;  // of the models' log-sum-exps: where a row is a part of another
  const void* grad_ref_lse = nullptr;
  const void* entropy = nullptr;
  const void* grad_entropy = nullptr;  // null if there is none: then the entropy is not read
  Output grad_first;                   // may be the logits' own memory, like the next
  Output grad_second;
};

}  // namespace klfast
