// `fit NAME PARAMETER` prints the fitted terms of a divergence, jsd or skew, at a grid of
// log-ratios. A line has u, in bits, and the polynomials of the value and of the slopes in p and q,
// all as hexadecimal floats.

#include "formulas/fit.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

using klfast::divergences::Fit;
using klfast::divergences::polynomial;

int main(int, char** arguments) {
  constexpr int kSteps = 200;
  const bool is_jsd = std::strcmp(arguments[1], "jsd") == 0;
  const double parameter = std::atof(arguments[2]);
  const Fit fit =
      is_jsd ? klfast::divergences::jsd_fit(parameter) : klfast::divergences::skew_fit(parameter);
  const float nat = static_cast<float>(1 / klfast::math::kNats<klfast::math::Base::kTwo>);
  for (int i = -kSteps; i <= kSteps; ++i) {
    const float u = nat * static_cast<float>(i) / kSteps;
    std::printf("%a %a %a %a\n", u, polynomial(fit.value, u), polynomial(fit.of_first, u),
                polynomial(fit.of_second, u));
  }
}
