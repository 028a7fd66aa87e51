// How two partial results combine, and the value for no results.

#pragma once

#include "math/exp_series.h"

namespace klfast::math {

struct Sum {
  static constexpr double kEmpty = 0;
  template <typename T>
  static KLFAST_HOST_DEVICE T combine(T a, T b) {
    return a + b;
  }
};

// The greatest of numbers that are not negative, or NaN if there is one. The bits are compared as
// integers, in which NaN is the greatest.
struct MaximumOrNan {
  static constexpr double kEmpty = 0;
  template <typename T>
  static KLFAST_HOST_DEVICE T combine(T a, T b) {
    using Bits = typename Constants<T>::Bits;
    const Bits a_bits = bit_cast<Bits>(a), b_bits = bit_cast<Bits>(b);
    if constexpr (is_block<T>)
      return bit_cast<T>((b_bits > a_bits).select(b_bits, a_bits));
    else
      return bit_cast<T>(b_bits > a_bits ? b_bits : a_bits);
  }
};

// The least of finite numbers.
struct Minimum {
  static constexpr double kEmpty = INFINITY;
  template <typename T>
  static KLFAST_HOST_DEVICE T combine(T a, T b) {
    return b < a ? b : a;
  }
};

struct Maximum {
  static constexpr double kEmpty = -INFINITY;
  template <typename T>
  static KLFAST_HOST_DEVICE T combine(T a, T b) {
    return b > a ? b : a;
  }
};

}  // namespace klfast::math
