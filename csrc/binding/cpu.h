// The CPU as a device of the ops (penalty_ops.h, logits_ops.h).

#pragma once

#include "binding/logits_ops.h"
#include "binding/penalty_ops.h"
#include "logits/cpu.h"
#include "penalty/cpu.h"

namespace klfast::binding {

inline void run_parallel(int64_t n, const std::function<void(int64_t, int64_t)>& body) {
  torch::stable::parallel_for(0, n, 1, body);
}

inline cpu::Threads threads() {
  return {static_cast<int>(torch::stable::get_num_threads()), run_parallel};
}

// Reads coef and normalizer from tensors that hold them, and applies `negate` to coef.
inline KlPenaltyInputs resolve(KlPenaltyInputs in) {
  if (in.coef_tensor.data != nullptr) in.coef = cpu::read_element(in.coef_tensor, 0);
  if (in.normalizer_tensor.data != nullptr) {
    in.normalizer = cpu::read_element(in.normalizer_tensor, 0);
    KLFAST_CHECK(in.normalizer > 0, "normalizer must be > 0");
  }
  check_numbers(in);
  if (in.negate) in.coef = -in.coef;
  return in;
}

struct Cpu {
  static constexpr bool kGradientsReadWeights = false;
  static void forward(const KlPenaltyInputs& in, const KlPenaltyForward& out, const Device&) {
    cpu::kl_penalty_forward(resolve(in), out, threads());
  }
  static void backward(const KlPenaltyInputs& in, const KlPenaltyBackward& out, const Device&) {
    cpu::kl_penalty_backward(resolve(in), out, threads());
  }
  static void token_weights(const KlPenaltyInputs& in, void* weights, const Device&) {
    cpu::token_weights(resolve(in), weights, threads());
  }
  static void scale(const Output& x, int64_t n, const View& factor, const Device&) {
    cpu::scale(x, n, cpu::read_element(factor, 0), threads());
  }
};

struct CpuLogits {
  template <typename Call>
  static void run(const Call& call, const Device&) {
    cpu::run_rows(call, threads());
  }
};

}  // namespace klfast::binding
