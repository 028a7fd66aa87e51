// Loads, stores and atomics.

#include "memory.h"

#include <stdexcept>

#include "allocations.h"
#include "options.h"
#include "races.h"
#include "table.h"
#include "text.h"

namespace ptx {
namespace {

constexpr u64 kOffsetMask = 0xffffffff;

const u8* stored = nullptr;  // by the store that runs
Range known;                 // an allocation that was found before

bool is_same(const u8* there, u32 size) {
  return stored != nullptr && std::memcmp(there, stored, size) == 0;
}

void require_aligned(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 size) {
  if (address % size == 0) return;
  fail(warp, in, lane,
       "touches " + hex(address) + ", which is not aligned to " + std::to_string(size) + " bytes");
}

Place in_parameters(Warp& warp, const Instruction& in, u32 lane, u64 offset, u32 size,
                    Access access) {
  require_aligned(warp, in, lane, offset, size);
  if (access != Access::kRead || offset + size > warp.kernel->parameter_bytes) {
    fail(warp, in, lane,
         "touches byte " + std::to_string(offset) + " of parameters of " +
             std::to_string(warp.kernel->parameter_bytes));
  }
  return {const_cast<u8*>(warp.launch->parameters) + offset, nullptr, false};
}

// Local memory and arguments: of each lane, its bytes and then whether they were written.
Place in_private(Warp& warp, const Instruction& in, u32 lane, u8* memory, u32 bytes, u64 offset,
                 u32 size) {
  require_aligned(warp, in, lane, offset, size);
  if (offset + size > bytes) {
    fail(warp, in, lane,
         "touches byte " + std::to_string(offset) + " of local memory of " + std::to_string(bytes));
  }
  u8* const own = memory + size_t{2} * bytes * lane;
  return {own + offset, own + bytes + offset, false};
}

Place in_shared(Warp& warp, const Instruction& in, u32 lane, u32 rank, u64 offset, u32 size,
                Access access) {
  require_aligned(warp, in, lane, offset, size);
  const auto& blocks = warp.block->cluster->blocks;
  if (rank >= blocks.size()) {
    fail(warp, in, lane,
         "touches shared memory of rank " + std::to_string(rank) + " of a cluster of " +
             std::to_string(blocks.size()));
  }
  Block& owner = *blocks[rank];
  if (owner.live == 0) {
    fail(warp, in, lane,
         "touches shared memory of a block that has ended, block " + std::to_string(owner.index));
  }
  if (offset < kSharedBase || offset + size > owner.shared.size()) {
    fail(warp, in, lane,
         "touches byte " + std::to_string(static_cast<i64>(offset) - kSharedBase) +
             " of shared memory of " + std::to_string(owner.shared.size() - kSharedBase) +
             " bytes");
  }
  if (&owner != warp.block) {
    owner.is_read_remotely = true;
    owner.last_remote_arrival = std::max(owner.last_remote_arrival, warp.arrivals[lane]);
  }
  u8* const bytes = owner.shared.data() + offset;
  if (options().checks_shared) {
    const bool writes = access != Access::kRead;
    note_shared(owner, warp, in, lane, offset, size, writes, is_same(bytes, size));
  }
  return {bytes, owner.shared_written.data() + offset, false};
}

// A load may take the rest of the 16 bytes in which an allocation begins or ends.
bool is_inside(const Range& range, u64 address, u32 size, bool writes) {
  const u64 begin = writes ? range.begin : range.begin & ~u64{15};
  const u64 end = writes ? range.end : round_up(range.end, 16);
  return range.end != 0 && address >= begin && address + size <= end;
}

Place in_global(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 size, Access access) {
  require_aligned(warp, in, lane, address, size);
  const bool writes = access != Access::kRead;
  if (!is_inside(known, address, size, writes)) {
    known = allocation_around(address);
    if (!is_inside(known, address, size, writes)) {
      const std::string near =
          known.end == 0 ? "of every allocation"
                         : "of the allocation [" + hex(known.begin) + ", " + hex(known.end) + ")";
      fail(warp, in, lane,
           (writes ? "writes " : "reads ") + std::to_string(size) + " bytes at " + hex(address) +
               ", outside " + near);
    }
  }
  u8* const bytes = reinterpret_cast<u8*>(address);
  if (options().checks_global && access != Access::kAtomic) {
    note_global(warp, in, lane, address, size, writes, is_same(bytes, size));
  }
  return {bytes, nullptr, true};
}

[[noreturn]] void fail_window(Warp& warp, const Instruction& in, u32 lane, u64 address) {
  fail(warp, in, lane, "touches " + hex(address) + ", which is in another space");
}

Place in_generic(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 size,
                 Access access) {
  const u64 offset = address & ~kWindowMask;
  const Kernel& kernel = *warp.kernel;
  switch (address & kWindowMask) {
    case 0:
      return in_global(warp, in, lane, address, size, access);
    case kSharedWindow:
      return in_shared(warp, in, lane, static_cast<u32>(offset >> 32), offset & kOffsetMask, size,
                       access);
    case kLocalWindow:
      return in_private(warp, in, lane, warp.local, kernel.local_bytes, offset, size);
    case kParameterWindow:
      return in_parameters(warp, in, lane, offset, size, access);
    case kArgumentWindow:
      return in_private(warp, in, lane, warp.arguments, kernel.argument_bytes, offset, size);
    default:
      fail_window(warp, in, lane, address);
  }
}

}  // namespace

u64 address_of_lane(Warp& warp, const Address& address, u32 lane) {
  const auto offset = static_cast<u64>(address.offset);
  if (!address.has_base) return offset;
  if (address.base.width == 4) return values<u32>(warp, address.base)[lane] + offset;
  return values<u64>(warp, address.base)[lane] + offset;
}

Place place_of(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 size, Access access) {
  const u64 window = address & kWindowMask;
  switch (in.space) {
    case Space::kGlobal:
      if (window != 0) fail_window(warp, in, lane, address);
      return in_global(warp, in, lane, address, size, access);
    case Space::kShared: {
      // A shared address has 32 bits, or it is in this block's window.
      const bool is_own = window == kSharedWindow && (address >> 32 & 0xffffff) == warp.block->rank;
      if (window != 0 && !is_own) fail_window(warp, in, lane, address);
      return in_shared(warp, in, lane, warp.block->rank, address & kOffsetMask, size, access);
    }
    case Space::kLocal:
      if (window != 0 && window != kLocalWindow) fail_window(warp, in, lane, address);
      return in_private(warp, in, lane, warp.local, warp.kernel->local_bytes, address & kOffsetMask,
                        size);
    case Space::kParameter:
      if (window != kParameterWindow && window != kArgumentWindow) {
        fail_window(warp, in, lane, address);
      }
      return in_generic(warp, in, lane, address, size, access);
    default:
      return in_generic(warp, in, lane, address, size, access);
  }
}

void set_stored(const u8* bytes) { stored = bytes; }
void forget_allocations() { known = {}; }

namespace {

// A value of 8 bytes may be a structure that is copied with its padding.
bool is_any_written(const u8* written, u32 size) {
  for (u32 i = 0; i < size; ++i) {
    if (written[i] != 0) return true;
  }
  return false;
}

u64 load_element(const Instruction& in, const u8* from) {
  u64 value = 0;
  std::memcpy(&value, from, in.size);
  if (!in.is_signed || in.size == 8) return value;
  const int unused = 64 - 8 * in.size;
  return static_cast<u64>(static_cast<i64>(value << unused) >> unused);
}

void load(Warp& warp, const Instruction& in, u32 lanes) {
  if (in.address.has_base) require_written(warp, in, in.address.base, lanes, "an address");
  const u32 size = u32{in.size} * in.count;
  u32 written[kMostElements] = {};
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<u32>(__builtin_ctz(rest));
    const Place from =
        place_of(warp, in, i, address_of_lane(warp, in.address, i), size, Access::kRead);
    for (u32 k = 0; k < in.count; ++k) {
      const Operand& to = in.elements[k];
      const u64 value = load_element(in, from.bytes + k * in.size);
      if (to.id == 0) continue;
      std::memcpy(warp.registers + to.offset + size_t{i} * to.width, &value, to.width);
      const bool is_written =
          from.written == nullptr || is_any_written(from.written + k * in.size, in.size);
      written[k] |= static_cast<u32>(is_written) << i;
    }
  }
  for (u32 k = 0; k < in.count; ++k) set_written(warp, in.elements[k], lanes, written[k]);
}

void store(Warp& warp, const Instruction& in, u32 lanes) {
  if (in.address.has_base) require_written(warp, in, in.address.base, lanes, "an address");
  const u32 size = u32{in.size} * in.count;
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<u32>(__builtin_ctz(rest));
    u8 bytes[8 * kMostElements];
    for (u32 k = 0; k < in.count; ++k) {
      const Operand& from = in.elements[k];
      std::memcpy(bytes + k * in.size, warp.registers + from.offset + size_t{i} * from.width,
                  in.size);
    }
    set_stored(bytes);
    const Place to =
        place_of(warp, in, i, address_of_lane(warp, in.address, i), size, Access::kWrite);
    set_stored(nullptr);
    std::memcpy(to.bytes, bytes, size);
    if (to.is_global) warp.fenced &= ~(1u << i);
    for (u32 k = 0; k < in.count; ++k) {
      const bool is_written = (written_lanes(warp, in.elements[k]) >> i & 1) != 0;
      if (to.written != nullptr) {
        std::memset(to.written + k * in.size, is_written ? 1 : 0, in.size);
      } else if (!is_written) {
        require_written(warp, in, in.elements[k], 1u << i, "what reaches global memory");
      }
    }
  }
}

