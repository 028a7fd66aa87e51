// Runs a launch: the blocks of a cluster side by side, clusters one after the other.

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <random>

#include "memory.h"
#include "options.h"
#include "text.h"
#include "warp.h"

namespace ptx {
namespace {

std::mt19937_64 generator;
u64 epochs = 0;
u64 instructions = 0;

struct Free {
  void operator()(u8* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<u8, Free>;

// Every byte is 0xff, so a float that was never written reads as NaN.
Memory memory_of(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, std::max<size_t>(bytes, 64)) != 0) throw std::bad_alloc();
  std::memset(memory, 0xff, bytes);
  return Memory(static_cast<u8*>(memory));
}

u32 special_value(const Warp& warp, Special special, u32 lane) {
  const Block& block = *warp.block;
  const Shape& shape = warp.launch->shape;
  switch (special) {
    case Special::kThread:
      return warp.thread(lane);
    case Special::kThreads:
      return shape.threads;
    case Special::kBlock:
      return block.index;
    case Special::kBlocks:
      return shape.blocks;
    case Special::kLane:
      return lane;
    case Special::kWarp:
      return warp.index;
    case Special::kRank:
      return block.rank;
    case Special::kRanks:
      return shape.of_cluster;
    case Special::kZero:
      return 0;
    case Special::kOne:
      return 1;
    case Special::kLaneMaskLower:
      return (1u << lane) - 1;
    case Special::kLaneMaskLowerEqual:
      return (2u << lane) - 1;
  }
  return 0;
}

// A warp's memory, which each cluster that runs in it takes over.
class WarpMemory {
 public:
  WarpMemory(Kernel& kernel, Warp& warp)
      : kernel_(kernel),
        registers_(memory_of(kernel.register_bytes)),
        written_(kernel.register_names.size()),
        returns_(size_t{kLanes} * kernel.functions),
        local_(memory_of(private_bytes(kernel.local_bytes))),
        arguments_(memory_of(private_bytes(kernel.argument_bytes))) {
    warp.kernel = &kernel;
    warp.registers = registers_.get();
    warp.written = written_.data();
    warp.returns = returns_.data();
    warp.local = local_.get();
    warp.arguments = arguments_.get();
    for (const Constant& constant : kernel.constants) {
      std::memcpy(warp.registers + constant.offset, constant.bytes.data(), constant.bytes.size());
    }
  }

  // Nothing has been written, neither registers nor local memory.
  void forget() {
    std::fill(written_.begin(), written_.end(), 0);
    written_[0] = kAllLanes;
    for (u32 lane = 0; lane < kLanes; ++lane) {
      forget_bytes(local_.get(), kernel_.local_bytes, lane);
      forget_bytes(arguments_.get(), kernel_.argument_bytes, lane);
    }
  }

 private:
  // Each lane has its bytes, followed by a flag per byte that says whether it was written.
  static size_t private_bytes(u32 bytes) { return size_t{2} * bytes * kLanes; }
  static void forget_bytes(u8* memory, u32 bytes, u32 lane) {
    u8* const own = memory + size_t{2} * bytes * lane;
    std::memset(own, 0xff, bytes);
    std::memset(own + bytes, 0, bytes);
  }

  const Kernel& kernel_;
  Memory registers_;
  std::vector<u32> written_, returns_;
  Memory local_, arguments_;
};

void begin(Warp& warp) {
  const u32 threads = warp.block->threads - warp.index * kLanes;
  warp.lanes = threads >= kLanes ? kAllLanes : (1u << threads) - 1;
  warp.live = warp.lanes;
  warp.ready.assign(1, {0, warp.live});
  warp.waiting.clear();
  warp.syncs = warp.exchanges = warp.fenced = warp.has_counted = 0;
  warp.instructions = 0;
  for (u32 lane = 0; lane < kLanes; ++lane) {
    warp.arrivals[lane] = warp.waits[lane] = warp.committed[lane] = warp.proxies[lane] = 0;
    warp.copies[lane].clear();
  }
  for (const auto& [offset, special] : warp.kernel->specials) {
    u32* const to = reinterpret_cast<u32*>(warp.registers + offset);
    for (u32 lane = 0; lane < kLanes; ++lane) to[lane] = special_value(warp, special, lane);
  }
}

void begin(Block& block, u32 index, Cluster& cluster) {
  const Shape& shape = block.launch->shape;
  block.index = index;
  block.rank = static_cast<u32>(cluster.blocks.size());
  block.threads = block.live = shape.threads;
  block.cluster = &cluster;
  const size_t bytes = block.launch->kernel->dynamic_shared + shape.dynamic_shared;
  block.shared.assign(bytes, 0xff);
  block.shared_written.assign(bytes, 0);
  block.shadows.resize(bytes / 4 + 1);
  block.copy_barriers.clear();
  block.barriers = block.last_remote_arrival = block.most_waits = 0;
  block.acquired = {};
  block.is_read_remotely = false;
  cluster.blocks.push_back(&block);
  cluster.threads += shape.threads;
  for (const auto& warp : block.warps) begin(*warp);
}

[[noreturn]] void fail_of_deadlock(const Kernel& kernel, const Cluster& cluster) {
  constexpr size_t kMost = 4;
  size_t groups = 0;
  std::string text;
  for (const Block* block : cluster.blocks) {
    for (const auto& warp : block->warps) {
      for (const Group& group : warp->waiting) {
        if (++groups > kMost) continue;
        text += (groups == 1 ? "" : "; ") + ("lanes " + hex(group.lanes)) + " of warp " +
                std::to_string(warp->index) + " of block " + std::to_string(block->index) + " at " +
                describe(kernel, kernel.code[group.at]);
      }
    }
  }
  if (groups > kMost) text += "; and " + std::to_string(groups - kMost) + " groups more";
  throw Fault("kernel " + kernel.name + ": threads wait for others that never come: " + text);
}

void check_end(const Block& block) {
  if (!block.is_read_remotely || block.most_waits > block.last_remote_arrival) return;
  const Kernel& kernel = *block.launch->kernel;
  fail(kernel, kernel.code.back(),
       "block " + std::to_string(block.index) +
           " may end while its cluster still reads its shared memory");
}

class LaunchRun {
 public:
  LaunchRun(Kernel& kernel, const Shape& shape, const u8* parameters)
      : launch_{&kernel, shape, parameters, ++epochs, 0, {}, 0} {
    launch_.released.resize(shape.blocks);
    for (u32 rank = 0; rank < shape.of_cluster; ++rank) add_block();
  }

