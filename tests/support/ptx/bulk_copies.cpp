// Bulk copies from global to shared memory, and the barriers in shared memory that count their
// bytes. The bytes come at a random later time, and only while some thread waits for a barrier.

#include <stdexcept>
#include <string>

#include "memory.h"
#include "options.h"
#include "races.h"
#include "table.h"

namespace ptx {
namespace {

constexpr u32 kUnit = 16;  // bytes: a copy consists of whole units

u32 own_offset(u64 address) { return static_cast<u32>(address & 0xffffffff); }

// Notes a lane's access to a barrier. Its bytes never count as written.
u32 touch(Warp& warp, const Instruction& in, u32 lane, u64 address, Access access) {
  const Place place = place_of(warp, in, lane, address, 8, access);
  std::memset(place.written, 0, 8);
  return own_offset(address);
}

CopyBarrier& barrier_at(Warp& warp, const Instruction& in, u32 lane, u64 address) {
  const u32 place = touch(warp, in, lane, address, Access::kRead);
  const auto found = warp.block->copy_barriers.find(place);
  if (found == warp.block->copy_barriers.end()) {
    fail(warp, in, lane, "uses a barrier in shared memory that nobody initialised");
  }
  return found->second;
}

void end_if_complete(CopyBarrier& barrier) {
  if (barrier.missing != 0 || barrier.missing_bytes != 0) return;
  barrier.missing = barrier.count;
  ++barrier.phase;
}

void init(Warp& warp, const Instruction& in, u32 lanes) {
  require_written(warp, in, in.b, lanes, "a number of arrivals");
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<u32>(__builtin_ctz(rest));
    const u64 address = address_of_lane(warp, in.address, i);
    const u32 count = values<u32>(warp, in.b)[i];
    if (count == 0) fail(warp, in, i, "initialises a barrier for no arrivals");
    CopyBarrier& barrier = warp.block->copy_barriers[touch(warp, in, i, address, Access::kWrite)];
    barrier = {};
    barrier.count = barrier.missing = count;
    barrier.initialised_by = warp.thread(i);
    barrier.seen.resize(warp.block->threads);
  }
}

void publish(Warp& warp, const Instruction&, u32 lanes) {
  for (auto& [place, barrier] : warp.block->copy_barriers) {
    const u32 thread = barrier.initialised_by;
    if (thread / kLanes == warp.index && (lanes >> thread % kLanes & 1) != 0) {
      barrier.is_fenced = true;
    }
  }
}

void arrive(Warp& warp, const Instruction& in, u32 lanes) {
  require_written(warp, in, in.b, lanes, "a number of bytes");
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<u32>(__builtin_ctz(rest));
    CopyBarrier& barrier = barrier_at(warp, in, i, address_of_lane(warp, in.address, i));
    if (barrier.missing == 0) fail(warp, in, i, "arrives once too often in a phase");
    --barrier.missing;
    barrier.missing_bytes += in.has_length ? values<u32>(warp, in.b)[i] : 0;
    end_if_complete(barrier);
  }
}

void start(Warp& warp, const Instruction& in, u32 lanes) {
  require_written(warp, in, in.address.base, lanes, "an address");
  require_written(warp, in, in.from.base, lanes, "an address");
  require_written(warp, in, in.barrier.base, lanes, "an address");
  require_written(warp, in, in.c, lanes, "the length of a copy");
  Instruction load = in;
  load.space = Space::kGlobal;
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<u32>(__builtin_ctz(rest));
    const u32 size = values<u32>(warp, in.c)[i];
    const u64 to = address_of_lane(warp, in.address, i), from = address_of_lane(warp, in.from, i);
    const u32 place = own_offset(address_of_lane(warp, in.barrier, i));
    const CopyBarrier& barrier = barrier_at(warp, in, i, place);
    if (!barrier.is_fenced) fail(warp, in, i, "copies with a barrier that no fence has published");
    if (size == 0 || size % kUnit != 0) {
      fail(warp, in, i, "copies " + std::to_string(size) + " bytes at once");
    }
    if (options().checks_shared) {
      check_stores_before_copy(warp, in, i, own_offset(to), size);
    }
    for (u32 k = 0; k < size; k += kUnit) {
      // Not noted as a read, because a wait orders it before writes. It takes no byte from outside
      // of an allocation.
      place_of(warp, load, i, from + k, kUnit, Access::kAtomic);
      const Place unit = place_of(warp, in, i, to + k, kUnit, Access::kWrite);
      std::memset(unit.bytes, 0xff, kUnit);
      std::memset(unit.written, 0, kUnit);
    }
    if (options().checks_shared) {
      note_bulk_copy(*warp.block, own_offset(to), size, barrier);
    }
    warp.block->cluster->copies.push_back(
        {warp.block, reinterpret_cast<const u8*>(from), own_offset(to), size, place});
  }
}

