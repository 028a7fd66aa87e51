// The part of a sequence that one call of a kernel reads.

#pragma once

#include <cstdint>

namespace klfast::cpu {

// The most tokens of a segment. The order of a long sequence's sum depends on this number.
inline constexpr int64_t kSegmentTokens = 16384;

// Tokens [position, position + length) of a sequence, at most kSegmentTokens.
struct Segment {
  int64_t sequence;
  int64_t position;
  int64_t length;
};

}  // namespace klfast::cpu
