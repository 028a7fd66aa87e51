// The kernels over logits that are compiled per instruction set, each for one row.

#pragma once

#include "logits/call.h"

namespace klfast::cpu {

// The words that are converted at a time. Buffers of a tile stay in the first-level cache.
inline constexpr int64_t kTileWords = 1024;

// A thread's memory for the picks of a row. The caller owns it: a kernel that allocates may throw,
// and the code for this has symbols that the copies of a kernel file would share.
struct PickMemory {
  struct Word {
    int64_t index;
    int64_t before;  // the place of the word of the same tile that was added before, or -1
  };
  Word* words;       // as many as a row has picks
  int64_t* of_tile;  // per tile, and one more, the place of the word that was added last, or -1
};

struct LogitsKernels {
  // Returns false if a token id of the row is no word.
  bool (*token_logprobs_forward)(const TokenLogprobsForward&, int64_t row, const PickMemory&);
  void (*token_logprobs_backward)(const TokenLogprobsBackward&, int64_t row);
  bool (*divergence_forward)(const DivergenceForward&, int64_t row);
  void (*divergence_backward)(const DivergenceBackward&, int64_t row);
};

// The best kernels for this processor, or those that KLFAST_CPU names.
const LogitsKernels& logits_kernels();

}  // namespace klfast::cpu