Space space_in(const Words& words) {
  for (size_t i = 1; i < words.parts.size() && i < 3; ++i) {
    const std::string space = split(words.parts[i], ':')[0];  // "shared::cta"
    if (space == "global") return Space::kGlobal;
    if (space == "shared") return Space::kShared;
    if (space == "local") return Space::kLocal;
    if (space == "param") return Space::kParameter;
  }
  return Space::kGeneric;
}

u8 elements_in(const Words& words) {
  for (const std::string& part : words.parts) {
    if (part == "v2" || part == "v4" || part == "v8") return static_cast<u8>(part[1] - '0');
  }
  return 1;
}

// ld.global.nc.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1+16]; caches do not matter here.
void bind_access(Operands& operands, const Words& words, Instruction& in) {
  const bool loads = words.parts[0] == "ld";
  for (const char* unknown : {"acquire", "release", "relaxed", "mmio", "unified"}) {
    if (words.has(unknown)) throw std::runtime_error("unknown access");
  }
  in.space = space_in(words);
  in.is_read_only = words.has("nc");
  in.count = elements_in(words);
  in.size = static_cast<u8>(bytes_of_type(words.parts.back()));
  in.is_signed = words.parts.back()[0] == 's';
  in.defined = Defined::kByItself;
  in.run = loads ? load : store;
  in.address = operands.address(words.arguments.at(loads ? 1 : 0));
  const std::string& value = words.arguments.at(loads ? 0 : 1);
  const auto names = value[0] == '{' ? Operands::elements(value) : std::vector<std::string>{value};
  if (names.size() != in.count) throw std::runtime_error("another number of elements");
  for (size_t k = 0; k < names.size(); ++k) {
    if (loads && names[k] == "_") continue;
    const u8 least = std::max<u8>(in.size, loads ? 1 : 2);
    in.elements[k] =
        loads ? operands.reg(names[k])
              : operands.value(names[k], operands.is_register(names[k]) ? in.size : least);
    if (in.elements[k].width < in.size) throw std::runtime_error("the width of " + names[k]);
  }
}

