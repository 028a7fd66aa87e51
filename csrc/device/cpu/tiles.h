// Conversion of tiles of any dtype and stride to and from the arithmetic's type. Included by
// kernels that are compiled once per instruction set: everything here is inlined into them.

#pragma once

#include <algorithm>

#include "tensors/convert.h"

namespace klfast {
namespace {

// n elements from (row, column) on as Acc, followed by zeros up to `padded`: the input's own memory
// if it is Acc and needs no padding, else `buffer`. As BFloat16 only bf16 is loaded and stored.
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

// The memory in which to compute n elements of an output from `index` on: the output's own, or
// `buffer`, which store_tile then converts.
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
