// Arithmetic of fp32, alone and in pairs (.f32x2), and of fp64, to the nearest.

#include "floating.h"
#include "table.h"

namespace ptx {
namespace {

template <typename T, bool kFlush>
T add(T a, T b) {
  return canonical(flush_if<kFlush>(flush_if<kFlush>(a) + flush_if<kFlush>(b)));
}
template <typename T, bool kFlush>
T sub(T a, T b) {
  return canonical(flush_if<kFlush>(flush_if<kFlush>(a) - flush_if<kFlush>(b)));
}
template <typename T, bool kFlush>
T mul(T a, T b) {
  return canonical(flush_if<kFlush>(flush_if<kFlush>(a) * flush_if<kFlush>(b)));
}
template <typename T, bool kFlush>
T div(T a, T b) {
  return canonical(flush_if<kFlush>(flush_if<kFlush>(a) / flush_if<kFlush>(b)));
}
template <typename T, bool kFlush>
T fma(T a, T b, T c) {
  const T sum = std::fma(flush_if<kFlush>(a), flush_if<kFlush>(b), flush_if<kFlush>(c));
  return canonical(flush_if<kFlush>(sum));
}
template <typename T, bool kFlush>
T rcp(T a) {
  return canonical(flush_if<kFlush>(T{1} / flush_if<kFlush>(a)));
}
template <typename T, bool kFlush>
T sqrt(T a) {
  return canonical(std::sqrt(flush_if<kFlush>(a)));
}
template <typename T, bool kFlush>
T neg(T a) {
  return flush_if<kFlush>(-a);
}
template <typename T, bool kFlush>
T abs(T a) {
  return flush_if<kFlush>(std::fabs(a));
}
// The sign of the first operand, and the value of the second.
template <typename T>
T copysign(T a, T b) {
  return std::copysign(b, a);
}
template <typename T, bool kFlush>
T min(T a, T b) {
  return least(flush_if<kFlush>(a), flush_if<kFlush>(b));
}
template <typename T, bool kFlush>
T max(T a, T b) {
  return greatest(flush_if<kFlush>(a), flush_if<kFlush>(b));
}
template <typename T, bool kFlush>
T min_nan(T a, T b) {
  return least_or_nan(flush_if<kFlush>(a), flush_if<kFlush>(b));
}
template <typename T, bool kFlush>
T max_nan(T a, T b) {
  return greatest_or_nan(flush_if<kFlush>(a), flush_if<kFlush>(b));
}
// .sat: to [0, 1], and NaN to 0.
template <bool kFlush>
f32 saturated(f32 x) {
  return !(x > 0) ? 0.0f : x > 1 ? 1.0f : flush_if<kFlush>(x);
}
template <bool kFlush>
f32 add_sat(f32 a, f32 b) {
  return saturated<kFlush>(add<f32, kFlush>(a, b));
}
template <bool kFlush>
f32 mul_sat(f32 a, f32 b) {
  return saturated<kFlush>(mul<f32, kFlush>(a, b));
}

template <typename T, bool kFlush>
void add_of_type(Table& table, const std::string& type) {
  for (const char* rounding : {".", ".rn."}) {
    table.add<add<T, kFlush>>("add" + (rounding + type));
    table.add<sub<T, kFlush>>("sub" + (rounding + type));
    table.add<mul<T, kFlush>>("mul" + (rounding + type));
  }
  table.add<fma<T, kFlush>>("fma.rn." + type);
  table.add<div<T, kFlush>>("div.rn." + type);
  table.add<rcp<T, kFlush>>("rcp.rn." + type);
  table.add<sqrt<T, kFlush>>("sqrt.rn." + type);
  table.add<neg<T, kFlush>>("neg." + type);
  table.add<abs<T, kFlush>>("abs." + type);
  table.add<min<T, kFlush>>("min." + type);
  table.add<max<T, kFlush>>("max." + type);
}

template <bool kFlush>
void add_of_fp32(Table& table, const std::string& type) {
  add_of_type<f32, kFlush>(table, type);
  const std::string flushed = kFlush ? "ftz." : "";
  table.add<min_nan<f32, kFlush>>("min." + flushed + "NaN.f32");
  table.add<max_nan<f32, kFlush>>("max." + flushed + "NaN.f32");
  table.add<add_sat<kFlush>>("add." + flushed + "sat.f32");
  table.add<mul_sat<kFlush>>("mul." + flushed + "sat.f32");
  for (const char* rounding : {".", ".rn."}) {
    const std::string rest = rounding + flushed + "f32x2";
    table.add<of_pairs<add<f32, kFlush>>>("add" + rest);
    table.add<of_pairs<mul<f32, kFlush>>>("mul" + rest);
  }
  table.add<of_pairs<fma<f32, kFlush>>>("fma.rn." + flushed + "f32x2");
}

}  // namespace

void add_floats(Table& table) {
  add_of_fp32<false>(table, "f32");
  add_of_fp32<true>(table, "ftz.f32");
  add_of_type<f64, false>(table, "f64");
  table.add<copysign<f32>>("copysign.f32");
  table.add<copysign<f64>>("copysign.f64");
}

}  // namespace ptx