u32 combined(u8 option, u32 before, u32 by) {
  switch (option) {
    case 0:
      return before + by;
    case 1:
      return by;
    case 2:
      return std::max(before, by);
    default:
      return std::min(before, by);
  }
}

// Runs the lanes of a warp one after the other. The thread must have fenced its earlier writes.
// Otherwise its arrival would announce numbers that other threads may not see yet.
void atomic(Warp& warp, const Instruction& in, u32 lanes) {
  require_written(warp, in, in.b, lanes, "an operand of an atomic");
  if (in.address.has_base) require_written(warp, in, in.address.base, lanes, "an address");
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<u32>(__builtin_ctz(rest));
    const Place at =
        place_of(warp, in, i, address_of_lane(warp, in.address, i), 4, Access::kAtomic);
    if (in.has_fences) note_fence(warp, 1u << i);  // .acq_rel: a fence before and after
    if (at.is_global && (warp.fenced >> i & 1) == 0) {
      fail(warp, in, i, "counts without a fence before it");
    }
    u32 before = 0;
    std::memcpy(&before, at.bytes, 4);
    const u32 after = combined(in.option, before, values<u32>(warp, in.b)[i]);
    std::memcpy(at.bytes, &after, 4);
    if (in.d.id != 0) values<u32>(warp, in.d)[i] = before;
    if (at.is_global) note_atomic(warp, i);
    if (in.has_fences) note_fence(warp, 1u << i);
  }
  set_written(warp, in.d, lanes, kAllLanes);
}

// atom.global.add.u32 %r1, [%rd1], 1; red has no result.
void bind_atomic(Operands& operands, const Words& words, Instruction& in) {
  const bool has_result = words.parts[0] == "atom";
  const std::string& type = words.parts.back();
  in.space = space_in(words);
  in.option = words.has("add") ? 0 : words.has("exch") ? 1 : words.has("max") ? 2 : 3;
  const bool is_known = words.has("add") || words.has("exch") ||
                        ((words.has("max") || words.has("min")) && type == "u32");
  if (!is_known || (type != "u32" && type != "s32" && type != "b32")) {
    throw std::runtime_error("unknown atomic");
  }
  in.has_fences = words.has("acq_rel");
  in.defined = Defined::kByItself;
  in.run = atomic;
  if (has_result) in.d = operands.reg(words.arguments.at(0));
  in.address = operands.address(words.arguments.at(has_result ? 1 : 0));
  in.b = operands.value(words.arguments.at(has_result ? 2 : 1), 4);
}

void fence(Warp& warp, const Instruction&, u32 lanes) { note_fence(warp, lanes); }

}  // namespace

void add_memory(Table& table) {
  table.add_form("ld", bind_access);
  table.add_form("st", bind_access);
  table.add_form("atom", bind_atomic);
  table.add_form("red", bind_atomic);
  for (const char* name : {"membar.gl", "membar.sys", "fence.acq_rel.gpu", "fence.sc.gpu",
                           "fence.acq_rel.sys", "fence.sc.sys"}) {
    table.add(name, fence, "");
  }
}

}  // namespace ptx
