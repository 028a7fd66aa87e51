// This header emulates the part of CUDA that the kernels use on the host. Every thread of a block
// is a fiber. Fibers run in a random order between the points where threads wait for each other. So
// the kernels' own source is tested without a GPU: indices, barriers, shuffles, the order of sums.
// The blocks of a cluster run together, and clusters run one after the other in a random order. The
// process ends if some thread never reaches a barrier or a warp function, or if an access to shared
// memory is invalid.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned x) : x(x) {}
};

namespace cuda_emulator {

constexpr int kWarp = 32;
constexpr size_t kStack = 256 << 10;

struct Barrier {
  int arrived = 0;
  uint64_t generation = 0;
};

// The point where a fiber or the scheduler continues. ucontext makes a fiber's stack. After that,
// jumps are ten times faster, because they leave the signal mask alone.
struct Resume {
  jmp_buf at;
};

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "emulated CUDA: %s\n", why);
  std::abort();
}

// The shared memory of a block. It starts as NaN and ends in guard bytes, which must not change.
struct SharedMemory {
  static constexpr size_t kGuard = 64;
  std::vector<char> bytes;
  size_t size = 0;

  void reset(size_t new_size) {
    size = new_size;
    bytes.assign(size + kGuard, static_cast<char>(0xff));
  }
  void check() const {
    for (size_t i = size; i < bytes.size(); ++i) {
      if (bytes[i] != static_cast<char>(0xff)) fail("a block wrote beyond its shared memory");
    }
  }
};

struct Block {
  unsigned index = 0;  // in the grid
  SharedMemory shared;
  std::vector<ucontext_t> fibers;
  std::vector<Resume> fiber_resume;
  std::vector<bool> started;
  std::vector<std::unique_ptr<char[]>> stacks;
  std::vector<bool> done;
  int running = 0;
  std::vector<Barrier> warps;
  Barrier block;
  std::vector<uint64_t> generation_of_arrival;  // at the cluster's barrier
  std::vector<uint64_t> exchanged[2];           // 8 bytes of every thread, in turns
  std::vector<uint8_t> turn;
};

// A barrier in shared memory that counts the bytes of bulk copies.
struct CopyBarrier {
  int32_t missing;  // bytes
  uint16_t arrivals;
  uint16_t phase;
};
static_assert(sizeof(CopyBarrier) == sizeof(uint64_t));

struct BulkCopy {
  char* to;
  const char* from;
  unsigned bytes;
  CopyBarrier* barrier;
};

struct Cluster {
  std::vector<BulkCopy> copies;  // under way
  Resume scheduler_resume;
  std::vector<std::unique_ptr<Block>> blocks;
  int size = 1;
  int threads = 0;  // of a block
  Barrier barrier;
  std::function<void()> body;
  bool progressed = false;
};

inline Cluster& cluster() {
  static Cluster instance;
  return instance;
}
inline Block* current_block = nullptr;
inline Block& block() { return *current_block; }
inline dim3 thread_index, block_index, block_size, grid_size;

inline void yield() {
  if (_setjmp(block().fiber_resume[thread_index.x].at) == 0) {
    _longjmp(cluster().scheduler_resume.at, 1);
  }
}

// Returns what to wait for.
inline uint64_t arrive(Barrier& barrier, int count) {
  const uint64_t generation = barrier.generation;
  cluster().progressed = true;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  return generation;
}

inline void wait(const Barrier& barrier, uint64_t generation) {
  while (barrier.generation == generation) yield();
}

inline void meet(Barrier& barrier, int count) { wait(barrier, arrive(barrier, count)); }
inline void wait_for_block() { meet(block().block, cluster().threads); }
inline void wait_for_warp() { meet(block().warps[thread_index.x / kWarp], kWarp); }

inline void cluster_arrive() {
  Cluster& c = cluster();
  block().generation_of_arrival[thread_index.x] = arrive(c.barrier, c.size * c.threads);
}
inline void cluster_wait() {
  wait(cluster().barrier, block().generation_of_arrival[thread_index.x]);
}

