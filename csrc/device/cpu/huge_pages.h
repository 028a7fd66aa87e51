// Large pages for new memory.

#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace klfast::cpu {

// Asks the system for large pages, for memory that nothing has touched yet. With pages of 4 KiB,
// the first touch of a gradient of 262 MB takes three times as long as its arithmetic. A refusal
// does no harm.
inline void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t kOwnMapping = 32 << 20;  // smaller arrays may share a mapping of malloc's
  constexpr uintptr_t kPage = 2 << 20;
  if (bytes <= kOwnMapping) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace klfast::cpu
