// Copies between registers, and addresses: of variables, of windows, of other blocks of a cluster.

#include <stdexcept>

#include "table.h"
#include "text.h"

namespace ptx {
namespace {

template <typename T>
T same(T a) {
  return a;
}

void write_number(Warp& warp, const Instruction& in, u32 lanes) {
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<size_t>(__builtin_ctz(rest));
    std::memcpy(warp.registers + in.d.offset + i * in.d.width, &in.number, in.d.width);
  }
}

// mov.b64 %rd, {%r1, %r2}
void pack(Warp& warp, const Instruction& in, u32 lanes) {
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<size_t>(__builtin_ctz(rest));
    u8* to = warp.registers + in.d.offset + i * in.d.width;
    for (int k = 0; k < in.count; ++k) {
      const Operand& part = in.elements[k];
      std::memcpy(to, warp.registers + part.offset + i * part.width, part.width);
      to += part.width;
    }
  }
  u32 written = 0;
  for (int k = 0; k < in.count; ++k) written |= written_lanes(warp, in.elements[k]);
  set_written(warp, in.d, lanes, written);
}

// mov.b64 {%r1, _}, %rd: "_" takes nothing.
void unpack(Warp& warp, const Instruction& in, u32 lanes) {
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<size_t>(__builtin_ctz(rest));
    const u8* from = warp.registers + in.a.offset + i * in.a.width;
    for (int k = 0; k < in.count; ++k) {
      const Operand& part = in.elements[k];
      if (part.id != 0) {
        std::memcpy(warp.registers + part.offset + i * part.width, from, part.width);
      }
      from += part.width;
    }
  }
  const u32 written = written_lanes(warp, in.a);
  for (int k = 0; k < in.count; ++k) set_written(warp, in.elements[k], lanes, written);
}

void bind_vector(Operands& operands, const Words& words, Instruction& in) {
  const bool packs = words.arguments[1][0] == '{';
  const auto parts = Operands::elements(words.arguments[packs ? 1 : 0]);
  const int bytes = bytes_of_type(words.parts[1]);
  if (parts.size() > kMostElements) throw std::runtime_error("a vector too long");
  in.count = static_cast<u8>(parts.size());
  const auto width = static_cast<u8>(bytes / in.count);
  for (size_t k = 0; k < parts.size(); ++k) {
    if (parts[k] == "_") {
      in.elements[k].width = width;
    } else {
      in.elements[k] = packs ? operands.value(parts[k], width) : operands.reg(parts[k]);
    }
    if (in.elements[k].width != width) throw std::runtime_error("the width of " + parts[k]);
  }
  in.defined = Defined::kByItself;
  in.run = packs ? pack : unpack;
  if (packs) {
    in.d = operands.reg(words.arguments[0]);
  } else {
    in.a = operands.value(words.arguments[1], static_cast<u8>(bytes));
  }
}

void bind_move(Operands& operands, const Words& words, Instruction& in) {
  const std::string& from = words.arguments.at(1);
  if (words.arguments[0][0] == '{' || from[0] == '{') return bind_vector(operands, words, in);
  in.d = operands.reg(words.arguments[0]);
  if (in.d.width != bytes_of_type(words.parts.at(1))) throw std::runtime_error("unknown move");
  const bool is_name =
      std::isalpha(static_cast<unsigned char>(from[0])) || from[0] == '_' || from[0] == '$';
  if (is_name && !operands.is_register(from) && from != "WARP_SZ") {
    in.number = static_cast<i64>(operands.address_of(from));
    in.run = write_number;
    return;
  }
  in.a = operands.value(from, in.d.width);
  in.run = in.d.width == 2   ? LanesOf<u16 (*)(u16), same<u16>>::run
           : in.d.width == 4 ? LanesOf<u32 (*)(u32), same<u32>>::run
                             : LanesOf<u64 (*)(u64), same<u64>>::run;
}

u64 window_of(const Warp& warp, Space space) {
  switch (space) {
    case Space::kShared:
      return kSharedWindow | static_cast<u64>(warp.block->rank) << 32;
    case Space::kLocal:
      return kLocalWindow;
    default:
      return 0;  // global addresses are the host's; parameters' addresses already have their window
  }
}

void to_generic(Warp& warp, const Instruction& in, u32 lanes) {
  u64 *const d = values<u64>(warp, in.d), *const a = values<u64>(warp, in.a);
  const u64 window = window_of(warp, in.space);
  each_lane(lanes, [=](u32 i) { d[i] = a[i] | window; });
}

void from_generic(Warp& warp, const Instruction& in, u32 lanes) {
  u64 *const d = values<u64>(warp, in.d), *const a = values<u64>(warp, in.a);
  const u64 window = window_of(warp, in.space);
  const u64 mask = in.space == Space::kShared ? ~u64{0xffffffff} : kWindowMask;
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<u32>(__builtin_ctz(rest));
    if ((a[i] & mask) != window) fail(warp, in, i, "converts an address of another space");
    d[i] = a[i] & ~mask;
  }
}

// cvta.to.shared.u64, cvta.shared.u64
void bind_window(Operands& operands, const Words& words, Instruction& in) {
  const bool from = words.has("to");
  const std::string& space = words.parts[from ? 2 : 1];
  if (words.parts.back() != "u64") throw std::runtime_error("addresses of 64 bits alone");
  in.space = space == "shared" ? Space::kShared : space == "local" ? Space::kLocal : Space::kGlobal;
  in.d = operands.reg(words.arguments[0]);
  in.a = operands.value(words.arguments[1], 8);
  in.run = from && space != "param" ? from_generic : to_generic;
}

// mapa.u64: the same place in the shared memory of another block of the cluster.
void map_to_rank(Warp& warp, const Instruction& in, u32 lanes) {
  u64 *const d = values<u64>(warp, in.d), *const a = values<u64>(warp, in.a);
  const u32* const ranks = values<u32>(warp, in.b);
  const size_t size = warp.block->cluster->blocks.size();
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<u32>(__builtin_ctz(rest));
    if ((a[i] & kWindowMask) != kSharedWindow) {
      fail(warp, in, i, "maps " + hex(a[i]) + ", which is no address of shared memory");
    }
    if (ranks[i] >= size) {
      fail(warp, in, i,
           "maps to rank " + std::to_string(ranks[i]) + " of a cluster of " + std::to_string(size));
    }
    d[i] = kSharedWindow | static_cast<u64>(ranks[i]) << 32 | (a[i] & 0xffffffff);
  }
}

}  // namespace

void add_moves(Table& table) {
  table.add_form("mov", bind_move);
  table.add_form("cvta", bind_window);
  table.add("mapa.u64", map_to_rank, "qqw");
}

}  // namespace ptx
