// Tables of estimators, divergences and statistics as lists of types. A row is a type, and its
// index is its position in the list. Host and device.

#pragma once

#include <array>
#include <type_traits>

#include "math/host_device.h"

namespace klfast {

template <typename... Rows>
struct List {
  static constexpr int kSize = sizeof...(Rows);
};

// The names of rows that have one. klfast/ops/load.py compares them with Python's.
template <typename... Rows>
constexpr std::array<const char*, sizeof...(Rows)> names_of(List<Rows...>) {
  return {Rows::name...};
}

// The rows of a table for which Condition<Row>::value is true, in the table's order. The functions
// only name types, so they have no bodies.
template <typename... First, typename... Second>
List<First..., Second...> operator+(List<First...>, List<Second...>);
template <template <typename> class Condition, typename... Rows>
auto where(List<Rows...>)
    -> decltype((List<>() + ... +
                 std::conditional_t<Condition<Rows>::value, List<Rows>, List<>>()));
template <template <typename> class Condition, typename Table>
using Where = decltype(where<Condition>(Table()));

// Calls visit(Row()) for each row.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <typename... Rows, typename Visitor>
KLFAST_HOST_DEVICE void for_each_row(List<Rows...>, const Visitor& visit) {
  (visit(Rows()), ...);
}

template <typename Row, typename Table>
struct IndexIn;
template <typename Row, typename... Rows>
struct IndexIn<Row, List<Row, Rows...>> {
  static constexpr int value = 0;
};
template <typename Row, typename First, typename... Rows>
struct IndexIn<Row, List<First, Rows...>> {
  static constexpr int value = 1 + IndexIn<Row, List<Rows...>>::value;
};

// Calls visit(Row()) for the row at `index`.
#ifdef __CUDACC__
#pragma nv_exec_check_disable  // the visitor may be a host function
#endif
template <typename... Rows, typename Visitor>
KLFAST_HOST_DEVICE void visit_row(List<Rows...>, int index, const Visitor& visit) {
  int row = 0;
  (void)((index == row++ && (visit(Rows()), true)) || ...);
}

}  // namespace klfast