inline char* dynamic_shared() { return block().shared.bytes.data(); }

template <typename T>
const T* of_block(const T* own, int rank) {
  const char* const address = reinterpret_cast<const char*>(own);
  const auto offset = static_cast<size_t>(address - dynamic_shared());
  if (offset + sizeof(T) > block().shared.size) fail("this is not in shared memory");
  Block& other = *cluster().blocks[rank];
  if (other.running == 0) fail("shared memory of a block that has ended");
  return reinterpret_cast<const T*>(other.shared.bytes.data() + offset);
}

// The bits of a warp's lanes, after each lane has written its own. They are not written again
// before all lanes have read them: that takes another exchange, which uses the other of two sets.
inline const uint64_t* exchange(uint64_t own_bits) {
  Block& b = block();
  std::vector<uint64_t>& bits = b.exchanged[b.turn[thread_index.x] ^= 1];
  bits[thread_index.x] = own_bits;
  wait_for_warp();
  return &bits[thread_index.x / kWarp * kWarp];
}

template <typename T>
T value_of_lane(T value, int lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange(bits)[lane];
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

inline unsigned ballot(bool vote) {
  const uint64_t* bits = exchange(vote);
  unsigned votes = 0;
  for (int lane = 0; lane < kWarp; ++lane) votes |= static_cast<unsigned>(bits[lane]) << lane;
  return votes;
}

inline CopyBarrier& barrier_at(uint64_t* place) { return *reinterpret_cast<CopyBarrier*>(place); }

inline void end_if_complete(CopyBarrier& barrier) {
  if (barrier.arrivals != 1 || barrier.missing != 0) return;
  barrier.arrivals = 0;
  ++barrier.phase;
}

inline void init_barrier(uint64_t* place) { barrier_at(place) = {0, 0, 0}; }

inline bool is_elected() {
  wait_for_warp();
  return thread_index.x % kWarp == kWarp - 1;
}

inline void expect(uint64_t* place, unsigned bytes) {
  CopyBarrier& barrier = barrier_at(place);
  if (++barrier.arrivals != 1) fail("a barrier of copies has a second arrival in a phase");
  barrier.missing += static_cast<int32_t>(bytes);
  end_if_complete(barrier);
  cluster().progressed = true;
}

// The copy comes at a random later time. Until then its target is NaN.
inline void start_copy(void* to, const void* from, unsigned bytes, uint64_t* place) {
  const auto is_aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  if (bytes % 16 != 0 || !is_aligned(from) || !is_aligned(to)) fail("a copy of broken vectors");
  std::memset(to, 0xff, bytes);
  cluster().copies.push_back(
      {static_cast<char*>(to), static_cast<const char*>(from), bytes, &barrier_at(place)});
}

inline std::mt19937 copy_order(1);

inline void wait_for_copies(uint64_t* place, unsigned parity) {
  const CopyBarrier& barrier = barrier_at(place);
  auto& copies = cluster().copies;
  while ((barrier.phase & 1u) == parity) {
    if (!copies.empty()) {
      std::swap(copies[copy_order() % copies.size()], copies.back());
      const BulkCopy& copy = copies.back();
      std::memcpy(copy.to, copy.from, copy.bytes);
      copy.barrier->missing -= static_cast<int32_t>(copy.bytes);
      end_if_complete(*copy.barrier);
      copies.pop_back();
      cluster().progressed = true;
    }
    if ((barrier.phase & 1u) == parity) yield();
  }
}

inline void run_fiber() {
  Cluster& c = cluster();
  c.body();
  block().done[thread_index.x] = true;
  --block().running;
  c.progressed = true;
  _longjmp(c.scheduler_resume.at, 1);
}

// Lets a fiber run until it waits or ends.
inline void resume(Block& b, unsigned fiber) {
  current_block = &b;
  thread_index.x = fiber;
  block_index.x = b.index;
  if (_setjmp(cluster().scheduler_resume.at) != 0) return;
  if (b.started[fiber]) _longjmp(b.fiber_resume[fiber].at, 1);
  b.started[fiber] = true;
  setcontext(&b.fibers[fiber]);
}

inline void start(Block& b, unsigned index, int threads, size_t shared) {
  b.index = index;
  b.shared.reset(shared);
  b.fibers.resize(threads);
  b.done.assign(threads, false);
  b.running = threads;
  b.warps.assign(threads / kWarp, Barrier());
  b.block = Barrier();
  b.generation_of_arrival.assign(threads, 0);
  b.fiber_resume.resize(threads);
  b.started.assign(threads, false);
  b.turn.assign(threads, 0);
  for (auto& bits : b.exchanged) bits.assign(threads, 0);
  while (static_cast<int>(b.stacks.size()) < threads) {
    b.stacks.emplace_back(new char[kStack]);
  }
  for (int i = 0; i < threads; ++i) {
    getcontext(&b.fibers[i]);
    b.fibers[i].uc_stack.ss_sp = b.stacks[i].get();
    b.fibers[i].uc_stack.ss_size = kStack;
    b.fibers[i].uc_link = nullptr;
    makecontext(&b.fibers[i], run_fiber, 0);
  }
}

// The cluster whose first block is `first` in the grid.
inline void run_cluster(unsigned first, size_t shared, std::mt19937& random) {
  Cluster& c = cluster();
  c.barrier = Barrier();
  while (static_cast<int>(c.blocks.size()) < c.size) c.blocks.emplace_back(new Block());
  std::vector<int> order(c.size * c.threads);
  for (int i = 0; i < c.size; ++i) start(*c.blocks[i], first + i, c.threads, shared);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  for (bool running = true; running;) {
    running = false;
    c.progressed = false;
    std::shuffle(order.begin(), order.end(), random);
    for (int i : order) {
      Block& b = *c.blocks[i / c.threads];
      if (b.done[i % c.threads]) continue;
      resume(b, i % c.threads);
      running = true;
    }
    if (running && !c.progressed) fail("threads wait for others that never come");
  }
  for (int i = 0; i < c.size; ++i) c.blocks[i]->shared.check();
  if (!c.copies.empty()) fail("a block ended while a copy to its shared memory was under way");
}

inline std::mutex device;  // runs one kernel at a time
inline std::mt19937 device_order(1);

struct Launch {
  unsigned blocks;
  int threads;
  int of_cluster = 1;
  size_t shared = 0;
};
inline Launch last_launch = {};
inline int64_t launches = 0;  // of kernels and memsets, since the process began

template <typename Kernel, typename... Arguments>
void run(Kernel kernel, const Launch& launch, const Arguments&... arguments) {
  const std::lock_guard<std::mutex> lock(device);
  last_launch = launch;
  ++launches;
  static const bool only_launches = std::getenv("KLFAST_EMULATED_LAUNCHES_ONLY") != nullptr;
  if (only_launches) return;  // to time the host's part of a call
  grid_size.x = launch.blocks;
  block_size.x = launch.threads;
  Cluster& c = cluster();
  c.size = launch.of_cluster;
  c.threads = launch.threads;
  c.body = [&] { kernel(arguments...); };
  if (launch.blocks % c.size != 0) fail("a grid must be made of whole clusters");
  std::vector<unsigned> order(launch.blocks / c.size);
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i * c.size;
  std::shuffle(order.begin(), order.end(), device_order);
  for (unsigned first : order) run_cluster(first, launch.shared, device_order);
}

// KLFAST_EMULATED_CHIP names the device at hand: by default the first.
struct Chip {
  const char* name;
  int has_clusters;
  int processors;
  int most_of_cluster;  // blocks that can run together
};
inline constexpr Chip kChips[] = {{"hopper", 1, 1, 16},
                                  {"ampere", 0, 1, 1},
                                  // Its clusters have the size that any chip with clusters has.
                                  {"small", 1, 1, 8},
                                  // An instance of a chip with clusters, too small for large ones.
                                  {"slice", 1, 1, 2}};

inline int current_chip() {
  const char* const name = std::getenv("KLFAST_EMULATED_CHIP");
  if (name == nullptr) return 0;
  for (int i = 0; i < static_cast<int>(std::size(kChips)); ++i) {
    if (std::strcmp(name, kChips[i].name) == 0) return i;
  }
  fail("KLFAST_EMULATED_CHIP names no chip");
}

inline std::map<const void*, bool> may_be_large;  // kernel -> its clusters may have over 8 blocks

}  // namespace cuda_emulator

