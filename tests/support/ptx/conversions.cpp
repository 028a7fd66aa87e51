// Conversions between types.

#include <algorithm>
#include <stdexcept>

#include "floating.h"
#include "table.h"

namespace ptx {
namespace {

const std::unordered_map<std::string, Type> kTypes = {
    {"u8", Type::kU8},   {"s8", Type::kS8},   {"u16", Type::kU16},   {"s16", Type::kS16},
    {"u32", Type::kU32}, {"s32", Type::kS32}, {"u64", Type::kU64},   {"s64", Type::kS64},
    {"f16", Type::kF16}, {"f32", Type::kF32}, {"bf16", Type::kBF16}, {"f64", Type::kF64},
};

constexpr u8 kBytes[] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};
u8 bytes_of(Type type) { return kBytes[static_cast<int>(type)]; }
bool is_floating(Type type) { return type >= Type::kF16; }
bool is_signed(Type type) {
  return type == Type::kS8 || type == Type::kS16 || type == Type::kS32 || type == Type::kS64;
}

u64 low_bytes(u64 bits, u8 bytes) {
  return bytes == 8 ? bits : bits & ((u64{1} << (8 * bytes)) - 1);
}
i64 sign_extended(u64 bits, u8 bytes) {
  const int unused = 64 - 8 * bytes;
  return static_cast<i64>(bits << unused) >> unused;
}

f64 floating_of(Type type, u64 bits) {
  switch (type) {
    case Type::kF16:
      return of_f16(static_cast<u16>(bits));
    case Type::kBF16:
      return of_bf16(static_cast<u16>(bits));
    case Type::kF32:
      return bits_as<f32>(static_cast<u32>(bits));
    default:
      return bits_as<f64>(bits);
  }
}

f64 to_integral(f64 x, char rounding) {
  switch (rounding) {
    case 'n':
      return std::nearbyint(x);
    case 'z':
      return std::trunc(x);
    case 'm':
      return std::floor(x);
    default:
      return std::ceil(x);
  }
}

// The neighbour of the nearest fp32 that lies on the side that was asked for.
f32 to_f32(f64 x, char rounding) {
  const f32 nearest = static_cast<f32>(x);
  const f64 error = static_cast<f64>(nearest) - x;
  if (rounding == 'n' || error == 0 || x != x || std::isinf(x)) return nearest;
  const bool down = rounding == 'm' || (rounding == 'z' && x > 0);
  const bool up = rounding == 'p' || (rounding == 'z' && x < 0);
  if (down && error > 0) return std::nextafter(nearest, -HUGE_VALF);
  if (up && error < 0) return std::nextafter(nearest, HUGE_VALF);
  return nearest;
}

// An integer as a 16-bit float: fp64 holds what decides the rounding of up to 53 bits, and rounding
// by way of fp32 is then mended by its direction.
u64 bits_of_floating(Type type, f64 x, const Conversion& how) {
  if (type == Type::kF64) return bits_as<u64>(canonical(x));
  f32 rounded = to_f32(x, how.rounding);
  if (type != Type::kF32 && rounded != x && std::isfinite(rounded)) {
    // To odd, so that the second rounding meets no tie that the first has made.
    rounded = to_f32(x, 'z');
    rounded = bits_as<f32>(bits_as<u32>(rounded) | 1);
  }
  if (how.saturates) rounded = !(x > 0) ? 0.0f : std::min(rounded, 1.0f);
  if (type == Type::kF16) return to_f16(rounded);
  if (type == Type::kBF16) return to_bf16(rounded);
  if (how.flushes) rounded = flush(rounded);
  return bits_as<u32>(canonical(rounded));
}

u64 floating_of_integer(const Conversion& how, u64 bits) {
  const bool has_sign = is_signed(how.from);
  const i64 number = sign_extended(bits, bytes_of(how.from));
  if (how.to == Type::kF32 && how.rounding == 'n') {  // rounded once, from 64 bits
    return bits_as<u32>(has_sign ? static_cast<f32>(number) : static_cast<f32>(bits));
  }
  return bits_of_floating(how.to, has_sign ? static_cast<f64>(number) : static_cast<f64>(bits),
                          how);
}

// A number out of range becomes the nearest number in range.
u64 integer_of_floating(const Conversion& how, f64 x) {
  const int width = 8 * bytes_of(how.to);
  x = to_integral(x, how.to_integral ? how.rounding : 'z');
  if (x != x) return how.from == Type::kF64 || width == 64 ? u64{1} << (width - 1) : 0;
  const bool has_sign = is_signed(how.to);
  const f64 end = std::ldexp(1.0, has_sign ? width - 1 : width);
  const f64 least = has_sign ? -end : 0.0;
  const u64 greatest = ~u64{0} >> (64 - width + (has_sign ? 1 : 0));
  if (x >= end) return greatest;
  if (x < least) return has_sign ? ~greatest : 0;
  return has_sign ? static_cast<u64>(static_cast<i64>(x)) : static_cast<u64>(x);
}

u64 integer_of_integer(const Conversion& how, u64 bits) {
  if (!is_signed(how.from)) return bits;
  return static_cast<u64>(sign_extended(bits, bytes_of(how.from)));
}

u64 converted(const Conversion& how, u64 bits) {
  if (!is_floating(how.from)) {
    return is_floating(how.to) ? floating_of_integer(how, bits) : integer_of_integer(how, bits);
  }
  f64 x = floating_of(how.from, bits);
  if (how.flushes && how.from == Type::kF32) x = flush(static_cast<f32>(x));
  if (!is_floating(how.to)) return integer_of_floating(how, x);
  if (how.to_integral) x = to_integral(x, how.rounding);
  return bits_of_floating(how.to, x, how);
}

void convert(Warp& warp, const Instruction& in, u32 lanes) {
  const Conversion& how = in.conversion;
  const u8 from = bytes_of(how.from), to = bytes_of(how.to);
  const u8* const a = warp.registers + in.a.offset;
  u8* const d = warp.registers + in.d.offset;
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<size_t>(__builtin_ctz(rest));
    u64 bits = 0;
    std::memcpy(&bits, a + i * in.a.width, in.a.width);
    u64 result = low_bytes(converted(how, low_bytes(bits, from)), to);
    if (is_signed(how.to)) result = static_cast<u64>(sign_extended(result, to));
    std::memcpy(d + i * in.d.width, &result, in.d.width);
  }
}

