// A warp's tokens of a segment, in inputs of any dtype, stride and alignment: which lane has which
// tokens, and loads of its chunks.

#pragma once

#include "device/cuda/load.h"
#include "device/cuda/segments.h"

namespace klfast::cuda {

// The tokens of a lane's chunk in a smooth segment. A chunk has 16 bytes.
template <typename T>
inline constexpr int kSmoothWidth = 16 / static_cast<int>(sizeof(typename Source<T>::Element));

__device__ __forceinline__ int64_t offset_of(const View& view, const Batch& batch,
                                             const Segment& segment) {
  // A packed input has no rows, unless it has one number for each sequence.
  const int64_t column = batch.packed() ? segment.start + segment.position : segment.position;
  return segment.sequence * view.row_stride + column * view.column_stride;
}

// True if an input is dense and its chunks of W elements are whole vectors.
template <typename T, int W>
__device__ __forceinline__ bool has_aligned_chunks(const View& view, int64_t offset) {
  const T* const first = static_cast<const T*>(view.data) + offset;
  return view.column_stride == 1 && reinterpret_cast<uintptr_t>(first) % Vectors<T, W>::kBytes == 0;
}

// The place of a lane in a segment.
struct Place {
  int position;  // of the lane's first token
  int end;       // of the warp's tokens
};

// Loads a chunk of any dtype and converts it.
template <bool kAnyDtype, typename Acc, int W>
__device__ __forceinline__ void load_converted(const View& view, int64_t offset, int size,
                                               const Place& at, Chunk<Acc, W>& values) {
  offset = opaque(offset);
  visit_dtype(view.dtype, [&](auto zero) {
    using From = decltype(zero);
    if constexpr (kAnyDtype || is_floating<From>) {
      const Row<From> row = {static_cast<const From*>(view.data) + offset, view.column_stride,
                             size};
      const Chunk<From, W> chunk = load_chunk<From, W, false>(row, at.position, at.end);
#pragma unroll
      for (int i = 0; i < W; ++i) values.element[i] = convert<Acc>(chunk.element[i]);
    }
  });
}

// Loads a chunk without conversion, so that all inputs are requested before the first is used. An
// input of AnyDtype is converted at once.
template <typename T, int W>
__device__ __forceinline__ Chunk<typename Source<T>::Element, W> fetch(const View& view,
                                                                       int64_t offset, int size,
                                                                       const Place& at) {
  if constexpr (std::is_same_v<T, typename Source<T>::Element>) {
    const Row<T> row = {static_cast<const T*>(view.data) + offset, view.column_stride, size};
    return load_chunk<T, W>(row, at.position, at.end);
  } else {
    Chunk<typename Source<T>::Element, W> chunk;
    load_converted<false>(view, offset, size, at, chunk);
    return chunk;
  }
}

// Loads the weights of a chunk: the mask, or ones without a mask, and zeros beyond the sequence's
// end.
template <typename Acc, int W>
__device__ __forceinline__ void load_weights(const View& mask, const int64_t& offset,
                                             const int& size, const Place& at,
                                             Chunk<Acc, W>& weights) {
  if (mask.data != nullptr) {
    return load_converted<true>(mask, offset, size, at, weights);
  }
#pragma unroll
  for (int i = 0; i < W; ++i) weights.element[i] = at.position + i < size ? Acc(1) : Acc(0);
}

// Element i of a chunk. Registers cannot be indexed at run time.
template <typename Acc, int W>
__device__ __forceinline__ Acc pick(const Chunk<Acc, W>& chunk, int i) {
  Acc picked = chunk.element[0];
#pragma unroll
  for (int j = 1; j < W; ++j) picked = i == j ? chunk.element[j] : picked;
  return picked;
}

template <typename Acc, int W>
__device__ __forceinline__ void replace(Chunk<Acc, W>& chunk, int i, Acc value) {
#pragma unroll
  for (int j = 0; j < W; ++j) chunk.element[j] = i == j ? value : chunk.element[j];
}

}  // namespace klfast::cuda
