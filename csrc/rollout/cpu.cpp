// rollout_correction of a batch on the CPU. One read gives totals per segment, which are added per
// sequence in the order of positions. If the totals decide weights or masks, a second pass fills
// them. A sequence's results do not depend on the number of threads or on other sequences.

#include "rollout/cpu.h"

#include <memory>
#include <vector>

#include "device/cpu/segments.h"
#include "rollout/cpu_kernel.h"
#include "rollout/totals.h"

namespace klfast::cpu {
namespace {

using rollout::Inputs;

// The totals of sequence `s`, from its segments' totals.
std::vector<double> totals_of(int64_t s, const Segments& segments, const double* partials,
                              int rows) {
  std::vector<double> totals(rows);
  for (int row = 0; row < rows; ++row) {
    const rollout::How how = rollout::how_of(row);
    totals[row] = rollout::empty_of(how);
    for (int64_t i = segments.first(s); i < segments.first(s + 1); ++i) {
      totals[row] = rollout::combine(how, totals[row], partials[i * rows + row]);
    }
  }
  return totals;
}

void store(const Inputs& in, void* table, int64_t index, double value) {
  if (in.is_double) {
    static_cast<double*>(table)[index] = value;
  } else {
    static_cast<float*>(table)[index] = static_cast<float>(value);
  }
}

}  // namespace

void rollout_correction(const rollout::Call& call, const Threads& threads) {
  const Inputs& in = call.in;
  check_cu_seqlens(in.batch);
  const Segments segments(in.batch);
  const int rows = rollout::rows_of_totals(in.options.rules_count);
  const int64_t sequences = in.batch.sequences;
  std::vector<double> partials(segments.count() * rows);
  std::vector<char> good(segments.count());
  segments.for_each(threads, [&](int64_t i, const Segment& segment) {
    const std::unique_ptr<CacheLine[]> scratch(new CacheLine[rows * kScratchLines]);
    good[i] =
        rollout_kernels().run_segment(call, segment, partials.data() + i * rows, scratch.get());
  });
  for (const char of_segment : good) {
    if (!of_segment) throw std::runtime_error("mask must hold finite weights >= 0");
  }
  std::vector<rollout::Decision> decisions(sequences);
  for (int64_t s = 0; s < sequences; ++s) {
    const std::vector<double> totals = totals_of(s, segments, partials.data(), rows);
    decisions[s] = rollout::judge(in.options, totals.data());
    rollout::store_statistics(in.options, totals.data(), decisions[s], [&](int row, double value) {
      store(in, call.out.table, row * sequences + s, value);
    });
  }
  if (!in.options.weighs_sequences() && !in.options.judges_sequences()) return;
  segments.for_each(threads, [&](int64_t, const Segment& segment) {
    rollout_kernels().fill_segment(call, segment, decisions[segment.sequence]);
  });
}

}  // namespace klfast::cpu
