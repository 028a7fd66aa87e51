// Prefetching. Kernels that are compiled once per instruction set include this file.

#pragma once

#include "device/cpu/lanes.h"
#include "tensors/view.h"

namespace klfast::cpu {
namespace {

constexpr int64_t kCacheLine = 64;

// Prefetches a group.
template <typename T>
KLFAST_HOST_DEVICE void fetch_group(const T* group) {
  fetch<sizeof(T[kLanes])>(group);
}

// Prefetches the memory of the next tile, group by group, during the arithmetic on this tile. For
// inputs, hardware prefetching alone does not overlap loading and arithmetic. For outputs, each
// store would otherwise wait for its cache line. A gradient pass without this prefetch of its
// outputs took 1.6 times as long.
struct Ahead {
  static constexpr int kMost = 7;
  const char* memory[kMost] = {};
  int64_t lines_per_group[kMost] = {};
  int count = 0;

  // Adds an input that starts at (row, column), if its columns are contiguous.
  void add(const View& view, int64_t row, int64_t column) {
    if (view.column_stride == 1) add(view.data, view.dtype, row * view.row_stride + column);
  }

  // Adds an output that starts at `index`.
  void add(const Output& output, int64_t index) { add(output.data, output.dtype, index); }

  KLFAST_HOST_DEVICE void fetch(int64_t group) const {
    for (int i = 0; i < count; ++i) {
      const int64_t lines = lines_per_group[i];
      const char* line = memory[i] + group * lines * kCacheLine;
      for (int64_t n = 0; n < lines; ++n) __builtin_prefetch(line + n * kCacheLine);
    }
  }

 private:
  void add(const void* data, DType dtype, int64_t element) {
    if (data == nullptr) return;
    const int64_t size = element_size(dtype);
    static_assert(kLanes % kCacheLine == 0);
    memory[count] = static_cast<const char*>(data) + element * size;
    lines_per_group[count++] = kLanes * size / kCacheLine;
  }
};

}  // namespace
}  // namespace klfast::cpu
