// Converts tiles of any dtype and stride to the arithmetic's type and back. Kernels that are
// compiled once per instruction set include this file. Everything here is inlined into them.

#pragma once

#include <algorithm>

#include "tensors/convert.h"

namespace klfast {
namespace {

// Returns n elements from (row, column) on as Acc, followed by zeros up to `padded`. This is the
// input's own memory if that is contiguous Acc and needs no padding, and `buffer` otherwise. If Acc
// is BFloat16, only bf16 can be loaded and stored.
template <typename Acc>
KLFAST_HOST_DEVICE const Acc* load_tile(const View& view, int64_t row, int64_t column, int64_t n,
                                        int64_t padded, Acc* buffer) {
  const Acc* tile = buffer;
  visit_dtype(view.dtype, [&](auto zero) __attribute__((always_inline)) {
    using From = decltype(zero);
    const From* from =
        static_cast<const From*>(view.data) + row * view.row_stride + column * view.column_stride;
    if constexpr (std::is_same_v<From, Acc>) {
      if (view.column_stride == 1 && n == padded) {
        tile = from;
        return;
      }
    }
    if constexpr (std::is_same_v<From, Acc> || !std::is_same_v<Acc, BFloat16>) {
      if (view.column_stride == 1) {
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) buffer[i] = convert<Acc>(from[i]);
      } else {
        for (int64_t i = 0; i < n; ++i) buffer[i] = convert<Acc>(from[i * view.column_stride]);
      }
    }
    std::fill(buffer + n, buffer + padded, Acc{});
  });
  return tile;
}

// Returns the memory in which a kernel computes n elements of an output from `index` on. This is
// the output's own memory if it has the type Acc and needs no padding. Otherwise it is `buffer`,
// which store_tile() converts later.
template <typename Acc>
KLFAST_HOST_DEVICE Acc* output_tile(const Output& output, int64_t index, int64_t n, int64_t padded,
                                    Acc* buffer) {
  constexpr DType own = sizeof(Acc) == 8   ? DType::kFloat64
                        : sizeof(Acc) == 4 ? DType::kFloat32
                                           : DType::kBFloat16;
  const bool direct = output.data != nullptr && output.dtype == own && n == padded;
  return direct ? static_cast<Acc*>(output.data) + index : buffer;
}

template <typename Acc>
KLFAST_HOST_DEVICE void store_tile(const Output& output, int64_t index, int64_t n,
                                   const Acc* tile) {
  if (output.data == nullptr) return;
  visit_dtype(output.dtype, [&](auto zero) __attribute__((always_inline)) {
    using To = decltype(zero);
    if constexpr (is_floating<To> && (std::is_same_v<To, Acc> || !std::is_same_v<Acc, BFloat16>)) {
      To* to = static_cast<To*>(output.data) + index;
      if (static_cast<const void*>(to) == tile) return;
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) to[i] = convert<To>(tile[i]);
    }
  });
}

}  // namespace
}  // namespace klfast
