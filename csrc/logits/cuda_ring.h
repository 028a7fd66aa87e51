// A pair of rows that stays in shared memory from its only read on.
//
// A block has its part of both rows there. A warp has a slot for each of its rounds, which two bulk
// copies fill. A warp waits for its own slots only. When it has written the gradient of a slot, it
// requests the slot for its cluster's next row. So copies are under way while a row's sums are
// exchanged. Sums have the same order as for rows in memory (ReadRows).

#pragma once

#include "device/cuda/bulk_copy.h"
#include "logits/cuda_gradients.h"

namespace klfast::cuda {

inline constexpr int kRingRounds = kMostPartBytes / (2 * kPairThreads * sizeof(Raw));

struct alignas(16) Ring {
  Raw slots[2][kRingRounds][kPairThreads];
  CopyBarrier barriers[kRingRounds][kPairThreads / kWarp];
};

// The addresses of a warp's first chunks in a row, or null if there is no row.
struct RingSource {
  const char* first[2];
};

// A part of a row in the ring.
template <typename T>
struct RingRows {
  using Type = T;
  static constexpr int kOf = 2;
  static constexpr int kOfWarp = kWarp * kChunk<T>;
  Ring& ring;
  Rounds rounds;
  unsigned warp;        // as a number that the compiler knows to be equal in all lanes
  unsigned parity = 0;  // of the slots' phases

  __device__ __forceinline__ RingRows(Ring& ring, int size)
      : ring(ring),
        rounds(rounds_of<T>(size)),
        warp(__shfl_sync(0xffffffffu, threadIdx.x / kWarp, 0)) {}

  __device__ __forceinline__ CopyBarrier* barrier(int round) const {
    return &ring.barriers[round][warp];
  }
  __device__ __forceinline__ Fetch<2> load_whole(int round) const {
    wait_for_copies(barrier(round), parity);
    return load_again(round);
  }
  // The same after load_whole().
  __device__ __forceinline__ Fetch<2> load_again(int round) const {
    Fetch<2> fetch;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      fetch.of[m] = math::bit_cast<Raw>(
          *reinterpret_cast<const uint4*>(&ring.slots[m][round][in_register(threadIdx.x)]));
    }
    return fetch;
  }
  __device__ __forceinline__ Fetch<2> load(int round) const {
    Fetch<2> fetch = load_whole(round);
    if (round < rounds.whole || start_of_lane<T>() < rounds.tail) return fetch;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      fetch.of[0].element[i] = fetch.of[1].element[i] = 0x10001u * minus_infinity<T>().bits;
    }
    return fetch;
  }

  // Requests the slot of a round, with the words that the round has. All lanes of the warp have
  // read the slot.
  __device__ __forceinline__ void request(int round, int words, const RingSource& from) const {
    if (from.first[0] == nullptr) return;
    __syncwarp();
    if (!is_elected()) return;
    const unsigned bytes = static_cast<unsigned>(words) * sizeof(T);
    expect(barrier(round), 2 * bytes);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      start_copy(&ring.slots[m][round][warp * kWarp], chunk_in_round(from.first[m], round), bytes,
                 barrier(round));
    }
  }
  __device__ __forceinline__ void request_all(int first, const RingSource& from) const {
#pragma unroll 1
    for (int round = first; round < rounds.some; ++round) {
      request(round, round < rounds.whole ? kOfWarp : rounds.tail, from);
    }
  }
};

// Writes the gradients of a part in the ring (write_gradients), and requests its slots from `next`.
// Rounds that are far or not whole are read from memory again.
template <typename T, typename PartAt, typename FormulaOf>
__device__ __forceinline__ void write_ring_gradients(const RingRows<T>& rows, const PartAt& part_at,
                                                     const FormulaOf& formula_of,
                                                     const RingSource& next) {
  unsigned rest = bits_below(rows.rounds.some);
  const auto part = part_at(opaque(0));
  const Smooth<T, 2> smooth(part, 0);
  const auto formula = formula_of();
#pragma unroll 1
  for (int round = 0; round < rows.rounds.whole; ++round) {
    const auto words = convert_words<T>(rows.load_again(round));
    const auto near = formula.near_of(words, true);
    rows.request(round, RingRows<T>::kOfWarp, next);
    if (!near.are_near) continue;
    rest ^= 1u << round;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if (!smooth.writes[m]) continue;
      Chunk<AccOf<T>, kChunk<T>> gradient;
      formula.write_near(words, near, m, gradient);
      smooth.store(round, m, raw_of<T>(gradient));
    }
  }
  rows.request_all(rows.rounds.whole, next);
  if (rest != 0) write_rounds<T, Memory::kReadOnly>(part_at(opaque(0)), 0, rest, formula_of());
}

// True if all rows start at vectors of 16 bytes.
template <typename T>
bool is_in_vectors(const LogitsShape& shape, const Logits& logits) {
  const auto is_whole = [](int64_t stride) { return stride % kChunk<T> == 0; };
  const bool is_aligned = reinterpret_cast<uintptr_t>(logits.data) % sizeof(Raw) == 0;
  return logits.word_stride == 1 && is_aligned && is_whole(logits.inner_stride) &&
         (shape.outer == 1 || is_whole(logits.outer_stride));
}

}  // namespace klfast::cuda
