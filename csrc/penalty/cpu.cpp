// The KL penalty of a batch on the CPU: cuts it into segments, runs the kernels over them on
// several threads, and adds their partial sums in the order of positions. A sequence's result does
// not depend on the number of threads or on other sequences.

#include "penalty/cpu.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "device/cpu/segments.h"
#include "penalty/cpu_kernel.h"
#include "tensors/convert.h"

namespace klfast::cpu {
namespace {

// The sum of every sequence's mask if weights depend on it, else ones. Reads a mask once.
std::vector<double> read_lengths(const KlPenaltyInputs& in, const Segments& segments,
                                 const Threads& threads) {
  if (!in.reduction.own_length && !in.reduction.uses_total(in.is_normalized())) {
    return std::vector<double>(in.batch.sequences, 1);
  }
  std::vector<double> lengths(in.batch.sequences, 0);
  if (in.mask.data == nullptr) {
    for (int64_t s = 0; s < in.batch.sequences; ++s) {
      lengths[s] = static_cast<double>(in.batch.length(s));
    }
    return lengths;
  }
  std::vector<Partial> partials(segments.count());
  segments.for_each(threads, [&](int64_t i, const Segment& segment) {
    partials[i] = kernels().read_mask(in, segment);
  });
  for (int64_t s = 0; s < in.batch.sequences; ++s) {
    for (int64_t i = segments.first(s); i < segments.first(s + 1); ++i) {
      lengths[s] += partials[i].at[kLength];
    }
  }
  return lengths;
}

// The weight of every sequence, rounded to the arithmetic's precision: the forward and the backward
// then compute the same gradients.
std::vector<double> sequence_weights(const KlPenaltyInputs& in,
                                     const std::vector<double>& lengths) {
  double total = 0;
  for (double length : lengths) total += denominator_term(in.reduction, length);
  std::vector<double> weights(lengths.size());
  for (size_t s = 0; s < lengths.size(); ++s) {
    const double weight =
        sequence_weight(in.reduction, lengths[s], total, in.is_normalized(), in.normalizer);
    weights[s] = in.is_double ? weight : static_cast<float>(weight);
  }
  return weights;
}

template <typename Acc>
void store(void* data, int64_t index, double value) {
  static_cast<Acc*>(data)[index] = static_cast<Acc>(value);
}

void add_to(Partial& sum, const Partial& part) {
  combine<Depth::kLimited>(sum, part);
  sum.last_kept = std::max(sum.last_kept, part.last_kept);
  sum.weighted += part.weighted;
  sum.bad_mask |= part.bad_mask;
  sum.bad_weights |= part.bad_weights;
}

template <typename Acc>
void finish_forward(const KlPenaltyInputs& in, const KlPenaltyForward& out,
                    const Segments& segments, const std::vector<Partial>& partials) {
  const int64_t sequences = in.batch.sequences;
  std::vector<double> lengths(sequences), sums(sequences);
  for (int64_t s = 0; s < sequences; ++s) {
    Partial sum;
    for (int64_t i = segments.first(s); i < segments.first(s + 1); ++i) add_to(sum, partials[i]);
    if (sum.bad_mask) throw std::runtime_error("mask must hold finite weights >= 0");
    if (sum.bad_weights) throw std::runtime_error("weights must be >= 0");
    lengths[s] = sum.at[kLength];
    sums[s] = in.is_weighted() ? sum.weighted : sum.at[kKl];
    for (int i = 0; out.statistics != nullptr && i < kStatistics; ++i) {
      store<Acc>(out.statistics, i * sequences + s, sum.at[i]);
    }
    if (out.scores.data != nullptr && sum.last_kept >= 0) {
      static_cast<Acc*>(out.result)[sum.last_kept] += static_cast<Acc>(read_element(out.scores, s));
    }
  }
  const std::vector<double> weights = sequence_weights(in, lengths);
  if (out.weights != nullptr) {
    for (int64_t s = 0; s < sequences; ++s) store<Acc>(out.weights, s, weights[s]);
  }
  if (in.reduction.result == Result::kToken) return;
  const bool is_scalar = in.reduction.result == Result::kScalar;
  double total = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    const double term = lengths[s] > 0 ? weights[s] * sums[s] : 0;
    if (!is_scalar) store<Acc>(out.result, s, in.coef * term);
    total += term;
  }
  if (is_scalar) store<Acc>(out.result, 0, in.coef * total);
}

}  // namespace

