// Prefetching. Included by kernels that are compiled once per instruction set.

#pragma once

#include "device/cpu/lanes.h"
#include "tensors/view.h"

namespace klfast::cpu {
namespace {

// The memory of the inputs' next tile, fetched group by group during the arithmetic on this one.
// Hardware prefetching alone does not overlap the two.
struct Ahead {
  static constexpr int kMost = 4;
  const char* memory[kMost] = {};
  int64_t bytes_per_group[kMost] = {};
  int inputs = 0;

  // Adds an input from (row, column) on, if its columns are contiguous.
  void add(const View& view, int64_t row, int64_t column) {
    if (view.data == nullptr || view.column_stride != 1) return;
    const int64_t size = element_size(view.dtype);
    memory[inputs] = static_cast<const char*>(view.data) + (row * view.row_stride + column) * size;
    bytes_per_group[inputs++] = kLanes * size;
  }

  KLFAST_HOST_DEVICE void fetch(int64_t group) const {
    constexpr int64_t cache_line = 64;
    for (int input = 0; input < inputs; ++input) {
      const char* begin = memory[input] + group * bytes_per_group[input];
      for (int64_t i = 0; i < bytes_per_group[input]; i += cache_line) {
        __builtin_prefetch(begin + i);
      }
    }
  }
};

}  // namespace
}  // namespace klfast::cpu
