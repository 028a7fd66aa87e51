// Polynomials for the terms of a divergence where the models are near. They are fitted to the
// parameter of a launch.
//
// With u = log(q / p) and m the mixture of p and q, a word's term in the divergence has a double
// root at u = 0, and its slopes in p and q have single roots (divergences.h). So term / u^2 and
// slope / u are smooth for |u| <= 1. Each is interpolated at Chebyshev's nodes with kTerms terms.
// The relative error is 4e-8, or 1.5e-7 if the polynomial is evaluated in float. For a skewed KL
// with a above 1/2 it is up to 1.3e-6, because the slopes grow like e^2u near a = 1.

#pragma once

#include <cmath>

#include "math/log_series.h"

namespace klfast::divergences {

// Coefficients by ascending power. The argument is in bits.
struct Fit {
  static constexpr int kTerms = 9;
  float value[kTerms];      // term / (p u^2)
  float of_first[kTerms];   // the slope in p, as in PairWord, over u in nats
  float of_second[kTerms];  // the slope in q
};

template <int k = 0, typename T, int n>
KLFAST_HOST_DEVICE T polynomial(const float (&coefficients)[n], T x) {
  const T lowest = static_cast<T>(coefficients[k]);
  if constexpr (k + 1 == n) return lowest;
  if constexpr (k + 1 < n) return math::fma(polynomial<k + 1>(coefficients, x), x, lowest);
}

// Interpolates f on [-1, 1]. Coefficient k is multiplied by ln2^(k + power). On the host.
template <typename Function>
void fit(const Function& f, int power, float (&coefficients)[Fit::kTerms]) {
  constexpr int n = Fit::kTerms;
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

// The term of a JSD is p (b e^u (u - L) - (1 - b) L), where L = log(m / p) = log(1 + b (e^u - 1)).
inline Fit jsd_fit(double b) {
  const auto log_m_over_p = [b](double u) { return std::log1p(b * std::expm1(u)); };
  const auto log_q_over_m = [b](double u) { return -std::log1p((1 - b) * std::expm1(-u)); };
  Fit result;
  fit([&](double u) { return u == 0 ? b : log_m_over_p(u) / u; }, 1, result.of_first);
  fit([&](double u) { return u == 0 ? 1 - b : log_q_over_m(u) / u; }, 1, result.of_second);
  const auto value = [&](double u) {
    if (u == 0) return b * (1 - b) / 2;
    return (b * std::exp(u) * log_q_over_m(u) - (1 - b) * log_m_over_p(u)) / (u * u);
  };
  fit(value, 2, result.value);
  return result;
}

// The term of a skewed KL is p (r - log(1 + r)), where r = m / p - 1 = (1 - a) (e^u - 1).
inline Fit skew_fit(double a) {
  const double b = 1 - a;
  const auto r_of = [b](double u) { return b * std::expm1(u); };
  const auto value = [&](double u) {
    return u == 0 ? b * b / 2 : -math::log1p(r_of(u)).minus_argument / (u * u);
  };
  const auto of_first = [&](double u) {
    return u == 0 ? b * b : (std::log1p(r_of(u)) - a * r_of(u) / (1 + r_of(u))) / u;
  };
  const auto of_second = [&](double u) { return u == 0 ? b : r_of(u) / (1 + r_of(u)) / u; };
  Fit result;
  fit(value, 2, result.value);
  fit(of_first, 1, result.of_first);
  fit(of_second, 1, result.of_second);
  return result;
}

}  // namespace klfast::divergences
