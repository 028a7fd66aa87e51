// Polynomials for the terms of a JSD where the models are near. They are fitted to the weight b of
// a launch.
//
// With u = log(q / p) and m = (1 - b) p + b q,
//   log(m / p) = L(u) = log(1 + b (e^u - 1)),    log(q / m) = u - L(u).
// A word's term of the JSD is
//   p (b e^u (u - L) - (1 - b) L).
// It has a double root at 0. L / u, (u - L) / u and term / u^2 are smooth for |u| <= 1. Each is
// interpolated at Chebyshev's nodes with kTerms terms. The relative error is 4e-8, or 1.5e-7 if the
// polynomial is evaluated in float.

#pragma once

#include <cmath>

#include "math/exp_series.h"

namespace klfast::divergences {

// Coefficients by ascending power. The argument is in bits.
struct JsdFit {
  static constexpr int kTerms = 9;
  float value[kTerms];         // term / (p u^2)
  float log_m_over_p[kTerms];  // log(m / p) / u in nats
  float log_q_over_m[kTerms];
};

template <int k = 0, typename T, int n>
KLFAST_HOST_DEVICE T polynomial(const float (&coefficients)[n], T x) {
  const T lowest = static_cast<T>(coefficients[k]);
  if constexpr (k + 1 == n) return lowest;
  if constexpr (k + 1 < n) return math::fma(polynomial<k + 1>(coefficients, x), x, lowest);
}

// Interpolates f on [-1, 1]. Coefficient k is multiplied by ln2^(k + power). On the host.
template <typename Function>
void fit(const Function& f, int power, float (&coefficients)[JsdFit::kTerms]) {
  constexpr int n = JsdFit::kTerms;
  constexpr double kPi = 3.14159265358979323846;
  double nodes[n], quotients[n];
  for (int i = 0; i < n; ++i) {
    nodes[i] = 2 * i + 1 == n ? 0.0 : std::cos(kPi * (i + 0.5) / n);
    quotients[i] = f(nodes[i]);
  }
  for (int step = 1; step < n; ++step) {  // Newton's divided differences
    for (int i = n - 1; i >= step; --i) {
      quotients[i] = (quotients[i] - quotients[i - 1]) / (nodes[i] - nodes[i - step]);
    }
  }
  double powers[n] = {};
  for (int i = n - 1; i >= 0; --i) {  // times (u - nodes[i]), plus quotients[i]
    for (int k = n - 1; k > 0; --k) powers[k] = powers[k - 1] - nodes[i] * powers[k];
    powers[0] = quotients[i] - nodes[i] * powers[0];
  }
  double unit = 1;
  for (int i = 0; i < power; ++i) unit *= math::kNats<math::Base::kTwo>;
  for (int k = 0; k < n; ++k) {
    coefficients[k] = static_cast<float>(powers[k] * unit);
    unit *= math::kNats<math::Base::kTwo>;
  }
}

inline JsdFit jsd_fit(double b) {
  const auto log_m_over_p = [b](double u) { return std::log1p(b * std::expm1(u)); };
  const auto log_q_over_m = [b](double u) { return -std::log1p((1 - b) * std::expm1(-u)); };
  JsdFit result;
  fit([&](double u) { return u == 0 ? b : log_m_over_p(u) / u; }, 1, result.log_m_over_p);
  fit([&](double u) { return u == 0 ? 1 - b : log_q_over_m(u) / u; }, 1, result.log_q_over_m);
  const auto value = [&](double u) {
    if (u == 0) return b * (1 - b) / 2;
    return (b * std::exp(u) * log_q_over_m(u) - (1 - b) * log_m_over_p(u)) / (u * u);
  };
  fit(value, 2, result.value);
  return result;
}

}  // namespace klfast::divergences
