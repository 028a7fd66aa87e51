// The segments of a batch, and how threads share them. A sequence's segments do not depend on other
// sequences or on the number of threads.

#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "device/cpu/parallel.h"
#include "device/cpu/segment.h"
#include "tensors/view.h"

namespace klfast::cpu {

inline int64_t segments_of(int64_t length) {
  return (length + kSegmentTokens - 1) / kSegmentTokens;
}

// The segments of a batch, numbered in the order of sequences and positions. Threads share them in
// parts, which have about equally many tokens, however long the sequences are.
class Segments {
 public:
  explicit Segments(const Batch& batch) : batch_(batch), parts_{0} {
    if (batch.packed()) first_.resize(batch.sequences + 1, 0);
    per_sequence_ = segments_of(batch.width);
    const int64_t parts = parts_of(batch.tokens), of_part = (batch.tokens + parts - 1) / parts;
    int64_t tokens = 0;  // of the part that is being filled
    for (int64_t s = 0; s < batch.sequences; ++s) {
      const int64_t length = batch.length(s), segments = segments_of(length);
      if (batch.packed()) first_[s + 1] = first_[s] + segments;
      for (int64_t i = 0; i < segments; ++i) {
        tokens += length_of(length, i);
        if (tokens < of_part) continue;
        parts_.push_back(first(s) + i + 1);
        tokens = 0;
      }
    }
    if (parts_.back() < count()) parts_.push_back(count());
  }

  int64_t count() const { return first(batch_.sequences); }

  int64_t first(int64_t sequence) const {
    return batch_.packed() ? first_[sequence] : sequence * per_sequence_;
  }

  Segment operator[](int64_t i) const {
    const int64_t sequence =
        batch_.packed() ? std::upper_bound(first_.begin(), first_.end(), i) - first_.begin() - 1
                        : i / per_sequence_;
    const int64_t index = i - first(sequence);
    return {sequence, index * kSegmentTokens, length_of(batch_.length(sequence), index)};
  }

  // Runs body(i, segment i) for every segment.
  template <typename Body>
  void for_each(const Threads& threads, const Body& body) const {
    for_each_part(static_cast<int64_t>(parts_.size()) - 1, threads, [&](int64_t part) {
      for (int64_t i = parts_[part]; i < parts_[part + 1]; ++i) body(i, (*this)[i]);
    });
  }

 private:
  const Batch& batch_;
  int64_t per_sequence_ = 0;
  std::vector<int64_t> first_;
  std::vector<int64_t> parts_;  // each part's first segment, then the number of segments

  static int64_t length_of(int64_t sequence_length, int64_t index) {
    return std::min(kSegmentTokens, sequence_length - index * kSegmentTokens);
  }
};

inline void check_cu_seqlens(const Batch& batch) {
  if (!batch.packed()) return;
  bool good = batch.start(0) == 0 && batch.start(batch.sequences) == batch.tokens;
  for (int64_t s = 0; s < batch.sequences; ++s) good = good && batch.length(s) >= 0;
  if (!good) throw std::runtime_error("cu_seqlens must rise from 0 to the number of tokens");
}

}  // namespace klfast::cpu
