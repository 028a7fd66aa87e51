// The state of a running launch: clusters of blocks of warps.

#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "program.h"

namespace ptx {

struct Block;
struct Cluster;
struct Launch;

// An error that ends a launch. The text names the fault and its place.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The time of an access to memory, which is compared with an access of another thread.
struct Stamp {
  u32 thread = 0;     // in the grid, + 1; 0 if there is none
  u32 barriers = 0;   // of its block, so far
  u32 syncs = 0;      // of its warp
  u32 arrivals = 0;   // of the thread, at its cluster's barrier
  u32 exchanges = 0;  // of all lanes of its warp
  u32 proxies = 0;    // fences of the thread between its stores and bulk copies
};

// A barrier in shared memory (mbarrier). A phase ends when all have arrived and all bytes have
// come.
struct CopyBarrier {
  u32 count = 0, missing = 0;  // arrivals: of a phase, and still to come
  i64 missing_bytes = 0;
  u32 phase = 0;  // that goes on
  u32 initialised_by = 0;
  bool is_fenced = false;  // copies see the initialisation
  // By thread of the block: the phases that it saw end, and when it saw the last one.
  std::vector<std::pair<u32, Stamp>> seen;
};

// The last accesses to 4 bytes of memory, in one launch.
struct Shadow {
  u64 epoch = 0;  // of the launch or cluster in which all else here was noted
  Stamp write, read;
  const Instruction* written_by = nullptr;
  u32 read_lanes = 0;                    // lanes of that warp that read between the same barriers
  bool has_readers = false;              // several warps of its block have read
  std::vector<Stamp> others;             // reads by other blocks
  bool is_read_only = false;             // was read by ld.global.nc
  u8 written_bytes = 0;                  // of the last write, a bit each
  const CopyBarrier* barrier = nullptr;  // if a bulk copy wrote last, its barrier
  u32 phase = 0;                         // and that barrier's phase
};

// A copy from global to shared memory that is under way.
struct PendingCopy {
  u64 to = 0;
  u8 bytes = 0;
  u8 data[16] = {};
  u32 group = 0;
};

// A bulk copy to shared memory that is under way.
struct BulkCopy {
  Block* block;
  const u8* from;
  u32 to, bytes, barrier;
};

struct Group {  // lanes that are at the same instruction
  u32 at;
  u32 lanes;
};

struct Warp {
  u8* registers = nullptr;
  u32* written = nullptr;                     // by id of a register: the lanes that have a value
  u32* returns = nullptr;                     // by slot of a function, and lane
  u8 *local = nullptr, *arguments = nullptr;  // of all lanes, one after the other
  Block* block = nullptr;
  Kernel* kernel = nullptr;
  Launch* launch = nullptr;
  u32 index = 0;
  u32 lanes = 0, live = 0;  // that the warp began with; that have not ended
  std::vector<Group> ready, waiting;
  u32 syncs = 0, exchanges = 0;  // of all lanes
  u32 arrivals[kLanes] = {}, waits[kLanes] = {}, proxies[kLanes] = {};
  u32 fenced = 0;       // lanes that have written nothing since a fence
  u32 has_counted = 0;  // lanes that have done an atomic, for the fence after it
  std::vector<PendingCopy> copies[kLanes];
  u32 committed[kLanes] = {};
  u64 instructions = 0;

  u32 thread(u32 lane) const { return index * kLanes + lane; }  // of the block
};

// A thread's fence and atomic, or its atomic and fence.
struct Meeting {
  bool happened = false;
  u64 number = 0;  // in the order of a launch's atomics
  u32 barriers = 0, thread = 0;
};

struct Block {
  u32 index = 0, rank = 0, threads = 0, live = 0;
  Cluster* cluster = nullptr;
  Launch* launch = nullptr;
  std::vector<u8> shared;
  std::vector<u8> shared_written;                      // a bool for each byte
  std::vector<Shadow> shadows;                         // of each 4 bytes of shared memory
  std::unordered_map<u32, CopyBarrier> copy_barriers;  // by place in shared memory
  std::vector<std::unique_ptr<Warp>> warps;
  u32 barriers = 0;
  Meeting acquired;
  u32 last_remote_arrival = 0;  // of a thread of another block that touched this one's memory
  bool is_read_remotely = false;
  u32 most_waits = 0;  // of its threads that have ended, at the cluster's barrier
};

struct Cluster {
  std::vector<Block*> blocks;
  std::vector<BulkCopy> copies;  // under way
  u32 threads = 0, arrived = 0, ended = 0, phase = 0;
  u64 epoch = 0;
};

struct Shape {
  u32 blocks = 1, threads = 1, of_cluster = 1;
  size_t dynamic_shared = 0;
};

struct Launch {
  Kernel* kernel;
  Shape shape;
  const u8* parameters;
  u64 epoch = 0;
  u64 atomics = 0;                // so far
  std::vector<Meeting> released;  // by block
  u64 instructions = 0;
};

// Runs a kernel. Throws a Fault.
void run(Kernel& kernel, const Shape& shape, const u8* parameters);
u64 count_of_instructions();  // of warps, that all launches have run

// Runs a warp until all its lanes wait or have ended; whether there was anything to run.
bool run_warp(Warp& warp);
// Lets a block's warps go on if all wait at its barrier.
bool release_barrier(Block& block);
// Tries to pass a barrier in shared memory. Returns the lanes that go on, with a result each.
u32 try_to_pass(Warp& warp, const Instruction& in, u32 lanes);
// Which of several equally good ways to go on.
size_t random_choice(size_t ways);

// Ends the launch.
[[noreturn]] void fail(const Warp& warp, const Instruction& in, u32 lane, const std::string& what);
[[noreturn]] void fail(const Kernel& kernel, const Instruction& in, const std::string& what);
std::string name_of_register(const Kernel& kernel, const Operand& operand);

// The lanes that have a value in a register.
inline u32 written_lanes(const Warp& warp, const Operand& operand) {
  return warp.written[operand.id];
}
inline void set_written(Warp& warp, const Operand& operand, u32 lanes, u32 written) {
  if (operand.id == 0) return;
  warp.written[operand.id] = (warp.written[operand.id] & ~lanes) | (written & lanes);
}
// Fails if a lane reads a value that was never written.
void require_written(const Warp& warp, const Instruction& in, const Operand& operand, u32 lanes,
                     const char* use);

}  // namespace ptx