  void run() {
    std::vector<u32> clusters(launch_.shape.blocks / launch_.shape.of_cluster);
    for (u32 i = 0; i < clusters.size(); ++i) clusters[i] = i;
    std::shuffle(clusters.begin(), clusters.end(), generator);
    for (const u32 cluster : clusters) run_cluster(cluster * launch_.shape.of_cluster);
  }

 private:
  void add_block() {
    auto block = std::make_unique<Block>();
    block->launch = &launch_;
    for (u32 i = 0; i < (launch_.shape.threads + kLanes - 1) / kLanes; ++i) {
      auto warp = std::make_unique<Warp>();
      warp->block = block.get();
      warp->launch = &launch_;
      warp->index = i;
      memory_.push_back(std::make_unique<WarpMemory>(*launch_.kernel, *warp));
      all_.push_back(warp.get());
      block->warps.push_back(std::move(warp));
    }
    blocks_.push_back(std::move(block));
  }

  void run_cluster(u32 first) {
    Cluster cluster;
    cluster.epoch = ++epochs;
    for (const auto& memory : memory_) memory->forget();
    for (u32 i = 0; i < blocks_.size(); ++i) begin(*blocks_[i], first + i, cluster);
    while (cluster.ended < cluster.threads) {
      bool goes_on = false;
      std::shuffle(all_.begin(), all_.end(), generator);
      for (Warp* warp : all_) goes_on |= warp->live != 0 && run_warp(*warp);
      for (const auto& block : blocks_) goes_on |= release_barrier(*block);
      if (!goes_on) fail_of_deadlock(*launch_.kernel, cluster);
    }
    for (const auto& block : blocks_) check_end(*block);
    if (!cluster.copies.empty()) {
      fail(*launch_.kernel, launch_.kernel->code.back(),
           "block " + std::to_string(cluster.copies[0].block->index) +
               " ends while a bulk copy to its shared memory is under way");
    }
    for (const Warp* warp : all_) instructions += warp->instructions;
  }

  Launch launch_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::unique_ptr<WarpMemory>> memory_;
  std::vector<Warp*> all_;
};

}  // namespace

void run(Kernel& kernel, const Shape& shape, const u8* parameters) {
  static std::mutex mutex;  // a device of one kernel at a time
  static u64 launches = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  generator.seed(options().seed + ++launches);
  forget_allocations();
  set_stored(nullptr);
  LaunchRun(kernel, shape, parameters).run();
}

u64 count_of_instructions() { return instructions; }
size_t random_choice(size_t ways) { return generator() % ways; }

std::string name_of_register(const Kernel& kernel, const Operand& operand) {
  return kernel.register_names[operand.id];
}

std::string name_of_thread(const Warp& warp, u32 lane) {
  return "thread " + std::to_string(warp.thread(lane)) + " of block " +
         std::to_string(warp.block->index);
}

void fail(const Kernel& kernel, const Instruction& in, const std::string& what) {
  throw Fault("kernel " + kernel.name + ": " + what + ", at " + describe(kernel, in));
}

void fail(const Warp& warp, const Instruction& in, u32 lane, const std::string& what) {
  fail(*warp.kernel, in, name_of_thread(warp, lane) + " " + what);
}

void require_written(const Warp& warp, const Instruction& in, const Operand& operand, u32 lanes,
                     const char* use) {
  const u32 missing = lanes & ~written_lanes(warp, operand);
  if (missing == 0) return;
  fail(warp, in, static_cast<u32>(__builtin_ctz(missing)),
       "takes a value that nobody wrote, of " + name_of_register(*warp.kernel, operand) + ", as " +
           use);
}

}  // namespace ptx
