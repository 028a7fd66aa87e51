// The kernels of rollout_correction. They are compiled once per instruction set.

#pragma once

#include "device/cpu/segment.h"
#include "rollout/totals.h"

namespace klfast::cpu {

// Memory in which a kernel places objects of several types.
struct alignas(64) CacheLine {
  char bytes[64];
};

// A row needs this many lines: the sums of 64 lanes twice, and a share of the few rows that a
// kernel has besides the totals.
inline constexpr int64_t kScratchLines = 32;

struct RolloutKernels {
  // Reads a segment, and writes the results that each token decides alone. Writes
  // rows_of_totals(rules) numbers to `totals`. Returns false if the mask holds negative, NaN or
  // infinite weights. `scratch` has kScratchLines for each of rows_of_totals(rules) rows.
  bool (*run_segment)(const rollout::Call&, const Segment&, double* totals, CacheLine* scratch);
  // Writes the results that the sequence's totals decide.
  void (*fill_segment)(const rollout::Call&, const Segment&, const rollout::Decision&);
};

// The best kernels for this processor, or those that KLFAST_CPU names.
const RolloutKernels& rollout_kernels();

}  // namespace klfast::cpu