// The most common conversions, as vector instructions.
template <typename D, typename A>
D plain(A a) {
  return static_cast<D>(a);
}
f32 narrowed(f64 a) { return canonical(static_cast<f32>(a)); }
f64 widened(f32 a) { return canonical(static_cast<f64>(a)); }

struct Fast {
  Type to, from;
  Run run;
};
template <auto F>
constexpr Run run_of() {
  return LanesOf<decltype(F), F>::run;
}
const Fast kFast[] = {
    {Type::kF64, Type::kF32, run_of<widened>()},
    {Type::kF32, Type::kF64, run_of<narrowed>()},
    {Type::kF32, Type::kF16, run_of<of_f16>()},
    {Type::kF32, Type::kBF16, run_of<of_bf16>()},
    {Type::kS64, Type::kS32, run_of<plain<i64, i32>>()},
    {Type::kU64, Type::kU32, run_of<plain<u64, u32>>()},
    {Type::kU32, Type::kU64, run_of<plain<u32, u64>>()},
    {Type::kU32, Type::kU16, run_of<plain<u32, u16>>()},
    {Type::kU16, Type::kU32, run_of<plain<u16, u32>>()},
    {Type::kF32, Type::kS32, run_of<plain<f32, i32>>()},
    {Type::kF64, Type::kS32, run_of<plain<f64, i32>>()},
};

void choose_run(Instruction& in) {
  const Conversion& how = in.conversion;
  in.run = convert;
  if (how.flushes || how.saturates || how.to_integral || how.rounding != 'n') return;
  if (in.d.width != bytes_of(how.to) || in.a.width != bytes_of(how.from)) return;
  for (const Fast& fast : kFast) {
    if (fast.to == how.to && fast.from == how.from) in.run = fast.run;
  }
}

// cvt.rni.ftz.sat.f32.f32: modifiers, then the two types.
void bind_conversion(Operands& operands, const Words& words, Instruction& in) {
  Conversion& how = in.conversion;
  std::vector<Type> types;
  for (size_t i = 1; i < words.parts.size(); ++i) {
    const std::string& part = words.parts[i];
    const bool rounds = part.size() >= 2 && part.size() <= 3 && part[0] == 'r' &&
                        std::strchr("nzmp", part[1]) != nullptr &&
                        (part.size() == 2 || part[2] == 'i');
    if (kTypes.count(part) != 0) {
      types.push_back(kTypes.at(part));
    } else if (rounds) {
      how.rounding = part[1];
      how.to_integral = part.size() == 3;
    } else if (part == "ftz") {
      how.flushes = true;
    } else if (part == "sat") {
      how.saturates = true;
    } else {
      throw std::runtime_error("unknown conversion");
    }
  }
  if (types.size() != 2) throw std::runtime_error("unknown conversion");
  how.to = types[0], how.from = types[1];
  in.d = operands.reg(words.arguments[0]);
  in.a = operands.value(words.arguments[1], bytes_of(how.from));
  if (in.d.width < bytes_of(how.to)) throw std::runtime_error("a register too narrow");
  choose_run(in);
}

template <typename H>
u32 pack(f32 high, f32 low) {
  return static_cast<u32>(H::store(high)) << 16 | H::store(low);
}
template <typename H>
u32 pack_relu(f32 high, f32 low) {
  auto positive = [](f32 x) { return x < 0 ? 0.0f : x; };
  return pack<H>(positive(high), positive(low));
}

}  // namespace

void add_conversions(Table& table) {
  table.add_form("cvt", bind_conversion);
  table.add<pack<BFloat16>>("cvt.rn.bf16x2.f32");
  table.add<pack<Half>>("cvt.rn.f16x2.f32");
  table.add<pack_relu<BFloat16>>("cvt.rn.relu.bf16x2.f32");
  table.add<pack_relu<Half>>("cvt.rn.relu.f16x2.f32");
}

}  // namespace ptx
