// Comparisons, choices by a predicate, and logic of predicates.

#include <stdexcept>

#include "floating.h"
#include "table.h"
#include "text.h"

namespace ptx {
namespace {

// An ordered comparison is false where an operand is NaN, an unordered one is true.
template <typename T>
bool eq(T a, T b) {
  return a == b;
}
template <typename T>
bool ne(T a, T b) {
  return a < b || a > b;
}
template <typename T>
bool lt(T a, T b) {
  return a < b;
}
template <typename T>
bool le(T a, T b) {
  return a <= b;
}
template <typename T>
bool gt(T a, T b) {
  return a > b;
}
template <typename T>
bool ge(T a, T b) {
  return a >= b;
}
template <typename T>
bool equ(T a, T b) {
  return !ne(a, b);
}
template <typename T>
bool neu(T a, T b) {
  return !(a == b);
}
template <typename T>
bool ltu(T a, T b) {
  return !(a >= b);
}
template <typename T>
bool leu(T a, T b) {
  return !(a > b);
}
template <typename T>
bool gtu(T a, T b) {
  return !(a <= b);
}
template <typename T>
bool geu(T a, T b) {
  return !(a < b);
}
template <typename T>
bool num(T a, T b) {
  return a == a && b == b;
}
template <typename T>
bool nan(T a, T b) {
  return a != a || b != b;
}

template <bool (*F)(f32, f32)>
bool flushed(f32 a, f32 b) {
  return F(flush(a), flush(b));
}
template <typename H, bool (*F)(f32, f32)>
bool of_halves(u16 a, u16 b) {
  return F(H::load(a), H::load(b));
}

struct Comparison {
  const char* name;
  bool (*compare)(f32, f32);
};

template <typename T>
void add_ordered(Table& table, const std::string& type) {
  table.add<eq<T>>("setp.eq." + type);
  table.add<ne<T>>("setp.ne." + type);
  table.add<lt<T>>("setp.lt." + type);
  table.add<le<T>>("setp.le." + type);
  table.add<gt<T>>("setp.gt." + type);
  table.add<ge<T>>("setp.ge." + type);
}
template <typename T>
void add_unordered(Table& table, const std::string& type) {
  table.add<equ<T>>("setp.equ." + type);
  table.add<neu<T>>("setp.neu." + type);
  table.add<ltu<T>>("setp.ltu." + type);
  table.add<leu<T>>("setp.leu." + type);
  table.add<gtu<T>>("setp.gtu." + type);
  table.add<geu<T>>("setp.geu." + type);
  table.add<num<T>>("setp.num." + type);
  table.add<nan<T>>("setp.nan." + type);
}

#define KLFAST_PTX_COMPARISONS(X) \
  X(eq) X(ne) X(lt) X(le) X(gt) X(ge) X(equ) X(neu) X(ltu) X(leu) X(gtu) X(geu) X(num) X(nan)

void add_flushed(Table& table) {
#define ADD(name) table.add<flushed<name<f32>>>("setp." #name ".ftz.f32");
  KLFAST_PTX_COMPARISONS(ADD)
#undef ADD
}
template <typename H>
void add_of_halves(Table& table, const std::string& type) {
#define ADD(name) table.add<of_halves<H, name<f32>>>("setp." #name "." + type);
  KLFAST_PTX_COMPARISONS(ADD)
#undef ADD
}
constexpr Comparison kComparisons[] = {
#define ADD(name) {#name, name<f32>},
    KLFAST_PTX_COMPARISONS(ADD)
#undef ADD
};

// setp.lt.bf16x2 p|q, a, b: p of the lower halves, q of the upper.
template <typename H>
void compare_pairs(Warp& warp, const Instruction& in, u32 lanes) {
  const auto compare = kComparisons[in.option].compare;
  const u32 *const a = values<u32>(warp, in.a), *const b = values<u32>(warp, in.b);
  u32 low = 0, high = 0;
  for (u32 i = 0; i < kLanes; ++i) {
    auto part = [&](u32 shift) {
      return compare(H::load(static_cast<u16>(a[i] >> shift)),
                     H::load(static_cast<u16>(b[i] >> shift)));
    };
    low |= static_cast<u32>(part(0)) << i;
    high |= static_cast<u32>(part(16)) << i;
  }
  const u32 written = written_lanes(warp, in.a) & written_lanes(warp, in.b);
  set_predicate(warp, in.d, lanes, low);
  set_predicate(warp, in.e, lanes, high);
  set_written(warp, in.d, lanes, written);
  set_written(warp, in.e, lanes, written);
}

void bind_pairs(Operands& operands, const Words& words, Instruction& in) {
  const bool is_bf16 = words.parts.size() == 3 && words.parts[2] == "bf16x2";
  const bool is_f16 = words.parts.size() == 3 && words.parts[2] == "f16x2";
  const auto predicates = split(words.arguments[0], '|');
  if (!(is_bf16 || is_f16) || predicates.size() != 2) {
    throw std::runtime_error("unknown comparison");
  }
  while (words.parts[1] != kComparisons[in.option].name) {
    if (++in.option == std::size(kComparisons)) throw std::runtime_error("unknown comparison");
  }
  in.run = is_bf16 ? compare_pairs<BFloat16> : compare_pairs<Half>;
  in.defined = Defined::kByItself;
  in.d = operands.reg(predicates[0]);
  in.e = operands.reg(predicates[1]);
  in.a = operands.value(words.arguments[1], 4);
  in.b = operands.value(words.arguments[2], 4);
}

template <typename T>
void select(Warp& warp, const Instruction& in, u32 lanes) {
  T* const d = values<T>(warp, in.d);
  const T *const a = values<T>(warp, in.a), *const b = values<T>(warp, in.b);
  const u32 chosen = predicate(warp, in.c);
  each_lane(lanes, [=](u32 i) { d[i] = (chosen >> i & 1) != 0 ? a[i] : b[i]; });
}

template <typename T>
void add_select(Table& table, const std::string& type) {
  const char letter = letter_of<T>();
  table.add("selp." + type, select<T>, {letter, letter, letter, 'p'}, 0, Defined::kBySelect);
}

void copy(Warp& warp, const Instruction& in, u32 lanes) {
  set_predicate(warp, in.d, lanes, predicate(warp, in.a));
}
void negate(Warp& warp, const Instruction& in, u32 lanes) {
  set_predicate(warp, in.d, lanes, ~predicate(warp, in.a));
}
void both(Warp& warp, const Instruction& in, u32 lanes) {
  set_predicate(warp, in.d, lanes, predicate(warp, in.a) & predicate(warp, in.b));
}
void either(Warp& warp, const Instruction& in, u32 lanes) {
  set_predicate(warp, in.d, lanes, predicate(warp, in.a) | predicate(warp, in.b));
}
void one_of_two(Warp& warp, const Instruction& in, u32 lanes) {
  set_predicate(warp, in.d, lanes, predicate(warp, in.a) ^ predicate(warp, in.b));
}

template <typename U, typename S>
void add_integers_of_size(Table& table, const std::string& bits) {
  add_ordered<U>(table, "b" + bits);
  add_ordered<U>(table, "u" + bits);
  add_ordered<S>(table, "s" + bits);
  for (const char* kind : {"b", "u", "s"}) add_select<U>(table, kind + bits);
}

}  // namespace

void add_predicates(Table& table) {
  add_integers_of_size<u16, i16>(table, "16");
  add_integers_of_size<u32, i32>(table, "32");
  add_integers_of_size<u64, i64>(table, "64");
  add_ordered<f32>(table, "f32");
  add_unordered<f32>(table, "f32");
  add_ordered<f64>(table, "f64");
  add_unordered<f64>(table, "f64");
  add_flushed(table);
  add_of_halves<BFloat16>(table, "bf16");
  add_of_halves<Half>(table, "f16");
  table.add_form("setp", bind_pairs);
  add_select<u32>(table, "f32");
  add_select<u64>(table, "f64");
  table.add("mov.pred", copy, "pp");
  table.add("not.pred", negate, "pp");
  table.add("and.pred", both, "ppp", 0, Defined::kByAnd);
  table.add("or.pred", either, "ppp", 0, Defined::kByOr);
  table.add("xor.pred", one_of_two, "ppp");
}

}  // namespace ptx
