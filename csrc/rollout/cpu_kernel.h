// The kernels between sampler and trainer that are compiled per instruction set.

#pragma once

#include "device/cpu/segment.h"
#include "rollout/totals.h"

namespace klfast::cpu {

// Memory of a kernel, of which all kinds of objects are made.
struct alignas(64) CacheLine {
  char bytes[64];
};

// For the sums of 64 lanes twice, and for the few rows that a kernel has beyond those of totals.
inline constexpr int64_t kScratchLines = 32;

struct RolloutKernels {
  // Reads a segment, writes what is decided per token, and `totals`, rows_of_totals(rules) numbers.
  // False if the mask holds negative, NaN or infinite weights. `scratch` has kScratchLines for
  // every row of rows_of_totals(rules).
  bool (*run_segment)(const rollout::Call&, const Segment&, double* totals, CacheLine* scratch);
  // Writes what the sequence's totals decide.
  void (*fill_segment)(const rollout::Call&, const Segment&, const rollout::Decision&);
};

// The best kernels for this processor, or those that KLFAST_CPU names.
const RolloutKernels& rollout_kernels();

}  // namespace klfast::cpu