inline const dim3& threadIdx = cuda_emulator::thread_index;
inline const dim3& blockIdx = cuda_emulator::block_index;
inline const dim3& blockDim = cuda_emulator::block_size;
inline const dim3& gridDim = cuda_emulator::grid_size;

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
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return cuda_emulator::value_of_lane(value, lane);
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline unsigned __vimax3_u32(unsigned a, unsigned b, unsigned c) {
  return std::max(a, std::max(b, c));
}
inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }
inline int __clz(unsigned value) { return value == 0 ? 32 : __builtin_clz(value); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, unsigned shift) {
  return static_cast<uint32_t>(((static_cast<uint64_t>(high) << 32) | low) >> (shift % 32));
}
// These functions need aligned addresses, as their instructions do.
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
T __ldca(const T* from) {
  return __ldg(from);
}
template <typename T>
void __stwb(T* to, T value) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(T) != 0) std::abort();
  *to = value;
}
template <typename T>
void __stcs(T* to, T value) {
  __stwb(to, value);
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
inline cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<uintptr_t>(stream);
  return cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*) {
  return cudaSuccess;
}
template <typename T>
cudaError_t cudaGetSymbolAddress(void** address, T& symbol) {
  *address = &symbol;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t) {
  const std::lock_guard<std::mutex> lock(cuda_emulator::device);
  ++cuda_emulator::launches;
  std::memset(to, value, size);
  return cudaSuccess;
}

