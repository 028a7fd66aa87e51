// As much of CUDA as the kernels use, on the host: every thread of a block is a fiber, run in a
// random order between the points where threads wait for each other. So the kernels' own source is
// tested without a GPU: indices, barriers, shuffles, the order of sums. Blocks run one after the
// other in a random order. A barrier or warp function that some thread never reaches ends the
// process.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

struct Dim3 {
  unsigned x = 1;
};

namespace cuda_emulator {

constexpr int kWarp = 32;
constexpr size_t kStack = 256 << 10;

struct Barrier {
  int arrived = 0;
  uint64_t generation = 0;
};

// Where a fiber or the scheduler goes on. ucontext makes a fiber's stack; from then on jumps are
// ten times faster, as they leave the signal mask alone.
struct Resume {
  jmp_buf at;
};

struct Block {
  Resume scheduler_resume;
  std::vector<ucontext_t> fibers;
  std::vector<Resume> fiber_resume;
  std::vector<bool> started;
  std::vector<std::unique_ptr<char[]>> stacks;
  std::vector<bool> done;
  std::vector<Barrier> warps;
  Barrier block;
  std::vector<uint64_t> exchanged[2];  // a word of every thread, in turns
  std::vector<uint8_t> turn;
  std::function<void()> body;
  bool progressed = false;
  int threads = 0;
};

inline Block& block() {
  static Block instance;
  return instance;
}
inline Dim3 thread_index, block_index, block_size, grid_size;

inline void yield() {
  Block& b = block();
  if (_setjmp(b.fiber_resume[thread_index.x].at) == 0) _longjmp(b.scheduler_resume.at, 1);
}

inline void wait(Barrier& barrier, int count) {
  const uint64_t generation = barrier.generation;
  block().progressed = true;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) yield();
}

inline void wait_for_block() { wait(block().block, block().threads); }
inline void wait_for_warp() { wait(block().warps[thread_index.x / kWarp], kWarp); }

// The words of a warp's lanes, after each has left its own. Nobody writes to them again before all
// have read: that needs the lanes to meet once more, over the other set of words.
inline const uint64_t* exchange(uint64_t word) {
  Block& b = block();
  std::vector<uint64_t>& words = b.exchanged[b.turn[thread_index.x] ^= 1];
  words[thread_index.x] = word;
  wait_for_warp();
  return &words[thread_index.x / kWarp * kWarp];
}

template <typename T>
T value_of_lane(T value, int lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  word = exchange(word)[lane];
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

inline unsigned ballot(bool vote) {
  const uint64_t* words = exchange(vote);
  unsigned votes = 0;
  for (int lane = 0; lane < kWarp; ++lane) votes |= static_cast<unsigned>(words[lane]) << lane;
  return votes;
}

inline void run_fiber() {
  Block& b = block();
  b.body();
  b.done[thread_index.x] = true;
  b.progressed = true;
  _longjmp(b.scheduler_resume.at, 1);
}

// Lets a fiber run until it waits or ends.
inline void resume(unsigned fiber) {
  Block& b = block();
  thread_index.x = fiber;
  if (_setjmp(b.scheduler_resume.at) != 0) return;
  if (b.started[fiber]) _longjmp(b.fiber_resume[fiber].at, 1);
  b.started[fiber] = true;
  setcontext(&b.fibers[fiber]);
}

inline void run_block(int threads, std::mt19937& random) {
  Block& b = block();
  b.threads = threads;
  b.fibers.resize(threads);
  b.done.assign(threads, false);
  b.warps.assign(threads / kWarp, Barrier());
  b.block = Barrier();
  b.fiber_resume.resize(threads);
  b.started.assign(threads, false);
  b.turn.assign(threads, 0);
  for (auto& words : b.exchanged) words.assign(threads, 0);
  while (static_cast<int>(b.stacks.size()) < threads) {
    b.stacks.emplace_back(new char[kStack]);
  }
  std::vector<int> order(threads);
  for (int i = 0; i < threads; ++i) {
    order[i] = i;
    getcontext(&b.fibers[i]);
    b.fibers[i].uc_stack.ss_sp = b.stacks[i].get();
    b.fibers[i].uc_stack.ss_size = kStack;
    b.fibers[i].uc_link = nullptr;
    makecontext(&b.fibers[i], run_fiber, 0);
  }
  for (bool running = true; running;) {
    running = false;
    b.progressed = false;
    std::shuffle(order.begin(), order.end(), random);
    for (int i : order) {
      if (b.done[i]) continue;
      resume(i);
      running = true;
    }
    if (running && !b.progressed) {
      std::fprintf(stderr, "emulated CUDA: threads wait for others that never come\n");
      std::abort();
    }
  }
}

inline std::mutex device;  // runs one kernel at a time
inline std::mt19937 device_order(1);

template <typename Kernel, typename... Arguments>
void launch(Kernel kernel, unsigned blocks, int threads, const Arguments&... arguments) {
  const std::lock_guard<std::mutex> lock(device);
  grid_size.x = blocks;
  block_size.x = threads;
  block().body = [&] { kernel(arguments...); };
  std::vector<unsigned> order(blocks);
  for (unsigned i = 0; i < blocks; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), device_order);
  for (unsigned i : order) {
    block_index.x = i;
    run_block(threads, device_order);
  }
}

}  // namespace cuda_emulator

#define threadIdx cuda_emulator::thread_index
#define blockIdx cuda_emulator::block_index
#define gridDim cuda_emulator::grid_size

#define KLFAST_LAUNCH(kernel, blocks, threads, stream, ...) \
  cuda_emulator::launch(kernel, blocks, threads, __VA_ARGS__)

inline void __syncthreads() { cuda_emulator::wait_for_block(); }
inline void __syncwarp() { cuda_emulator::wait_for_warp(); }
inline void __threadfence() {}
inline unsigned __ballot_sync(unsigned, bool vote) { return cuda_emulator::ballot(vote); }
inline bool __any_sync(unsigned, bool vote) { return cuda_emulator::ballot(vote) != 0; }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = threadIdx.x % cuda_emulator::kWarp;
  return cuda_emulator::value_of_lane(value, lane ^ mask);
}
inline int __clz(unsigned value) { return value == 0 ? 32 : __builtin_clz(value); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, unsigned shift) {
  return static_cast<uint32_t>(((static_cast<uint64_t>(high) << 32) | low) >> (shift % 32));
}
// Like the instructions they stand for, these want aligned addresses.
template <typename T>
T __ldg(const T* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(T) != 0) std::abort();
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return __ldg(from);
}
template <typename T>
void __stwb(T* to, T value) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(T) != 0) std::abort();
  *to = value;
}
inline unsigned atomicAdd(unsigned* address, unsigned value) {
  const unsigned before = *address;
  *address += value;
  return before;
}

using cudaStream_t = void*;
using cudaError_t = int;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
constexpr cudaError_t cudaSuccess = 0;
inline const cudaStream_t cudaStreamPerThread = reinterpret_cast<void*>(2);
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*) {
  return cudaSuccess;
}
template <typename T>
cudaError_t cudaGetSymbolAddress(void** address, T& symbol) {
  *address = &symbol;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t) {
  std::memset(to, value, size);
  return cudaSuccess;
}
