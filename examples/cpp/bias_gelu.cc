// bias and gelu on arrays of floats, forward and backward in one pass each, checked against the formulas in double.
#include <onepass/core.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

using onepass::dtype;

int main() {
  constexpr int kRows = 64, kColumns = 768;
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  const auto numbers = [&](int count) {
    std::vector<float> v(static_cast<std::size_t>(count));
    for (float& number : v) number = normal(random);
    return v;
  };
  std::vector<float> x = numbers(kRows * kColumns), bias = numbers(kColumns), dy = numbers(kRows * kColumns);
  std::vector<float> y(x.size()), dx(x.size()), dbias(bias.size());
  const auto matrix = [](std::vector<float>& v) { return onepass::tensor{v.data(), dtype::f32, {kRows, kColumns}}; };
  const auto column = [](std::vector<float>& v) { return onepass::tensor{v.data(), dtype::f32, {kColumns}}; };

  const onepass::line line("bias | gelu");
  const onepass::values call{.x = matrix(x), .operands = {column(bias)}, .y = matrix(y)};
  line.forward(call);
  line.backward(call, {.y = matrix(dy), .x = matrix(dx), .operands = {column(dbias)}});

  double error = 0, gradient_error = 0, sum_error = 0;
  for (std::size_t c = 0; c < kColumns; ++c) {
    double sum = 0;
    for (std::size_t i = c; i < x.size(); i += kColumns) {
      const double z = double{x[i]} + double{bias[c]};
      const double phi = 0.5 * std::erfc(-z * std::sqrt(0.5));
      const double dz = dy[i] * (phi + z * std::exp(-z * z / 2) / std::sqrt(2 * M_PI));
      error = std::max(error, std::fabs(y[i] - z * phi));
      gradient_error = std::max(gradient_error, std::fabs(dx[i] - dz));
      sum += dz;
    }
    sum_error = std::max(sum_error, std::fabs(dbias[c] - sum));
  }
  std::printf("bias | gelu, %d x %d: largest error %.1e, of x's gradient %.1e, of bias's %.1e\n", kRows, kColumns,
              error, gradient_error, sum_error);
  return error < 1e-5 && gradient_error < 1e-5 && sum_error < 1e-4 ? 0 : 1;
}
