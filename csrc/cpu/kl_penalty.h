// The KL penalty on the CPU: forward and backward over a batch. No torch.

#pragma once

#include <cstdint>
#include <functional>

#include "../kl_penalty.h"

namespace klfast::cpu {

// How to run body(begin, end) over parts of [0, n) on several threads.
struct Threads {
  int count;
  void (*run)(int64_t n, const std::function<void(int64_t, int64_t)>& body);
};

// Both throw std::runtime_error on bad cu_seqlens before they read by them; the forward also on a
// bad mask, after its read.
void kl_penalty_forward(const KlPenaltyInputs&, const KlPenaltyForward&, const Threads&);
void kl_penalty_backward(const KlPenaltyInputs&, const KlPenaltyBackward&, const Threads&);

// x *= factor over n elements; returns at once if factor is 1.
void scale(const Output& x, int64_t n, double factor, const Threads&);

// An element of a one-row view.
double read_element(const View&, int64_t index);

const char* instruction_set();

}  // namespace klfast::cpu
