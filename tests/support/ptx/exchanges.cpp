// Exchanges between the lanes of a warp. They run when all lanes of the mask have arrived.

#include <algorithm>
#include <stdexcept>

#include "memory.h"
#include "table.h"
#include "text.h"

namespace ptx {
namespace {

enum Mode : u8 { kUp, kDown, kButterfly, kIndex };

struct Choice {
  u32 lane;
  bool is_inside;
};

// `limits`: the last lane of a segment, and above 8 bits those bits of a lane that say its segment.
Choice choose(Mode mode, u32 lane, u32 by, u32 limits) {
  const u32 clamp = limits & 31, segment = limits >> 8 & 31;
  const auto last = static_cast<int>((lane & segment) | (clamp & ~segment));
  const auto me = static_cast<int>(lane), distance = static_cast<int>(by & 31);
  int from = 0;
  switch (mode) {
    case kUp:
      from = me - distance;
      break;
    case kDown:
      from = me + distance;
      break;
    case kButterfly:
      from = me ^ distance;
      break;
    default:
      from = static_cast<int>((lane & segment) | (by & 31 & ~segment));
  }
  const bool is_inside = mode == kUp ? from >= last : from <= last;
  return {is_inside ? static_cast<u32>(from) : lane, is_inside};
}

void shuffle(Warp& warp, const Instruction& in, u32 lanes) {
  u32 before[kLanes];
  std::memcpy(before, values<u32>(warp, in.a), sizeof before);
  const u32 of_value = written_lanes(warp, in.a);
  const u32 of_choice = written_lanes(warp, in.b) & written_lanes(warp, in.c);
  u32 written = 0, inside = 0;
  u32* const d = values<u32>(warp, in.d);
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<u32>(__builtin_ctz(rest));
    const Choice choice = choose(static_cast<Mode>(in.option), i, values<u32>(warp, in.b)[i],
                                 values<u32>(warp, in.c)[i]);
    if ((lanes >> choice.lane & 1) == 0) {
      fail(warp, in, i, "asks lane " + std::to_string(choice.lane) + ", which takes no part");
    }
    d[i] = before[choice.lane];
    inside |= static_cast<u32>(choice.is_inside) << i;
    written |= (of_value >> choice.lane & of_choice >> i & 1) << i;
  }
  set_written(warp, in.d, lanes, written);
  if (in.e.id == 0) return;
  set_predicate(warp, in.e, lanes, inside);
  set_written(warp, in.e, lanes, of_choice);
}

// shfl.sync.bfly.b32 %r1|%p1, %r2, 16, 31, -1;
void bind_shuffle(Operands& operands, const Words& words, Instruction& in) {
  static const std::unordered_map<std::string, Mode> modes = {
      {"up", kUp}, {"down", kDown}, {"bfly", kButterfly}, {"idx", kIndex}};
  if (words.parts.at(1) != "sync" || words.parts.back() != "b32") {
    throw std::runtime_error("unknown exchange");
  }
  const auto results = split(words.arguments.at(0), '|');
  in.kind = Kind::kExchange;
  in.run = shuffle;
  in.option = modes.at(words.parts.at(2));
  in.defined = Defined::kByItself;
  in.d = operands.reg(results[0]);
  if (results.size() > 1) in.e = operands.reg(results[1]);
  in.a = operands.value(words.arguments.at(1), 4);
  in.b = operands.value(words.arguments.at(2), 4);
  in.c = operands.value(words.arguments.at(3), 4);
  in.members = operands.value(words.arguments.at(4), 4);
}

u32 reduced(u8 option, bool is_signed, u32 a, u32 b) {
  const auto x = static_cast<i32>(a), y = static_cast<i32>(b);
  switch (option) {
    case 0:
      return a + b;
    case 1:
      return is_signed ? static_cast<u32>(std::min(x, y)) : std::min(a, b);
    case 2:
      return is_signed ? static_cast<u32>(std::max(x, y)) : std::max(a, b);
    case 3:
      return a & b;
    case 4:
      return a | b;
    default:
      return a ^ b;
  }
}

void reduce(Warp& warp, const Instruction& in, u32 lanes) {
  const u32* const a = values<u32>(warp, in.a);
  const auto first = static_cast<u32>(__builtin_ctz(lanes));
  u32 all = a[first];
  for (u32 rest = lanes & (lanes - 1); rest != 0; rest &= rest - 1) {
    all = reduced(in.option, in.is_signed, all, a[__builtin_ctz(rest)]);
  }
  u32* const d = values<u32>(warp, in.d);
  each_lane(lanes, [=](u32 i) { d[i] = all; });
  const bool is_written = (lanes & ~written_lanes(warp, in.a)) == 0;
  set_written(warp, in.d, lanes, is_written ? kAllLanes : 0);
}

// redux.sync.add.u32 %r1, %r2, -1;
void bind_reduction(Operands& operands, const Words& words, Instruction& in) {
  static const std::vector<std::string> names = {"add", "min", "max", "and", "or", "xor"};
  const auto name = std::find(names.begin(), names.end(), words.parts.at(2));
  const std::string& type = words.parts.back();
  if (name == names.end() || (type != "u32" && type != "s32" && type != "b32")) {
    throw std::runtime_error("unknown reduction");
  }
  in.kind = Kind::kExchange;
  in.run = reduce;
  in.option = static_cast<u8>(name - names.begin());
  in.is_signed = type == "s32";
  in.defined = Defined::kByItself;
  in.d = operands.reg(words.arguments.at(0));
  in.a = operands.value(words.arguments.at(1), 4);
  in.members = operands.value(words.arguments.at(2), 4);
}

void vote(Warp& warp, const Instruction& in, u32 lanes) {
  require_written(warp, in, in.a, lanes, "a vote");
  const u32 all = predicate(warp, in.a);
  const u32 votes = (in.negates_vote ? ~all : all) & lanes;
  if (in.option == 0) {
    u32* const d = values<u32>(warp, in.d);
    each_lane(lanes, [=](u32 i) { d[i] = votes; });
  } else {
    const bool yes = in.option == 1   ? votes != 0
                     : in.option == 2 ? votes == lanes
                                      : votes == lanes || votes == 0;
    set_predicate(warp, in.d, lanes, yes ? kAllLanes : 0);
  }
  set_written(warp, in.d, lanes, kAllLanes);
}

// vote.sync.any.pred %p1, !%p2, -1;
void bind_vote(Operands& operands, const Words& words, Instruction& in) {
  static const std::vector<std::string> names = {"ballot", "any", "all", "uni"};
  const auto name = std::find(names.begin(), names.end(), words.parts.at(2));
  if (words.parts.at(1) != "sync" || name == names.end()) throw std::runtime_error("unknown vote");
  std::string operand = words.arguments.at(1);
  in.negates_vote = operand[0] == '!';
  if (in.negates_vote) operand = operand.substr(1);
  in.kind = Kind::kVote;
  in.run = vote;
  in.option = static_cast<u8>(name - names.begin());
  in.defined = Defined::kByItself;
  in.d = operands.reg(words.arguments.at(0));
  in.a = operands.value(operand, 0);
  in.members = operands.value(words.arguments.at(2), 4);
}

// Rows of 16 bytes, whose addresses eight lanes give for each matrix; four lanes share a row.
void load_matrices(Warp& warp, const Instruction& in, u32 lanes) {
  if (lanes != kAllLanes) fail(warp, in, 0, "is not executed by the whole warp");
  constexpr u32 kRows = 8, kRowBytes = 16;
  const u32 giving = in.count == 4 ? kAllLanes : (1u << (kRows * in.count)) - 1;
  require_written(warp, in, in.address.base, giving, "an address");
  for (u32 k = 0; k < in.count; ++k) {
    const Operand& to = in.elements[k];
    u32 written = 0;
    for (u32 row = 0; row < kRows; ++row) {
      const u32 giver = k * kRows + row;
      const u64 address = address_of_lane(warp, in.address, giver);
      const Place from = place_of(warp, in, giver, address, kRowBytes, Access::kRead);
      for (u32 part = 0; part < kRowBytes / in.size; ++part) {
        const u32 lane = row * 4 + part;
        std::memcpy(values<u32>(warp, to) + lane, from.bytes + part * in.size, in.size);
        const u8* const known = from.written + part * in.size;
        written |= static_cast<u32>(std::find(known, known + in.size, 0) == known + in.size)
                   << lane;
      }
    }
    set_written(warp, to, lanes, written);
  }
}

// ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];
void bind_matrices(Operands& operands, const Words& words, Instruction& in) {
  const auto parts = Operands::elements(words.arguments.at(0));
  const std::string count = "x" + std::to_string(parts.size());
  if (words.name != "ldmatrix.sync.aligned.m8n8." + count + ".shared.b16") {
    throw std::runtime_error("unknown load of matrices");
  }
  in.kind = Kind::kExchange;
  in.run = load_matrices;
  in.space = Space::kShared;
  in.count = static_cast<u8>(parts.size());
  in.size = 4;  // bytes that a lane gets of a matrix
  in.defined = Defined::kByItself;
  for (size_t k = 0; k < parts.size(); ++k) in.elements[k] = operands.reg(parts[k]);
  in.address = operands.address(words.arguments.at(1));
  in.members = operands.value("-1", 4);
}

}  // namespace

void add_exchanges(Table& table) {
  table.add_form("ldmatrix", bind_matrices);
  table.add_form("shfl", bind_shuffle);
  table.add_form("redux", bind_reduction);
  table.add_form("vote", bind_vote);
}

}  // namespace ptx
