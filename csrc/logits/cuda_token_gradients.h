// Gradients of a part of a row of one model, except for the gradients of the row's picks. Smooth
// tiles take a path of their own: it loads the next tile while it writes one, and has no code for a
// row's origin. All tiles of a row with an origin, and tiles that are not aligned, are written step
// by step.

#pragma once

#include "logits/cuda_gradients.h"
#include "logits/cuda_tiles.h"

namespace klfast::cuda {

// The tiles of a part. The part starts `offset` words after its first tile, so that chunks start at
// aligned vectors of the output.
template <typename T>
struct GradientTiles {
  int all;
  int first_smooth;  // smooth tiles: their chunks are aligned vectors of logits and gradients
  int end_smooth;
  const char* from;  // the lane's first chunk
  char* to;

  __device__ __forceinline__ GradientTiles(const GradientPart<T, 1>& part, int offset) {
    const int words = offset + part.size;
    const int64_t beyond = static_cast<int>(threadIdx.x % kWarp) * kChunk<T> - offset;
    from = part.from[0] + beyond * static_cast<int>(sizeof(T));
    to = static_cast<char*>(part.to[0].data) + (part.index + beyond) * static_cast<int>(sizeof(T));
    const bool is_smooth =
        part.frame == nullptr && part.stride[0] == 1 && is_aligned(from) && is_aligned(to);
    all = (words + kTileWords<T> - 1) / kTileWords<T>;
    first_smooth = offset > 0 ? 1 : 0;
    end_smooth = is_smooth ? words / kTileWords<T> : 0;
  }

  __device__ __forceinline__ bool is_smooth(int tile) const {
    return tile >= first_smooth && tile < end_smooth;
  }
  __device__ __forceinline__ Raw load(int tile, int step) const {
    const char* const own = from + static_cast<int64_t>(tile) * (kTile * kStepBytes);
    return load_aligned<uint32_t, 4, Memory::kReadWrite>(
        reinterpret_cast<const uint32_t*>(own + step * kStepBytes));
  }
  __device__ __forceinline__ void store(int tile, int step, const Raw& raw) const {
    char* const own = to + static_cast<int64_t>(tile) * (kTile * kStepBytes);
    __stcs(reinterpret_cast<uint4*>(own + step * kStepBytes), math::bit_cast<uint4>(raw));
  }
};

template <typename T, typename Formula>
__device__ __forceinline__ Chunk<AccOf<T>, kChunk<T>> gradient_of_chunk(const Raw& raw,
                                                                        const Formula& formula) {
  Chunk<AccOf<T>, kChunk<T>> gradient;
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) {
    gradient.element[i] = formula(convert<AccOf<T>>(element_of<T>(raw, i)));
  }
  return gradient;
}

// Writes the gradients of one step of any tile.
template <typename T, typename Formula>
__device__ __forceinline__ void write_any_step(const GradientPart<T, 1>& part, int offset, int step,
                                               const Formula& formula) {
  using Acc = AccOf<T>;
  const int begin = step * kStepWords<T>;
  const int rest = offset + part.size - begin;
  if (rest <= 0) return;
  const int own = static_cast<int>(opaque(threadIdx.x % kWarp * kChunk<T>));  // not hoisted
  const Stretch at = {own, 0, kStepWords<T>, step == 0 ? offset : 0, least(rest, kStepWords<T>)};
  const int64_t base = opaque(begin - offset);
  const char* const from = part.from[0] + base * part.stride[0] * static_cast<int>(sizeof(T));
  const Raw raw = load_raw<T, Memory::kReadWrite>(from, part.dtype[0], part.stride[0], at);
  const bool has_origin = part.frame != nullptr;
  const Acc unit = has_origin ? part.frame->unit : Acc(1);
  const Acc origin = has_origin ? part.frame->origin[0] : Acc(0);
  auto gradient = gradient_of_chunk<T>(
      raw, [&](Acc x) { return formula(divergences::placed(x, unit, origin)); });
  char* const to =
      static_cast<char*>(part.to[0].data) + (part.index + base) * static_cast<int>(sizeof(T));
  stream_raw<T>(to, part.to[0].dtype, at, raw_of<T>(gradient));
}

// Writes formula(x) for each placed logit x of the part. The output may be the logits' own memory.
template <typename T, typename Formula>
__device__ __forceinline__ void write_token_gradients(const GradientPart<T, 1>& part,
                                                      const Formula& formula) {
  const int offset = offset_in_memory<T>(part.to[0], part.index);
  const GradientTiles<T> tiles(part, offset);
  const int apart = static_cast<int>(blockDim.x) / kWarp;
  Raw next[kTile];
  bool is_loaded = false;
#pragma unroll 1
  for (int tile = static_cast<int>(threadIdx.x) / kWarp; tile < tiles.all; tile += apart) {
    if (!tiles.is_smooth(tile)) {
      is_loaded = false;
#pragma unroll 1
      for (int k = 0; k < kTile; ++k) write_any_step(part, offset, tile * kTile + k, formula);
      continue;
    }
    if (!is_loaded) {
#pragma unroll
      for (int k = 0; k < kTile; ++k) next[k] = tiles.load(tile, k);
    }
    is_loaded = tiles.is_smooth(tile + apart);
#pragma unroll
    for (int k = 0; k < kTile; ++k) {
      const Raw raw = raw_of<T>(gradient_of_chunk<T>(next[k], formula));
      if (is_loaded) next[k] = tiles.load(tile + apart, k);
      tiles.store(tile, k, raw);
    }
  }
}

}  // namespace klfast::cuda
