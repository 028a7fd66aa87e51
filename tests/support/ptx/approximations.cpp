// Instructions that a device computes approximately. Here their results are the nearest, or, where
// KLFAST_PTX_PERTURB says so, off by some units in the last place: the same for the same operands.

#include <algorithm>

#include "floating.h"
#include "options.h"
#include "table.h"

namespace ptx {
namespace {

u32 mixed(u32 bits) {
  bits ^= bits >> 15;
  bits *= 2246822519u;
  return bits ^ bits >> 13;
}

f32 perturbed(f32 x, u32 operand, int most) {
  most = std::min(most, options().perturb);
  if (most == 0 || !std::isfinite(x) || x == 0) return x;
  const u32 choice = mixed(operand * 2654435761u ^ static_cast<u32>(options().seed * 40503));
  const int by = static_cast<int>(choice % static_cast<u32>(2 * most + 1)) - most;
  const f32 moved = bits_as<f32>(bits_as<u32>(x) + static_cast<u32>(by));
  return std::fabs(moved) < kLeastNormal || !std::isfinite(moved) ? x : moved;
}

constexpr int kMost = 1000;  // what the option says is not limited
constexpr int kOne = 1;      // rcp is within one unit
constexpr int kTwo = 2;      // div.full is within two

template <bool kFlush>
f32 ex2(f32 a) {
  const f32 x = flush_if<kFlush>(a);
  if (x != x) return canonical(x);
  const f32 nearest = flush_if<kFlush>(static_cast<f32>(std::exp2(static_cast<f64>(x))));
  const bool is_exact = x == std::rint(x);
  return is_exact ? nearest : perturbed(nearest, bits_as<u32>(a), kMost);
}
template <bool kFlush>
f32 lg2(f32 a) {
  const f64 x = flush_if<kFlush>(a);
  return canonical(perturbed(static_cast<f32>(std::log2(x)), bits_as<u32>(a), kMost));
}
template <bool kFlush>
f32 rcp(f32 a) {
  const f64 x = flush_if<kFlush>(a);
  const f32 nearest = flush_if<kFlush>(static_cast<f32>(1.0 / x));
  return canonical(perturbed(nearest, bits_as<u32>(a), kOne));
}
template <bool kFlush>
f32 div(f32 a, f32 b) {
  const f32 nearest = flush_if<kFlush>(flush_if<kFlush>(a) / flush_if<kFlush>(b));
  return canonical(perturbed(nearest, bits_as<u32>(a) * 31 + bits_as<u32>(b), kTwo));
}
template <bool kFlush>
f32 rsqrt(f32 a) {
  const f64 x = flush_if<kFlush>(a);
  return canonical(perturbed(static_cast<f32>(1.0 / std::sqrt(x)), bits_as<u32>(a), kTwo));
}
template <bool kFlush>
f32 sqrt(f32 a) {
  return canonical(perturbed(std::sqrt(flush_if<kFlush>(a)), bits_as<u32>(a), kOne));
}
template <bool kFlush>
f32 tanh(f32 a) {
  const f64 x = flush_if<kFlush>(a);
  return canonical(perturbed(static_cast<f32>(std::tanh(x)), bits_as<u32>(a), kMost));
}
// The upper half alone: the operand's lower half counts as 0, and so does the result's.
f64 rcp64(f64 a) {
  constexpr u64 kUpper = ~u64{0} << 32;
  const f64 result = flush(1.0 / flush(bits_as<f64>(bits_as<u64>(a) & kUpper)));
  return std::isfinite(result) ? bits_as<f64>(bits_as<u64>(result) & kUpper) : canonical(result);
}

template <bool kFlush>
void add_of_fp32(Table& table, const std::string& type) {
  table.add<ex2<kFlush>>("ex2.approx." + type);
  table.add<lg2<kFlush>>("lg2.approx." + type);
  table.add<rcp<kFlush>>("rcp.approx." + type);
  table.add<rsqrt<kFlush>>("rsqrt.approx." + type);
  table.add<sqrt<kFlush>>("sqrt.approx." + type);
  table.add<div<kFlush>>("div.approx." + type);
  table.add<div<kFlush>>("div.full." + type);
}

}  // namespace

void add_approximations(Table& table) {
  add_of_fp32<false>(table, "f32");
  add_of_fp32<true>(table, "ftz.f32");
  table.add<tanh<false>>("tanh.approx.f32");
  table.add<rcp64>("rcp.approx.ftz.f64");
}

}  // namespace ptx