double read_element(const View& view, int64_t index) {
  return element_at(view.data, view.dtype, index * view.column_stride);
}

void kl_penalty_forward(const KlPenaltyInputs& in, const KlPenaltyForward& out,
                        const Threads& threads) {
  check_cu_seqlens(in.batch);
  const Segments segments(in.batch);
  SegmentTask task;
  task.inputs = &in;
  task.want_statistics = out.statistics != nullptr;
  task.want_last_kept = out.scores.data != nullptr;
  task.grad_logprobs = out.grad_logprobs;
  task.grad_ref_logprobs = out.grad_ref_logprobs;
  if (in.reduction.result == Result::kToken) {
    task.value = {out.result, in.is_double ? DType::kFloat64 : DType::kFloat32};
  }
  // The gradient of a mean needs the denominator first, so a mask is read twice.
  const bool want_gradient =
      out.grad_logprobs.data != nullptr || out.grad_ref_logprobs.data != nullptr;
  std::vector<double> weights;
  if (want_gradient) {
    weights = sequence_weights(in, read_lengths(in, segments, threads));
  }
  std::vector<Partial> partials(segments.count());
  segments.for_each(threads, [&](int64_t i, const Segment& segment) {
    SegmentTask own = task;
    if (want_gradient) own.grad_scale = in.coef * weights[segment.sequence];
    partials[i] = kernels().run_segment(own, segment);
  });
  in.is_double ? finish_forward<double>(in, out, segments, partials)
               : finish_forward<float>(in, out, segments, partials);
}

void kl_penalty_backward(const KlPenaltyInputs& in, const KlPenaltyBackward& out,
                         const Threads& threads) {
  check_cu_seqlens(in.batch);
  const Segments segments(in.batch);
  SegmentTask task;
  task.inputs = &in;
  task.grad_logprobs = out.grad_logprobs;
  task.grad_ref_logprobs = out.grad_ref_logprobs;
  std::vector<double> scales(in.batch.sequences, in.coef);
  if (in.reduction.result == Result::kToken) {
    task.grad_out = out.grad_out;
  } else {
    for (int64_t s = 0; s < in.batch.sequences; ++s) {
      const int64_t of = in.reduction.result == Result::kScalar ? 0 : s;
      scales[s] *= read_element(out.weights, s) * read_element(out.grad_out, of);
    }
  }
  segments.for_each(threads, [&](int64_t, const Segment& segment) {
    SegmentTask own = task;
    own.grad_scale = scales[segment.sequence];
    kernels().run_segment(own, segment);
  });
}

void token_weights(const KlPenaltyInputs& call, void* weights, const Threads& threads) {
  // The gradient of values that are all 0.
  const double zero = 0;  // in any dtype
  double result = 0;
  const DType dtype = call.is_double ? DType::kFloat64 : DType::kFloat32;
  KlPenaltyInputs in = call;
  in.logprobs = {&zero, dtype, 0, 0};
  KlPenaltyForward out;
  out.result = &result;
  out.grad_logprobs = {weights, dtype};
  kl_penalty_forward(in, out, threads);
}

void scale(const Output& x, int64_t n, double factor, const Threads& threads) {
  if (factor == 1) return;
  const int64_t parts = (n + kSegmentTokens - 1) / kSegmentTokens;
  const int64_t size = element_size(x.dtype);
  for_each(parts, n, threads, [&](int64_t i) {
    const Output part = {static_cast<char*>(x.data) + i * kSegmentTokens * size, x.dtype};
    kernels().scale(part, std::min(kSegmentTokens, n - i * kSegmentTokens), factor);
  });
}

}  // namespace klfast::cpu
