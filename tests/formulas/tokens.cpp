// `tokens float` or `tokens double` reads a line of log-ratio, mask, value and clipped per token.
// It prints a line per token with f, f' and f + f' of every estimator. Three lines of statistics
// follow: of all tokens in one sum, of all tokens in two combined halves, and of no token. Numbers
// are hexadecimal floats.

#include <cstdio>
#include <cstring>
#include <vector>

#include "formulas/statistics.h"

namespace {

using klfast::Depth;
using klfast::math::Range;

template <typename T>
using Token = klfast::Observation<Range::kAnywhere, T>;

template <typename T>
void print_formulas(T x) {
  for_each_row(klfast::estimators::EstimatorTable(), [&](auto estimator) {
    const auto f = decltype(estimator)::at(x);
    std::printf("%a %a %a ", double(f.value), double(f.derivative),
                double(f.value_plus_derivative));
    // A range that holds x changes no digit but the last.
    if (std::fabs(x) <= 1) {
      const auto near = decltype(estimator)::template at<Range::kNear>(x);
      std::printf("%a %a %a ", double(near.value), double(near.derivative),
                  double(near.value_plus_derivative));
    }
  });
  std::printf("\n");
}

template <typename T>
void print(const klfast::Statistics<T>& sums) {
  for (T sum : sums.at) std::printf("%a ", double(sum));
  std::printf("\n");
}

template <typename T, typename Tokens>
klfast::Statistics<T> sums_of(const Tokens& tokens, std::size_t first, std::size_t last) {
  auto sums = klfast::empty_statistics<T>();
  for (std::size_t i = first; i < last; ++i) {
    klfast::add_token<Depth::kLimited>(tokens[i], [&](int row) -> T& { return sums.at[row]; });
  }
  return sums;
}

template <typename T>
void run() {
  std::vector<Token<T>> tokens;
  double x, weight, value;
  int clipped;
  while (std::scanf("%la %la %la %d", &x, &weight, &value, &clipped) == 4) {
    print_formulas(T(x));
    tokens.push_back({T(value), T(weight), T(x), clipped});
  }
  const std::size_t half = tokens.size() / 2;
  auto halves = sums_of<T>(tokens, 0, half);
  klfast::combine<Depth::kLimited>(halves, sums_of<T>(tokens, half, tokens.size()));
  print(sums_of<T>(tokens, 0, tokens.size()));
  print(halves);
  print(sums_of<T>(tokens, 0, 0));
}

}  // namespace

int main(int, char** arguments) {
  std::strcmp(arguments[1], "float") == 0 ? run<float>() : run<double>();
}
