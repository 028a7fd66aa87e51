#include "races.h"

#include <algorithm>

#include "memory.h"
#include "text.h"

namespace ptx {

Stamp stamp_of(const Warp& warp, u32 lane) {
  const Block& block = *warp.block;
  return {block.index * block.threads + warp.thread(lane) + 1,
          block.barriers,
          warp.syncs,
          warp.arrivals[lane],
          warp.exchanges,
          warp.proxies[lane]};
}

namespace {

std::string name_of(const Warp& warp, const Stamp& stamp) {
  const u32 threads = warp.block->threads;
  return "thread " + std::to_string((stamp.thread - 1) % threads) + " of block " +
         std::to_string((stamp.thread - 1) / threads);
}

// True if the fences and atomics of two blocks order them.
bool is_released(const Stamp& before, u32 block, const Warp& warp, u32 thread) {
  const Meeting &released = warp.launch->released[block], &acquired = warp.block->acquired;
  if (!released.happened || !acquired.happened || released.number > acquired.number) return false;
  const bool covers = before.barriers < released.barriers || before.thread == released.thread;
  return covers && (acquired.barriers < warp.block->barriers || acquired.thread == thread);
}

bool is_ordered(const Stamp& before, const Warp& warp, u32 lane, bool is_global) {
  const Block& block = *warp.block;
  const u32 thread = block.index * block.threads + warp.thread(lane) + 1;
  if (before.thread == 0 || before.thread == thread) return true;
  const u32 its_block = (before.thread - 1) / block.threads;
  if (its_block == block.index) {
    const u32 its_warp = (before.thread - 1) % block.threads / kLanes;
    if (its_warp == warp.index && before.syncs < warp.syncs) return true;
    if (before.barriers < block.barriers) return true;
  }
  const u32 of_cluster = warp.launch->shape.of_cluster;
  if (its_block / of_cluster == block.index / of_cluster && warp.waits[lane] > before.arrivals) {
    return true;
  }
  return is_global && its_block != block.index && is_released(before, its_block, warp, thread);
}

bool is_of_block(const Stamp& stamp, const Warp& warp) {
  return stamp.thread != 0 && (stamp.thread - 1) / warp.block->threads == warp.block->index;
}

bool is_of_warp(const Stamp& stamp, const Warp& warp) {
  return is_of_block(stamp, warp) &&
         (stamp.thread - 1) % warp.block->threads / kLanes == warp.index;
}

// True if all reads of this record precede the next access of this lane.
bool is_read_ordered(const Shadow& shadow, const Warp& warp, u32 lane, bool is_global) {
  const Stamp& read = shadow.read;
  if (read.thread == 0) return true;
  if (shadow.has_readers && is_of_block(read, warp)) {
    return read.barriers < warp.block->barriers || warp.waits[lane] > read.arrivals;
  }
  const bool is_mine = is_of_warp(read, warp);
  if (is_mine && shadow.read_lanes == 1u << lane) return true;
  if (is_mine && read.exchanges < warp.exchanges) return true;
  Stamp other = read;  // of a lane of that warp but this one, that has the same stamp
  if (is_mine) {
    other.thread = warp.block->index * warp.block->threads + warp.thread(lane == 0 ? 1 : 0) + 1;
  }
  return is_ordered(other, warp, lane, is_global);
}

// True if all reads since the last write precede the next access of this lane.
bool reads_are_ordered(const Shadow& shadow, const Warp& warp, u32 lane, bool is_global) {
  return is_read_ordered(shadow, warp, lane, is_global) &&
         std::all_of(shadow.others.begin(), shadow.others.end(),
                     [&](const Stamp& read) { return is_ordered(read, warp, lane, is_global); });
}

void begin_reads(Shadow& shadow, const Stamp& stamp, u32 lane) {
  shadow.read = stamp;
  shadow.read_lanes = 1u << lane;
  shadow.has_readers = false;
}

void add_read(Shadow& shadow, const Warp& warp, u32 lane, bool is_global) {
  const Stamp mine = stamp_of(warp, lane);
  const Stamp& read = shadow.read;
  if (is_of_warp(read, warp) && !shadow.has_readers && read.syncs == mine.syncs &&
      read.barriers == mine.barriers && read.exchanges == mine.exchanges &&
      read.arrivals == mine.arrivals) {
    shadow.read_lanes |= 1u << lane;
    return;
  }
  // A later access follows the earlier reads too, if this read does.
  if (is_read_ordered(shadow, warp, lane, is_global)) return begin_reads(shadow, mine, lane);
  if (!is_of_block(read, warp)) {
    Stamp other = read;
    // A thread's fence orders its own reads. Here the reads belong to several threads.
    if (shadow.has_readers || shadow.read_lanes != (shadow.read_lanes & -shadow.read_lanes)) {
      other.thread = (read.thread - 1) / warp.block->threads * warp.block->threads + 2;
    }
    shadow.others.push_back(other);
    return begin_reads(shadow, mine, lane);
  }
  Stamp all = mine;
  all.barriers = std::max(all.barriers, read.barriers);
  all.arrivals = std::max(all.arrivals, read.arrivals);
  shadow.read = all;
  shadow.has_readers = true;
}

struct Event {
  Warp& warp;
  const Instruction& in;
  u32 lane;
  bool writes, is_global, same;
  const std::string& place() const {
    static const std::string names[] = {"shared memory", "global memory"};
    return names[is_global];
  }
};

// The same store, of the same bytes: Triton's lanes share numbers.
bool is_twin(const Shadow& shadow, const Event& event) {
  const u32 threads = event.warp.block->threads;
  return event.writes && event.same && shadow.written_by == &event.in &&
         (shadow.write.thread - 1) / threads == event.warp.block->index;
}

// True if this lane, or a thread that it follows, saw the end of the phase of the copy that wrote.
bool has_seen_copy(const Shadow& shadow, const Event& event) {
  const auto has_seen = [&](const auto& of_thread) {
    const auto& [phases, at] = of_thread;
    return phases > shadow.phase && is_ordered(at, event.warp, event.lane, false);
  };
  const auto& seen = shadow.barrier->seen;
  return has_seen(seen[event.warp.thread(event.lane)]) ||  // mostly
         std::any_of(seen.begin(), seen.end(), has_seen);
}

void check(const Shadow& shadow, const Event& event, u8 bytes) {
  const bool meets = shadow.write.thread != 0 && (shadow.written_bytes & bytes) != 0;
  if (meets && shadow.barrier != nullptr) {
    if (!has_seen_copy(shadow, event)) {
      fail(event.warp, event.in, event.lane,
           std::string(event.writes ? "writes " : "reads ") + event.place() +
               " in a race with the bulk copy that " + name_of(event.warp, shadow.write) +
               " requested, " + describe(*event.warp.kernel, *shadow.written_by));
    }
  } else if (meets && !is_twin(shadow, event) &&
             !is_ordered(shadow.write, event.warp, event.lane, event.is_global)) {
    fail(event.warp, event.in, event.lane,
         std::string(event.writes ? "writes " : "reads ") + event.place() +
             " in a race with the write by " + name_of(event.warp, shadow.write) + ", " +
             describe(*event.warp.kernel, *shadow.written_by));
  }
  if (event.writes && !is_twin(shadow, event) &&
      !reads_are_ordered(shadow, event.warp, event.lane, event.is_global)) {
    fail(event.warp, event.in, event.lane,
         "writes " + event.place() + " in a race with a read by " +
             name_of(event.warp, shadow.read));
  }
}

void note(Shadow& shadow, const Event& event, u8 bytes) {
  const Warp& warp = event.warp;
  const u64 epoch = event.is_global ? warp.launch->epoch : warp.block->cluster->epoch;
  if (shadow.epoch != epoch) {
    shadow = Shadow();
    shadow.epoch = epoch;
  }
  if (event.in.is_read_only) shadow.is_read_only = true;
  if (shadow.is_read_only && (event.writes || shadow.write.thread != 0)) {
    fail(event.warp, event.in, event.lane,
         event.writes ? "writes memory that this kernel reads by ld.global.nc"
                      : "reads by ld.global.nc what this kernel wrote");
  }
  check(shadow, event, bytes);
  if (event.writes) {
    shadow.write = stamp_of(event.warp, event.lane);
    shadow.written_by = &event.in;
    shadow.written_bytes = bytes;
    shadow.barrier = nullptr;
    shadow.read = {};
    shadow.read_lanes = 0;
    shadow.has_readers = false;
    shadow.others.clear();
  } else {
    add_read(shadow, event.warp, event.lane, event.is_global);
  }
}

// A bit for each of a word's four bytes that lies in [address, end).
u8 bytes_in_word(u64 word, u64 address, u64 end) {
  u8 bytes = 0;
  for (u64 i = 0; i < 4; ++i) {
    const u64 at = 4 * word + i;
    if (at >= address && at < end) bytes = static_cast<u8>(bytes | 1u << i);
  }
  return bytes;
}

constexpr u64 kPageWords = 1024;

Shadow& global_shadow(u64 word) {
  using Page = std::unique_ptr<Shadow[]>;
  static auto& pages = *new std::unordered_map<u64, Page>;
  static u64 last_number = ~u64{0};
  static Shadow* last = nullptr;
  const u64 number = word / kPageWords;
  if (number != last_number) {
    Page& page = pages[number];
    if (page == nullptr) page.reset(new Shadow[kPageWords]);
    last_number = number;
    last = page.get();
  }
  return last[word % kPageWords];
}

}  // namespace

void note_shared(Block& owner, Warp& warp, const Instruction& in, u32 lane, u64 address, u32 size,
                 bool writes, bool same) {
  const Event event{warp, in, lane, writes, false, same};
  for (u64 word = address / 4; word <= (address + size - 1) / 4; ++word) {
    note(owner.shadows[word], event, bytes_in_word(word, address, address + size));
  }
}

void check_stores_before_copy(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 size) {
  const Block& block = *warp.block;
  for (u64 word = address / 4; word < (address + size) / 4; ++word) {
    const Shadow& shadow = block.shadows[word];
    const Stamp& write = shadow.write;
    if (shadow.epoch != block.cluster->epoch || shadow.barrier != nullptr ||
        !is_of_block(write, warp)) {
      continue;
    }
    const u32 thread = (write.thread - 1) % block.threads;
    if (block.warps[thread / kLanes]->proxies[thread % kLanes] > write.proxies) continue;
    fail(warp, in, lane,
         "copies over a store without a fence between stores and copies, by " +
             name_of(warp, write) + ", " + describe(*warp.kernel, *shadow.written_by));
  }
}

void note_bulk_copy(Block& owner, u64 address, u32 size, const CopyBarrier& barrier) {
  for (u64 word = address / 4; word < (address + size) / 4; ++word) {
    owner.shadows[word].barrier = &barrier;
    owner.shadows[word].phase = barrier.phase;
  }
}

void note_global(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 size, bool writes,
                 bool same) {
  const Event event{warp, in, lane, writes, true, same};
  for (u64 word = address / 4; word <= (address + size - 1) / 4; ++word) {
    note(global_shadow(word), event, bytes_in_word(word, address, address + size));
  }
}

void note_fence(Warp& warp, u32 lanes) {
  warp.fenced |= lanes;
  for (u32 rest = lanes & warp.has_counted; rest != 0; rest &= rest - 1) {
    const auto lane = static_cast<u32>(__builtin_ctz(rest));
    const Block& block = *warp.block;
    const u64 number = warp.launch->released[block.index].number;
    warp.block->acquired = {true, number, block.barriers,
                            block.index * block.threads + warp.thread(lane) + 1};
  }
}

void note_atomic(Warp& warp, u32 lane) {
  const Block& block = *warp.block;
  warp.launch->released[block.index] = {true, ++warp.launch->atomics, block.barriers,
                                        block.index * block.threads + warp.thread(lane) + 1};
  warp.has_counted |= 1u << lane;
}

}  // namespace ptx