void complete(const BulkCopy& copy) {
  std::memcpy(copy.block->shared.data() + copy.to, copy.from, copy.bytes);
  std::memset(copy.block->shared_written.data() + copy.to, 1, copy.bytes);
  CopyBarrier& barrier = copy.block->copy_barriers.at(copy.barrier);
  barrier.missing_bytes -= copy.bytes;
  end_if_complete(barrier);
}

void fence(Warp& warp, const Instruction&, u32 lanes) {
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) ++warp.proxies[__builtin_ctz(rest)];
}

// No program may rely on the lane that it is, but it is always the same of the same lanes.
void elect(Warp& warp, const Instruction& in, u32 lanes) {
  set_predicate(warp, in.d, lanes, 1u << (kLanes - 1 - static_cast<u32>(__builtin_clz(lanes))));
  set_written(warp, in.d, lanes, kAllLanes);
}

// mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2;
// mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], %r2;
void bind_barrier(Operands& operands, const Words& words, Instruction& in) {
  const bool waits = words.has("try_wait") && words.has("parity");
  const bool arrives = words.has("arrive") && words.arguments.at(0) == "_";
  if (!waits && !arrives && !words.has("init")) throw std::runtime_error("unknown barrier");
  in.defined = Defined::kByItself;
  in.space = Space::kShared;
  in.has_length = words.has("expect_tx");
  if (waits) in.kind = Kind::kCopyWait;
  if (waits) in.d = operands.reg(words.arguments.at(0));
  in.run = arrives ? arrive : init;
  const size_t at = waits || arrives ? 1 : 0;
  in.address = operands.address(words.arguments.at(at));
  if (!arrives || in.has_length) in.b = operands.value(words.arguments.at(at + 1), 4);
}

// elect.sync _|%p1, 0xffffffff;
void bind_election(Operands& operands, const Words& words, Instruction& in) {
  const std::string& result = words.arguments.at(0);
  if (words.name != "elect.sync" || result.compare(0, 2, "_|") != 0) {
    throw std::runtime_error("unknown election");
  }
  in.kind = Kind::kVote;
  in.run = elect;
  in.defined = Defined::kByItself;
  in.d = operands.reg(result.substr(2));
  in.members = operands.value(words.arguments.at(1), 4);
}

}  // namespace

// A lane whose phase goes on gets false, and tries again after another copy has come. If none is
// under way, it waits for other lanes.
u32 try_to_pass(Warp& warp, const Instruction& in, u32 lanes) {
  require_written(warp, in, in.b, lanes, "a parity");
  std::vector<BulkCopy>& copies = warp.block->cluster->copies;
  const bool comes = !copies.empty();
  u32 passed = 0;
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<u32>(__builtin_ctz(rest));
    CopyBarrier& barrier = barrier_at(warp, in, i, address_of_lane(warp, in.address, i));
    if ((barrier.phase & 1) == (values<u32>(warp, in.b)[i] & 1)) continue;
    passed |= 1u << i;
    auto& [phases, at] = barrier.seen[warp.thread(i)];
    if (barrier.phase > phases) at = stamp_of(warp, i);
    phases = barrier.phase;
  }
  if (comes) {
    const size_t k = random_choice(copies.size());
    const BulkCopy copy = copies[k];
    copies.erase(copies.begin() + static_cast<long>(k));
    complete(copy);
  }
  const u32 go_on = comes ? lanes : passed;
  set_predicate(warp, in.d, go_on, passed);
  set_written(warp, in.d, go_on, kAllLanes);
  return go_on;
}

// cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], %r2, [%r3];
void bind_bulk_copy(Operands& operands, const Words& words, Instruction& in) {
  if (words.name != "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes") {
    throw std::runtime_error("unknown copy");
  }
  in.defined = Defined::kByItself;
  in.space = Space::kShared;
  in.run = start;
  in.address = operands.address(words.arguments.at(0));
  in.from = operands.address(words.arguments.at(1));
  in.c = operands.value(words.arguments.at(2), 4);
  in.barrier = operands.address(words.arguments.at(3));
}

void add_bulk_copies(Table& table) {
  table.add_form("mbarrier", bind_barrier);
  table.add_form("elect", bind_election);
  table.add("fence.mbarrier_init.release.cluster", publish, "");
  table.add("fence.proxy.async", fence, "");
  table.add("fence.proxy.async.shared::cta", fence, "");
}

}  // namespace ptx
