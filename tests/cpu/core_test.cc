// The public interface for C++: numbers against their formulas, layouts, and what it refuses.
#include "onepass/core.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "src/compiler.h"
#include "tests/cpu/refusal.h"

namespace onepass {
namespace {

using numbers = std::vector<float>;

numbers normal(int64 count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw;
  numbers v(static_cast<std::size_t>(count));
  for (float& number : v) number = draw(random);
  return v;
}
tensor of(numbers& v, std::vector<std::int64_t> sizes, std::vector<std::int64_t> strides = {}) {
  return {v.data(), dtype::f32, std::move(sizes), std::move(strides)};
}

constexpr std::int64_t kRows = 7, kColumns = 50;

class Core : public testing::Test {
 protected:
  numbers x = normal(kRows * kColumns, 1), y = numbers(x.size()), dy = normal(kRows * kColumns, 2),
          dx = numbers(x.size()), column = normal(kColumns, 3), dcolumn = numbers(column.size());
  tensor matrix(numbers& v) const { return of(v, {kRows, kColumns}); }
  tensor row(numbers& v) const { return of(v, {kColumns}); }
  double at(const numbers& v, std::int64_t r, std::int64_t c) const {
    return static_cast<double>(v[static_cast<std::size_t>(r * kColumns + c)]);
  }
};

TEST_F(Core, ALayerNormAndItsGradients) {
  numbers bias = normal(kColumns, 4), dbias(bias.size()), statistics(3 * kRows);
  const line norm("layer_norm(1e-5) | scale | bias");
  ASSERT_EQ(norm.operands(), 2);
  ASSERT_EQ(norm.statistics(dtype::f32), 3);
  ASSERT_EQ(norm.statistics(dtype::bf16), 2);
  const values call{.x = matrix(x),
                    .operands = {row(column), row(bias)},
                    .y = matrix(y),
                    .statistics = of(statistics, {norm.statistics(dtype::f32), kRows})};
  norm.forward(call);
  norm.backward(call, {.y = matrix(dy), .x = matrix(dx), .operands = {row(dcolumn), row(dbias)}});
  std::vector<double> expected_dscale(kColumns), expected_dbias(kColumns);
  for (std::int64_t r = 0; r < kRows; ++r) {
    double mean = 0, variance = 0, sum = 0, sum_xhat = 0;
    for (std::int64_t c = 0; c < kColumns; ++c) mean += at(x, r, c) / kColumns;
    for (std::int64_t c = 0; c < kColumns; ++c) variance += std::pow(at(x, r, c) - mean, 2) / kColumns;
    const double rstd = 1 / std::sqrt(variance + 1e-5);
    for (std::int64_t c = 0; c < kColumns; ++c) {
      const double xhat = (at(x, r, c) - mean) * rstd, g = at(dy, r, c) * at(column, 0, c);
      EXPECT_NEAR(at(y, r, c), xhat * at(column, 0, c) + at(bias, 0, c), 2e-6);
      sum += g / kColumns, sum_xhat += g * xhat / kColumns;
      expected_dscale[static_cast<std::size_t>(c)] += at(dy, r, c) * xhat;
      expected_dbias[static_cast<std::size_t>(c)] += at(dy, r, c);
    }
    for (std::int64_t c = 0; c < kColumns; ++c) {
      const double xhat = (at(x, r, c) - mean) * rstd, g = at(dy, r, c) * at(column, 0, c);
      EXPECT_NEAR(at(dx, r, c), rstd * (g - sum - xhat * sum_xhat), 5e-6);
    }
  }
  for (std::int64_t c = 0; c < kColumns; ++c) {
    EXPECT_NEAR(at(dcolumn, 0, c), expected_dscale[static_cast<std::size_t>(c)], 1e-5);
    EXPECT_NEAR(at(dbias, 0, c), expected_dbias[static_cast<std::size_t>(c)], 1e-5);
  }
}

// The gradient of `add` is the upstream one, of both its terms: each gets its own copy.
TEST_F(Core, GradientsThatAreTheUpstreamOneAreCopied) {
  numbers residual = normal(kRows * kColumns, 5), dresidual(residual.size());
  const line sum("add");
  const values call{.x = matrix(x), .operands = {matrix(residual)}, .y = matrix(y)};
  sum.forward(call);
  sum.backward(call, {.y = matrix(dy), .x = matrix(dx), .operands = {matrix(dresidual)}});
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(y[i], x[i] + residual[i]);
  EXPECT_EQ(dx, dy);
  EXPECT_EQ(dresidual, dy);
}

// And the one gradient of both terms of `add` is written twice.
TEST_F(Core, AKeptValueHasAGradientOrNone) {
  numbers residual = normal(kRows * kColumns, 5), kept(x.size()), dkept = normal(kRows * kColumns, 6),
          statistics(kRows);
  const line norm("add | keep | rms_norm(1e-6)");
  const values call{.x = matrix(x),
                    .operands = {matrix(residual)},
                    .y = matrix(y),
                    .kept = {matrix(kept)},
                    .statistics = of(statistics, {norm.statistics(dtype::f32), kRows})};
  norm.forward(call);
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(kept[i], x[i] + residual[i]);
  numbers without(x.size()), dresidual(x.size());
  norm.backward(call, {.y = matrix(dy), .x = matrix(without), .operands = {matrix(dresidual)}});
  EXPECT_EQ(dresidual, without);
  norm.backward(call, {.y = matrix(dy), .kept = {matrix(dkept)}, .x = matrix(dx)});
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(dx[i], without[i] + dkept[i], 2e-6f);
  norm.backward(call, {.y = {}, .kept = {matrix(dkept)}, .x = matrix(dx)});
  EXPECT_EQ(dx, dkept);
}

TEST_F(Core, AValueIsKeptInItsOwnDtype) {
  std::vector<std::uint16_t> half(x.size(), 0x3c00), result(x.size()), dhalf(x.size());  // ones
  numbers residual = normal(kRows * kColumns, 5), kept(x.size()), dkept = normal(kRows * kColumns, 6),
          dresidual(x.size()), statistics(kRows);
  const auto in_16_bits = [](std::vector<std::uint16_t>& numbers) {
    return tensor{numbers.data(), dtype::f16, {kRows, kColumns}};
  };
  const line norm("add | keep(float32) | rms_norm(1e-6)");
  values call{.x = in_16_bits(half),
              .operands = {matrix(residual)},
              .y = in_16_bits(result),
              .kept = {matrix(kept)},
              .statistics = of(statistics, {norm.statistics(dtype::f16), kRows})};
  norm.forward(call);
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(kept[i], 1 + residual[i]);
  norm.backward(call, {.y = {}, .kept = {matrix(dkept)}, .x = in_16_bits(dhalf), .operands = {matrix(dresidual)}});
  EXPECT_EQ(dresidual, dkept);
  call.kept = {in_16_bits(result)};
  EXPECT_EQ(refusal([&] { norm.forward(call); }), "onepass: kept[0] must be float32, got float16");
}

TEST_F(Core, StridesAndBroadcastingAreRead) {
  numbers wide = normal(kRows * 2 * kColumns, 7), one = normal(kColumns, 8);
  line("gelu | add")
      .forward(
          {.x = of(wide, {kRows, kColumns}, {2 * kColumns, 1}), .operands = {of(one, {1, kColumns})}, .y = matrix(y)});
  for (std::int64_t r = 0; r < kRows; ++r) {
    for (std::int64_t c = 0; c < kColumns; ++c) {
      const double z = wide[static_cast<std::size_t>(r * 2 * kColumns + c)];
      EXPECT_NEAR(at(y, r, c), z * 0.5 * std::erfc(-z * std::sqrt(0.5)) + at(one, 0, c), 1e-6);
    }
  }
}

TEST_F(Core, ALineOutsideTheTableIsCompiled) {
  if (compiler_program().empty()) GTEST_SKIP() << "needs a C++ compiler";
  line("mul(3) | relu").forward({.x = matrix(x), .y = matrix(y)});
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(y[i], std::max(3 * x[i], 0.0f));
}

TEST_F(Core, ALineOutsideTheTableHasAScaleForEachGroupOfColumns) {
  if (compiler_program().empty()) GTEST_SKIP() << "needs a C++ compiler";
  constexpr std::int64_t kGroup = 16, kGroups = kColumns / kGroup;
  std::vector<std::int8_t> codes(kRows * kGroups * kGroup);
  numbers scales(kRows * kGroups);
  const line groups("quantize(int8, 16)");
  const std::vector<std::int64_t> sizes{kRows, kGroups * kGroup};
  values call{
      .x = of(x, sizes, {kColumns, 1}), .y = {codes.data(), dtype::i8, sizes}, .kept = {of(scales, {kRows, kGroups})}};
  groups.forward(call);
  for (std::int64_t g = 0; g < kRows * kGroups; ++g) {
    const float scale = scales[static_cast<std::size_t>(g)];
    double largest = 0;
    for (std::int64_t c = g % kGroups * kGroup, end = c + kGroup; c < end; ++c) {
      const double value = at(x, g / kGroups, c);
      largest = std::max(largest, std::fabs(value));
      EXPECT_NEAR(codes[static_cast<std::size_t>(g / kGroups * kGroups * kGroup + c)] * scale, value, 0.5001 * scale);
    }
    EXPECT_NEAR(scale, largest / 127, 1e-6 * scale);
  }
  call.kept = {of(scales, {kRows, 1})};
  EXPECT_EQ(refusal([&] { groups.forward(call); }), "onepass: kept[0] must have shape [7, 3], got [7, 1]");
  call.x = matrix(x);
  EXPECT_EQ(refusal([&] { groups.forward(call); }),
            "onepass: 'quantize(int8, 16)' needs rows whose length is a multiple of 16, got x of shape [7, 50]");
}

TEST_F(Core, OfNoRowsColumnGradientsAreZero) {
  const line norm("bias | gelu");
  const tensor none = of(x, {0, kColumns});
  norm.forward({.x = none, .operands = {row(column)}, .y = none});
  norm.backward({.x = none, .operands = {row(column)}, .y = none}, {.y = none, .x = none, .operands = {row(dy)}});
  for (std::int64_t c = 0; c < kColumns; ++c) EXPECT_EQ(at(dy, 0, c), 0);
}

TEST_F(Core, RefusalsNameTheArgument) {
  const line biased("bias | gelu");
  const auto forward = [&](const tensor& a, const tensor& b, const tensor& c) {
    return refusal([&] { biased.forward({.x = a, .operands = {b}, .y = c}); });
  };
  EXPECT_EQ(forward(matrix(x), row(column), matrix(y)), "");
  EXPECT_EQ(forward(matrix(x), of(column, {3}), matrix(y)),
            "onepass: operand 0 (b of 'bias') must have shape [50], got [3]");
  EXPECT_EQ(forward(matrix(x), row(column), of(y, {kRows})), "onepass: y must have shape [7, 50], got [7]");
  tensor half = matrix(y);
  half.type = dtype::f16;
  EXPECT_EQ(forward(matrix(x), row(column), half), "onepass: y must be float32, got float16");
  EXPECT_EQ(forward(of(x, {5, 10}, {1, 5}), of(column, {10}), of(y, {5, 10})),
            "onepass: x must be contiguous, or at least in its last dimension");
  EXPECT_EQ(forward(matrix(x), {nullptr, dtype::f32, {kColumns}}, matrix(y)),
            "onepass: operand 0 (b of 'bias') is missing");
  EXPECT_EQ(refusal([&] { biased.forward({.x = matrix(x), .y = matrix(y)}); }),
            "onepass: the line \"bias | gelu\" takes 1 operands, got 0");
  EXPECT_NE(refusal([] { line("bias | glue"); }).find("^^^^"), std::string::npos);
  EXPECT_NE(refusal([&] {
              line("layer_norm").backward({.x = matrix(x), .y = matrix(y)}, {.y = matrix(dy), .x = matrix(dx)});
            }).find("statistics"),
            std::string::npos);
}

}  // namespace
}  // namespace onepass
