// `jsd_fit BETA` prints the fitted terms of a JSD at a grid of log-ratios. A line has u, in bits,
// and the polynomials of the value, log(m / p) and log(q / m), all as hexadecimal floats.

#include "formulas/jsd_fit.h"

#include <cstdio>
#include <cstdlib>

using klfast::divergences::JsdFit;
using klfast::divergences::polynomial;

int main(int, char** arguments) {
  constexpr int kSteps = 200;
  const JsdFit fit = klfast::divergences::jsd_fit(std::atof(arguments[1]));
  const float nat = static_cast<float>(1 / klfast::math::kNats<klfast::math::Base::kTwo>);
  for (int i = -kSteps; i <= kSteps; ++i) {
    const float u = nat * static_cast<float>(i) / kSteps;
    std::printf("%a %a %a %a\n", u, polynomial(fit.value, u), polynomial(fit.log_m_over_p, u),
                polynomial(fit.log_q_over_m, u));
  }
}
