// Tensors and batches as raw pointers, sizes and strides. No torch.

#pragma once

#include <cstdint>

#include "math/host_device.h"

namespace klfast {

enum class DType : uint8_t {
  kFloat64,
  kFloat32,
  kBFloat16,
  kFloat16,
  kBool,
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64
};

KLFAST_HOST_DEVICE int64_t element_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
    case DType::kInt16:
      return 2;
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
      return 1;
  }
  return 0;
}

// Floating dtypes are the first of DType.
KLFAST_HOST_DEVICE bool holds_floats(DType dtype) { return dtype < DType::kBool; }

// An input of shape [rows, columns] with any strides, in elements. `data` is null if the input is
// absent. A packed input has one row.
struct View {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

// A contiguous output over tokens. `data` is null if the output is not wanted.
struct Output {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
};

// S sequences. Without cu_seqlens they are the rows of a padded [S, width] batch. With cu_seqlens,
// sequence s has the tokens [cu_seqlens[s], cu_seqlens[s + 1]) of a packed batch.
struct Batch {
  int64_t sequences = 0;
  int64_t width = 0;
  int64_t tokens = 0;
  const void* cu_seqlens = nullptr;
  bool cu_seqlens_is_int64 = false;

  KLFAST_HOST_DEVICE bool packed() const { return cu_seqlens != nullptr; }

  // The index of a sequence's first token among all tokens.
  KLFAST_HOST_DEVICE int64_t start(int64_t sequence) const {
    if (!packed()) return sequence * width;
    return cu_seqlens_is_int64 ? static_cast<const int64_t*>(cu_seqlens)[sequence]
                               : static_cast<const int32_t*>(cu_seqlens)[sequence];
  }

  KLFAST_HOST_DEVICE int64_t length(int64_t sequence) const {
    return packed() ? start(sequence + 1) - start(sequence) : width;
  }

  // The row and column of a token of a sequence in the inputs' views.
  KLFAST_HOST_DEVICE int64_t row(int64_t sequence) const { return packed() ? 0 : sequence; }
  KLFAST_HOST_DEVICE int64_t column(int64_t sequence, int64_t position) const {
    return packed() ? start(sequence) + position : position;
  }
};

}  // namespace klfast