enum cudaDeviceAttr { cudaDevAttrClusterLaunch, cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaGetDevice(int* device) {
  *device = cuda_emulator::current_chip();
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  const cuda_emulator::Chip& chip = cuda_emulator::kChips[device];
  const int values[] = {chip.has_clusters, chip.processors};
  *value = values[which];
  return cudaSuccess;
}

struct cudaFuncAttributes {
  int ptxVersion;
};
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel) {
  attributes->ptxVersion = 90;
  return cudaSuccess;
}
enum cudaFuncAttribute { cudaFuncAttributeNonPortableClusterSizeAllowed };
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  cuda_emulator::may_be_large[kernel] = value != 0;
  return cudaSuccess;
}

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
inline int blocks_of_cluster(const cudaLaunchConfig_t* config) {
  return config->numAttrs > 0 ? static_cast<int>(config->attrs->val.clusterDim.x) : 1;
}
inline cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*,
                                                  const cudaLaunchConfig_t* config) {
  const auto& chip = cuda_emulator::kChips[cuda_emulator::current_chip()];
  *clusters = blocks_of_cluster(config) <= chip.most_of_cluster ? 1 : 0;
  return cudaSuccess;
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  const int of_cluster = blocks_of_cluster(config);
  const auto& chip = cuda_emulator::kChips[cuda_emulator::current_chip()];
  if (of_cluster > chip.most_of_cluster) cuda_emulator::fail("such clusters never fit this chip");
  if (of_cluster > 8 && !cuda_emulator::may_be_large[reinterpret_cast<const void*>(kernel)]) {
    cuda_emulator::fail("clusters of more than 8 blocks were not asked for");
  }
  if (config->dynamicSmemBytes > 48 << 10) {
    cuda_emulator::fail("shared memory was not asked for");
  }
  cuda_emulator::run(kernel,
                     {config->gridDim.x, static_cast<int>(config->blockDim.x), of_cluster,
                      config->dynamicSmemBytes},
                     arguments...);
  return cudaSuccess;
}
