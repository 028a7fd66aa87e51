// Arithmetic of bf16 and fp16, alone and in pairs (.bf16x2, .f16x2). It is done in fp32 and rounded
// once more, which for sums, products and extremes of 16 bits is the result rounded once; a fused
// product is done in fp64.

#include "floating.h"
#include "table.h"

namespace ptx {
namespace {

template <typename H, f32 (*F)(f32, f32)>
u16 of_two(u16 a, u16 b) {
  return H::store(F(H::load(a), H::load(b)));
}

f32 add(f32 a, f32 b) { return a + b; }
f32 sub(f32 a, f32 b) { return a - b; }
f32 mul(f32 a, f32 b) { return a * b; }

// A sum in fp64 is rounded to odd before it is rounded to fp32, so that no tie is made up.
template <typename H>
u16 fma(u16 a, u16 b, u16 c) {
  const f64 product = static_cast<f64>(H::load(a)) * H::load(b);
  const f64 addend = H::load(c), sum = product + addend;
  const f64 part = sum - product;
  const f64 lost = (product - (sum - part)) + (addend - part);
  f64 odd = sum;
  if (lost != 0 && std::isfinite(sum) && (bits_as<u64>(sum) & 1) == 0) {
    odd = std::nextafter(sum, lost > 0 ? HUGE_VAL : -HUGE_VAL);
  }
  // A sum that fp32 cannot represent stays inexact there too: its last bit is set.
  f32 rounded = static_cast<f32>(odd);
  if (std::isfinite(rounded) && rounded != odd) {
    if (std::fabs(static_cast<f64>(rounded)) > std::fabs(odd)) {
      rounded = std::nextafter(rounded, 0.0f);
    }
    rounded = bits_as<f32>(bits_as<u32>(rounded) | 1);
  }
  return H::store(rounded);
}

template <typename T, T kMask>
T flip(T a) {
  return static_cast<T>(a ^ kMask);
}
template <typename T, T kMask>
T keep(T a) {
  return static_cast<T>(a & kMask);
}

template <typename H, f32 (*F)(f32, f32)>
void add_both(Table& table, const std::string& name, const std::string& type) {
  table.add<of_two<H, F>>(name + type);
  table.add<of_pairs<of_two<H, F>>>(name + type + "x2");
}

template <typename H>
void add_of_type(Table& table, const std::string& type) {
  for (const char* rounding : {".", ".rn."}) {
    add_both<H, add>(table, std::string("add") + rounding, type);
    add_both<H, sub>(table, std::string("sub") + rounding, type);
    add_both<H, mul>(table, std::string("mul") + rounding, type);
  }
  add_both<H, least<f32>>(table, "min.", type);
  add_both<H, greatest<f32>>(table, "max.", type);
  add_both<H, least_or_nan<f32>>(table, "min.NaN.", type);
  add_both<H, greatest_or_nan<f32>>(table, "max.NaN.", type);
  table.add<fma<H>>("fma.rn." + type);
  table.add<of_pairs<fma<H>>>("fma.rn." + type + "x2");
  table.add<flip<u16, 0x8000>>("neg." + type);
  table.add<flip<u32, 0x80008000>>("neg." + type + "x2");
  table.add<keep<u16, 0x7fff>>("abs." + type);
  table.add<keep<u32, 0x7fff7fff>>("abs." + type + "x2");
}

}  // namespace

void add_halves(Table& table) {
  add_of_type<BFloat16>(table, "bf16");
  add_of_type<Half>(table, "f16");
}

}  // namespace ptx
