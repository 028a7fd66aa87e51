// cp.async: copies from global to shared memory that go on beside their thread. The bytes are read
// at once. They count as written only after the thread has waited for them.

#include <stdexcept>

#include "memory.h"
#include "table.h"

namespace ptx {
namespace {

// Fewer bytes than the copy has leave zeros behind them.
void read_source(Warp& warp, const Instruction& in, u32 lane, u32 size, PendingCopy& copy) {
  if (size == 0) return;
  Instruction load = in;
  load.space = Space::kGlobal;
  const u64 from = address_of_lane(warp, in.from, lane);
  if (from % in.size != 0) fail(warp, in, lane, "copies from an address that is not aligned");
  if (size == in.size) {
    const Place place = place_of(warp, load, lane, from, size, Access::kRead);
    std::memcpy(copy.data, place.bytes, size);
    return;
  }
  for (u32 i = 0; i < size; ++i) {
    copy.data[i] = *place_of(warp, load, lane, from + i, 1, Access::kRead).bytes;
  }
}

void begin(Warp& warp, const Instruction& in, u32 lanes) {
  require_written(warp, in, in.address.base, lanes, "an address");
  require_written(warp, in, in.from.base, lanes, "an address");
  require_written(warp, in, in.c, lanes, "the length of a copy");
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<u32>(__builtin_ctz(rest));
    const u32 size = in.has_length ? values<u32>(warp, in.c)[i] : in.size;
    if (size > in.size) fail(warp, in, i, "copies more than its size");
    PendingCopy copy;
    copy.to = address_of_lane(warp, in.address, i);
    copy.bytes = in.size;
    copy.group = warp.committed[i];
    read_source(warp, in, i, size, copy);
    const Place to = place_of(warp, in, i, copy.to, in.size, Access::kWrite);
    std::memset(to.bytes, 0xff, in.size);
    std::memset(to.written, 0, in.size);
    warp.copies[i].push_back(copy);
  }
}

void commit(Warp& warp, const Instruction&, u32 lanes) {
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) ++warp.committed[__builtin_ctz(rest)];
}

void arrive(Warp& warp, const Instruction& in, u32 lane, const PendingCopy& copy) {
  const Place to = place_of(warp, in, lane, copy.to, copy.bytes, Access::kWrite);
  std::memcpy(to.bytes, copy.data, copy.bytes);
  std::memset(to.written, 1, copy.bytes);
}

// All groups but the last `number`; with option 1, all copies.
void wait(Warp& warp, const Instruction& in, u32 lanes) {
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<u32>(__builtin_ctz(rest));
    auto& copies = warp.copies[i];
    size_t done = 0;
    for (; done < copies.size(); ++done) {
      const bool is_late = copies[done].group + in.number >= warp.committed[i];
      if (in.option == 0 && is_late) break;
      arrive(warp, in, i, copies[done]);
    }
    copies.erase(copies.begin(), copies.begin() + static_cast<long>(done));
  }
}

// cp.async.cg.shared.global [%r1+0], [%rd1+0], 16, %r2;
void bind_copy(Operands& operands, const Words& words, Instruction& in) {
  if (words.parts.at(1) != "async") throw std::runtime_error("unknown copy");
  if (words.has("bulk")) return bind_bulk_copy(operands, words, in);
  in.defined = Defined::kByItself;
  in.space = Space::kShared;  // of the stores: a race names this instruction
  if (words.has("commit_group")) {
    in.run = commit;
  } else if (words.has("wait_all") || words.has("wait_group")) {
    in.run = wait;
    in.option = words.has("wait_all") ? 1 : 0;
    if (in.option == 0) in.number = std::stoll(words.arguments.at(0), nullptr, 0);
  } else if ((words.has("cg") || words.has("ca")) && words.parts.back() == "global") {
    in.run = begin;
    in.address = operands.address(words.arguments.at(0));
    in.from = operands.address(words.arguments.at(1));
    in.size = static_cast<u8>(std::stoul(words.arguments.at(2), nullptr, 0));
    if (words.arguments.size() > 3) in.c = operands.value(words.arguments[3], 4);
    in.has_length = words.arguments.size() > 3;
  } else {
    throw std::runtime_error("unknown copy");
  }
}

}  // namespace

void add_copies(Table& table) { table.add_form("cp", bind_copy); }

}  // namespace ptx
