// The statistics of a sequence: klfast.KLStats.

#pragma once

namespace klfast {

// In the order of KLStats' fields.
enum Statistic { kKl, kLength, kK1, kK2, kK3, kMaxLogRatio, kClipped, kNonfinite, kStatistics };

}  // namespace klfast
