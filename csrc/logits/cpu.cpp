// Rows of logits on several threads. One thread reads a whole row, so the row's sums do not depend
// on the number of threads.

#include "logits/cpu.h"

#include <atomic>
#include <stdexcept>
#include <vector>

#include "logits/cpu_kernel.h"

namespace klfast::cpu {
namespace {

template <typename Call>
void backward(const Call& call, const RowInputs& in, const Threads& threads,
              void (*kernel)(const Call&, int64_t)) {
  const int64_t rows = in.shape.rows();
  for_each(rows, rows * in.shape.words, threads, [&](int64_t row) { kernel(call, row); });
}

template <typename Kernel>
void forward(const RowInputs& in, const Threads& threads, const Kernel& kernel) {
  const int64_t rows = in.shape.rows();
  std::atomic<bool> all_words{true};
  for_each(rows, rows * in.shape.words, threads, [&](int64_t row) {
    if (!kernel(row)) all_words = false;
  });
  if (!all_words)
    throw std::runtime_error("token_ids must be words of the vocabulary, and temperature > 0");
}

// This thread's memory for the picks of a row.
PickMemory pick_memory(const RowInputs& in) {
  thread_local std::vector<PickMemory::Word> words;
  thread_local std::vector<int64_t> of_tile;
  words.resize(in.picks);
  of_tile.resize(in.shape.words / kTileWords + 1);
  return {words.data(), of_tile.data()};
}

}  // namespace

void run_rows(const TokenLogprobsForward& call, const Threads& threads) {
  forward(call.in, threads, [&](int64_t row) {
    return logits_kernels().token_logprobs_forward(call, row, pick_memory(call.in));
  });
}

void run_rows(const TokenLogprobsBackward& call, const Threads& threads) {
  backward(call, call.in, threads, logits_kernels().token_logprobs_backward);
}

void run_rows(const DivergenceForward& call, const Threads& threads) {
  forward(call.in.rows, threads,
          [&](int64_t row) { return logits_kernels().divergence_forward(call, row); });
}

void run_rows(const DivergenceBackward& call, const Threads& threads) {
  backward(call, call.in.rows, threads, logits_kernels().divergence_backward);
}

}  // namespace klfast::cpu
