// The part of a sequence that one kernel reads.

#pragma once

#include <cstdint>

namespace klfast::cpu {

// Tokens of a segment at most. The order of a long sequence's sum depends on it.
inline constexpr int64_t kSegmentTokens = 16384;

// Tokens [position, position + length) of a sequence, kSegmentTokens at most.
struct Segment {
  int64_t sequence;
  int64_t position;
  int64_t length;
};

}  // namespace klfast::cpu
