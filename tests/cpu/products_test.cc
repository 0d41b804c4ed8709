// The public interface for C++: lines with `linear`, and with `scores` and `values`, against their formulas in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "onepass/core.h"
#include "src/compiler.h"
#include "src/cpu/gemm/panel_product.h"
#include "tests/cpu/refusal.h"

namespace onepass {
namespace {

using doubles = std::vector<double>;
using sizes_of = std::vector<std::int64_t>;

double rounded(double x, dtype type) {
  if (type == dtype::f64) return x;
  if (type == dtype::f16) return static_cast<double>(static_cast<_Float16>(x));
  const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(x));
  if (type == dtype::f32) return static_cast<double>(static_cast<float>(x));
  return static_cast<double>(std::bit_cast<float>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u));
}

// Rows of numbers, so many more apart than they have; or columns of them.
class array {
 public:
  array(sizes_of sizes, dtype type, unsigned seed, std::int64_t gap = 0, bool by_columns = false)
      : type_(type), sizes_(std::move(sizes)) {
    std::int64_t stride = sizes_.back() + gap, rows = 1;
    strides_.assign(sizes_.size(), 1);
    for (std::size_t d = sizes_.size() - 1; d-- > 0; stride *= sizes_[d], rows *= sizes_[d]) strides_[d] = stride;
    if (by_columns) strides_ = {1, sizes_[0]};
    bytes_.resize(static_cast<std::size_t>((rows + 1) * (sizes_.back() + gap) * size_of(type)));
    std::mt19937 random(seed);
    std::normal_distribution<double> draw;
    for (std::int64_t i = 0; i < count(); ++i) put(i, seed ? draw(random) : 0);
  }
  std::int64_t count() const {
    std::int64_t all = 1;
    for (const std::int64_t size : sizes_) all *= size;
    return all;
  }
  tensor as() { return {bytes_.data(), type_, sizes_, strides_}; }
  doubles numbers() const {
    doubles all;
    for (std::int64_t i = 0; i < count(); ++i) all.push_back(at(i));
    return all;
  }

 private:
  char* place(std::int64_t i) const {
    std::int64_t at = 0;
    for (std::size_t d = sizes_.size(); d-- > 0; i /= sizes_[d]) at += i % sizes_[d] * strides_[d];
    return const_cast<char*>(bytes_.data()) + at * size_of(type_);
  }
  void put(std::int64_t i, double x) {
    const auto single = static_cast<float>(rounded(x, type_));
    const auto half = static_cast<_Float16>(single);
    const auto upper = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(single) >> 16);
    const void* from = &x;
    if (type_ == dtype::f32) from = &single;
    if (type_ == dtype::f16) from = &half;
    if (type_ == dtype::bf16) from = &upper;
    std::memcpy(place(i), from, static_cast<std::size_t>(size_of(type_)));
  }
  double at(std::int64_t i) const {
    double wide;
    float single;
    _Float16 half;
    std::uint16_t upper;
    switch (type_) {
      case dtype::f64: std::memcpy(&wide, place(i), 8); return wide;
      case dtype::f32: std::memcpy(&single, place(i), 4); return static_cast<double>(single);
      case dtype::f16: std::memcpy(&half, place(i), 2); return static_cast<double>(half);
      default: std::memcpy(&upper, place(i), 2);
    }
    return static_cast<double>(std::bit_cast<float>(std::uint32_t{upper} << 16));
  }

  dtype type_;
  sizes_of sizes_, strides_;
  std::vector<char> bytes_;
};

void expect_near(const array& found, const doubles& expected, const char* what, dtype type) {
  const double bound = type == dtype::f64 ? 1e-13 : type == dtype::f32 ? 3e-6 : type == dtype::f16 ? 2e-3 : 2e-2;
  const doubles numbers = found.numbers();
  ASSERT_EQ(numbers.size(), expected.size());
  double apart = 0, all = 1e-300;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    apart += (numbers[i] - expected[i]) * (numbers[i] - expected[i]);
    all += expected[i] * expected[i];
  }
  EXPECT_LT(std::sqrt(apart / all), bound) << what;
}

// c (m, n) = a (m, k) b (k, n), each transposed where it says so.
doubles product(const doubles& a, bool a_turned, const doubles& b, bool b_turned, std::int64_t m, std::int64_t k,
                std::int64_t n) {
  doubles c(static_cast<std::size_t>(m * n));
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t t = 0; t < k; ++t)
      for (std::int64_t j = 0; j < n; ++j)
        c[static_cast<std::size_t>(i * n + j)] += a[static_cast<std::size_t>(a_turned ? t * m + i : i * k + t)] *
                                                  b[static_cast<std::size_t>(b_turned ? j * k + t : t * n + j)];
  return c;
}

struct linear_sizes {
  std::int64_t rows, depth, features;
};
constexpr linear_sizes kLinears[] = {{1, 5, 1}, {7, 64, 33}, {65, 131, 130}, {300, 24, 17}};

std::vector<dtype> types_of_products() {
  std::vector<dtype> types{dtype::f32, dtype::f64};
  if (cpu::has_panel_product(dtype::bf16)) types.push_back(dtype::bf16);
  return types;
}

// "add | keep | rms_norm(1e-6) | scale | linear | bias | gelu", forward and backward, in formulas.
struct exact_linear {
  exact_linear(const linear_sizes& of, const doubles& x, const doubles& residual, const doubles& scale,
               const doubles& weight, const doubles& bias)
      : of_(of), scale_(scale), weight_(weight), sum(x.size()), xhat_(x.size()) {
    doubles input(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) sum[i] = x[i] + residual[i];
    for (std::int64_t r = 0; r < of.rows; ++r) {
      double squares = 0;
      for (std::int64_t c = 0; c < of.depth; ++c) squares += std::pow(sum[at(r, c)], 2) / static_cast<double>(of.depth);
      rstd_.push_back(1 / std::sqrt(squares + 1e-6));
      for (std::int64_t c = 0; c < of.depth; ++c) {
        xhat_[at(r, c)] = sum[at(r, c)] * rstd_.back();
        input[at(r, c)] = xhat_[at(r, c)] * scale[static_cast<std::size_t>(c)];
      }
    }
    input_ = input;
    z_ = product(input, false, weight, true, of.rows, of.depth, of.features);
    for (std::size_t i = 0; i < z_.size(); ++i) {
      z_[i] += bias[i % static_cast<std::size_t>(of.features)];
      y.push_back(z_[i] * phi(z_[i]));
    }
  }
  void backward(const doubles& dy, const doubles& dkept) {
    doubles dz(dy.size());
    dbias.resize(static_cast<std::size_t>(of_.features)), dscale.resize(static_cast<std::size_t>(of_.depth));
    for (std::size_t i = 0; i < dz.size(); ++i) {
      dz[i] = dy[i] * (phi(z_[i]) + z_[i] * std::exp(-z_[i] * z_[i] / 2) / std::sqrt(2 * M_PI));
      dbias[i % dbias.size()] += dz[i];
    }
    dweight = product(dz, true, input_, false, of_.features, of_.rows, of_.depth);
    const doubles dinput = product(dz, false, weight_, false, of_.rows, of_.features, of_.depth);
    dx = dkept;
    for (std::int64_t r = 0; r < of_.rows; ++r) {
      double mean = 0;
      for (std::int64_t c = 0; c < of_.depth; ++c) {
        dscale[static_cast<std::size_t>(c)] += dinput[at(r, c)] * xhat_[at(r, c)];
        mean +=
            dinput[at(r, c)] * scale_[static_cast<std::size_t>(c)] * xhat_[at(r, c)] / static_cast<double>(of_.depth);
      }
      for (std::int64_t c = 0; c < of_.depth; ++c)
        dx[at(r, c)] += rstd_[static_cast<std::size_t>(r)] *
                        (dinput[at(r, c)] * scale_[static_cast<std::size_t>(c)] - xhat_[at(r, c)] * mean);
    }
  }

 private:
  static double phi(double z) { return 0.5 * std::erfc(-z * std::sqrt(0.5)); }
  std::size_t at(std::int64_t r, std::int64_t c) const { return static_cast<std::size_t>(r * of_.depth + c); }
  const linear_sizes of_;
  const doubles scale_, weight_;

 public:
  doubles sum, y, dx, dscale, dweight, dbias;

 private:
  doubles xhat_, rstd_, input_, z_;
};

void check_linear(const linear_sizes& of, dtype x_type, dtype type, std::int64_t gap, bool by_columns) {
  const sizes_of of_x{of.rows, of.depth}, of_y{of.rows, of.features};
  array x(of_x, x_type, 1, gap), residual(of_x, x_type, 2), scale({of.depth}, type, 3),
      weight({of.features, of.depth}, type, 4, by_columns ? 0 : gap, by_columns), bias({of.features}, type, 5),
      y(of_y, type, 0, gap), kept(of_x, x_type, 0), dy(of_y, type, 6, gap), dkept(of_x, x_type, 7),
      dx(of_x, x_type, 0, gap), dresidual(of_x, x_type, 0), dscale({of.depth}, type, 0),
      dweight({of.features, of.depth}, type, 0), dbias({of.features}, type, 0);
  const line whole("add | keep | rms_norm(1e-6) | scale | linear | bias | gelu");
  const dtype of_statistics = x_type == dtype::f64 ? dtype::f64 : dtype::f32;
  array statistics({whole.statistics(x_type), of.rows}, of_statistics, 0);
  const values call{.x = x.as(),
                    .operands = {residual.as(), scale.as(), weight.as(), bias.as()},
                    .y = y.as(),
                    .kept = {kept.as()},
                    .statistics = statistics.as()};
  whole.forward(call);
  exact_linear exact(of, x.numbers(), residual.numbers(), scale.numbers(), weight.numbers(), bias.numbers());
  const dtype coarser = size_of(x_type) < size_of(type) ? x_type : type;
  expect_near(y, exact.y, "y", coarser);
  expect_near(kept, exact.sum, "kept", x_type);
  whole.backward(call, {.y = dy.as(),
                        .kept = {dkept.as()},
                        .x = dx.as(),
                        .operands = {dresidual.as(), dscale.as(), dweight.as(), dbias.as()}});
  exact.backward(dy.numbers(), dkept.numbers());
  expect_near(dx, exact.dx, "dx", coarser);
  expect_near(dresidual, exact.dx, "dresidual", coarser);
  expect_near(dscale, exact.dscale, "dscale", coarser);
  expect_near(dweight, exact.dweight, "dweight", coarser);
  expect_near(dbias, exact.dbias, "dbias", coarser);
}

TEST(Products, LinearAndItsGradients) {
  for (const linear_sizes& of : kLinears) {
    for (const dtype type : types_of_products()) {
      for (const std::int64_t gap : {0, 6}) {
        SCOPED_TRACE(testing::Message() << of.rows << " x " << of.depth << " x " << of.features << ", dtype "
                                        << static_cast<int>(type) << ", gap " << gap);
        check_linear(of, type, type, gap, gap != 0);
      }
    }
    check_linear(of, dtype::f16, dtype::f32, 0, false);  // x in 16 bits, the matrix not
  }
}

// Numbers of the rows that `linear` gives: log Σ exp z and Σ z, of z = u Wᵀ, u = x / rms(x).
TEST(Products, EndingsBehindLinear) {
  if (compiler_program().empty()) GTEST_SKIP() << "needs a C++ compiler";
  for (const linear_sizes& of : kLinears) {
    for (const dtype type : {dtype::f32, dtype::f64}) {
      const sizes_of of_x{of.rows, of.depth}, of_number{of.rows};
      array x(of_x, type, 1), weight({of.features, of.depth}, type, 2), lse(of_number, type, 0),
          sum(of_number, type, 0), statistics({3, of.rows}, type, 0), dlse(of_number, type, 3),
          dsum(of_number, type, 4), dx(of_x, type, 0), dweight({of.features, of.depth}, type, 0);
      const line of_line("rms_norm(0) | linear | logsumexp | sum");
      ASSERT_EQ(of_line.statistics(type), 3);
      const values call{
          .x = x.as(), .operands = {weight.as()}, .y = lse.as(), .kept = {sum.as()}, .statistics = statistics.as()};
      of_line.forward(call);
      of_line.backward(call, {.y = dlse.as(), .kept = {dsum.as()}, .x = dx.as(), .operands = {dweight.as()}});

      const auto rows = static_cast<std::size_t>(of.rows), depth = static_cast<std::size_t>(of.depth),
                 features = static_cast<std::size_t>(of.features);
      doubles u = x.numbers(), inverse(rows);
      for (std::size_t r = 0; r < rows; ++r) {
        double squares = 0;
        for (std::size_t k = 0; k < depth; ++k) squares += u[r * depth + k] * u[r * depth + k];
        inverse[r] = 1 / std::sqrt(squares / static_cast<double>(depth));
        for (std::size_t k = 0; k < depth; ++k) u[r * depth + k] *= inverse[r];
      }
      const doubles z = product(u, false, weight.numbers(), true, of.rows, of.depth, of.features);
      doubles exact_lse(rows), exact_sum(rows), dz(z.size());
      for (std::size_t r = 0; r < rows; ++r) {
        double exponentials = 0;
        for (std::size_t j = 0; j < features; ++j)
          exponentials += std::exp(z[r * features + j]), exact_sum[r] += z[r * features + j];
        exact_lse[r] = std::log(exponentials);
        for (std::size_t j = 0; j < features; ++j)
          dz[r * features + j] = dlse.numbers()[r] * std::exp(z[r * features + j]) / exponentials + dsum.numbers()[r];
      }
      expect_near(lse, exact_lse, "log Σ exp", type);
      expect_near(sum, exact_sum, "Σ", type);
      expect_near(dweight, product(dz, true, u, false, of.features, of.rows, of.depth), "dw", type);
      doubles exact_dx = product(dz, false, weight.numbers(), false, of.rows, of.features, of.depth);
      for (std::size_t r = 0; r < rows; ++r) {
        double along = 0;
        for (std::size_t k = 0; k < depth; ++k) along += u[r * depth + k] * exact_dx[r * depth + k];
        for (std::size_t k = 0; k < depth; ++k)
          exact_dx[r * depth + k] =
              (exact_dx[r * depth + k] - u[r * depth + k] * along / static_cast<double>(depth)) * inverse[r];
      }
      expect_near(dx, exact_dx, "dx", type);
    }
  }
}

// Without words before it, behind it, or both; and with one through which the gradient only passes.
TEST(Products, LinearAlone) {
  for (const linear_sizes& of : kLinears) {
    for (const dtype type : types_of_products()) {
      const sizes_of of_x{of.rows, of.depth}, of_y{of.rows, of.features};
      array x(of_x, type, 1, 3), weight({of.features, of.depth}, type, 2), y(of_y, type, 0), dy(of_y, type, 3),
          dx(of_x, type, 0), dweight({of.features, of.depth}, type, 0), residual(of_x, type, 4);
      const doubles expected = product(x.numbers(), false, weight.numbers(), true, of.rows, of.depth, of.features);
      const doubles of_input = product(dy.numbers(), false, weight.numbers(), false, of.rows, of.features, of.depth);
      const line alone("linear"), relu("linear | relu"), sum("add | linear");
      const values call{.x = x.as(), .operands = {weight.as()}, .y = y.as()};
      alone.forward(call);
      expect_near(y, expected, "y", type);
      alone.backward(call, {.y = dy.as(), .x = dx.as(), .operands = {dweight.as()}});
      expect_near(dx, of_input, "dx", type);
      expect_near(dweight, product(dy.numbers(), true, x.numbers(), false, of.features, of.rows, of.depth), "dw", type);
      relu.forward(call);
      doubles positive = expected;
      for (double& number : positive) number = std::max(number, 0.0);
      expect_near(y, positive, "relu", type);
      array dresidual(of_x, type, 0);
      const values two{.x = x.as(), .operands = {residual.as(), weight.as()}, .y = y.as()};
      sum.forward(two);
      sum.backward(two, {.y = dy.as(), .x = dx.as(), .operands = {dresidual.as(), dweight.as()}});
      expect_near(dx, of_input, "dx behind add", type);
      expect_near(dresidual, of_input, "dresidual", type);
      doubles both = x.numbers();
      for (std::size_t i = 0; i < both.size(); ++i) both[i] += residual.numbers()[i];
      expect_near(dweight, product(dy.numbers(), true, both, false, of.features, of.rows, of.depth), "dw", type);
    }
  }
}

// Its backward begins at softmax's result, which is made again.
TEST(Products, SoftmaxBeforeLinear) {
  constexpr linear_sizes kOf{70, 33, 9};
  array x({kOf.rows, kOf.depth}, dtype::f64, 1), weight({kOf.features, kOf.depth}, dtype::f64, 2),
      y({kOf.rows, kOf.features}, dtype::f64, 0), dy({kOf.rows, kOf.features}, dtype::f64, 3),
      dx({kOf.rows, kOf.depth}, dtype::f64, 0);
  const line softmax("softmax | linear");
  array statistics({std::max(softmax.statistics(dtype::f64), 1), kOf.rows}, dtype::f64, 0);
  values call{.x = x.as(), .operands = {weight.as()}, .y = y.as()};
  if (softmax.statistics(dtype::f64) > 0) call.statistics = statistics.as();
  softmax.forward(call);
  doubles p = x.numbers();
  const auto row = [&](std::size_t i) { return i / kOf.depth; };
  doubles sums(kOf.rows);
  for (std::size_t i = 0; i < p.size(); ++i) sums[row(i)] += p[i] = std::exp(p[i]);
  for (std::size_t i = 0; i < p.size(); ++i) p[i] /= sums[row(i)];
  expect_near(y, product(p, false, weight.numbers(), true, kOf.rows, kOf.depth, kOf.features), "y", dtype::f64);
  softmax.backward(call, {.y = dy.as(), .x = dx.as()});
  doubles expected = product(dy.numbers(), false, weight.numbers(), false, kOf.rows, kOf.features, kOf.depth);
  doubles dots(kOf.rows);
  for (std::size_t i = 0; i < p.size(); ++i) dots[row(i)] += p[i] * expected[i];
  for (std::size_t i = 0; i < p.size(); ++i) expected[i] = p[i] * (expected[i] - dots[row(i)]);
  expect_near(dx, expected, "dx", dtype::f64);
}

struct attention_sizes {
  std::int64_t batches, group, rows, keys, depth, value_depth;  // so many rows' matrices share keys
};
constexpr attention_sizes kAttentions[] = {{1, 1, 1, 1, 1, 1}, {2, 1, 37, 37, 16, 16}, {3, 4, 5, 130, 33, 7}};

// softmax(0.5 q k + mask) v of one batch's rows.
struct exact_attention {
  doubles weights, y, dq, dk, dv, dmask;
  exact_attention(const attention_sizes& of, const doubles& q, const doubles& k, const doubles& v, const doubles& mask,
                  const doubles& dy, const doubles& dweights, bool causal) {
    const std::int64_t rows = of.group * of.rows;
    const auto at = [&](std::int64_t r, std::int64_t c) { return static_cast<std::size_t>(r * of.keys + c); };
    weights = product(q, false, k, true, rows, of.depth, of.keys);
    for (std::int64_t r = 0; r < rows; ++r) {
      double sum = 0;
      for (std::int64_t c = 0; c < of.keys; ++c) {
        double& w = weights[at(r, c)];
        sum += w = causal && c > r % of.rows ? 0 : std::exp(0.5 * w + (mask.empty() ? 0 : mask[at(r, c)]));
      }
      for (std::int64_t c = 0; c < of.keys; ++c) weights[at(r, c)] /= sum;
    }
    y = product(weights, false, v, false, rows, of.keys, of.value_depth);
    dv = product(weights, true, dy, false, of.keys, rows, of.value_depth);
    doubles dp = of.value_depth ? product(dy, false, v, true, rows, of.value_depth, of.keys) : dy;
    for (std::size_t i = 0; i < dweights.size(); ++i) dp[i] += dweights[i];
    dmask = dp;
    for (std::int64_t r = 0; r < rows; ++r) {
      double dot = 0;
      for (std::int64_t c = 0; c < of.keys; ++c) dot += weights[at(r, c)] * dp[at(r, c)];
      for (std::int64_t c = 0; c < of.keys; ++c) dmask[at(r, c)] = weights[at(r, c)] * (dp[at(r, c)] - dot);
    }
    doubles ds = dmask;
    for (double& d : ds) d *= 0.5;
    dq = product(ds, false, k, false, rows, of.keys, of.depth);
    dk = product(ds, true, q, false, of.keys, rows, of.depth);
  }
};

// Batch by batch.
template <class Member>
doubles all_of(const std::vector<exact_attention>& batches, Member member) {
  doubles all;
  for (const exact_attention& b : batches) all.insert(all.end(), (b.*member).begin(), (b.*member).end());
  return all;
}
doubles batch(const array& of, std::int64_t i, std::int64_t batches) {
  const doubles all = of.numbers();
  const auto size = static_cast<std::ptrdiff_t>(all.size()) / batches;
  return {all.begin() + i * size, all.begin() + (i + 1) * size};
}

void check_attention(const attention_sizes& of, dtype type, bool masked, bool keeps, bool causal, std::int64_t gap) {
  const sizes_of x_sizes{of.batches, of.group, of.rows, of.depth}, key_sizes{of.batches, 1, of.keys, of.depth},
      value_sizes{of.batches, 1, of.keys, of.value_depth}, scores{of.batches, of.group, of.rows, of.keys},
      y_sizes{of.batches, of.group, of.rows, of.value_depth};
  array q(x_sizes, type, 1, gap), k(key_sizes, type, 2), v(value_sizes, type, 3), mask(scores, type, 4),
      y(y_sizes, type, 0, gap), kept(scores, type, 0), dy(y_sizes, type, 5), dkept(scores, type, 6),
      dq(x_sizes, type, 0), dk(key_sizes, type, 0, gap), dv(value_sizes, type, 0), dmask(scores, type, 0);
  const line attention(std::string("scores | mul(0.5) | ") + (masked ? "mask | " : "") + (causal ? "causal | " : "") +
                       "softmax | " + (keeps ? "keep | " : "") + "values");
  array statistics({std::max(attention.statistics(type), 1), of.batches * of.group * of.rows},
                   type == dtype::f64 ? dtype::f64 : dtype::f32, 0);
  values call{.x = q.as(), .operands = {k.as(), v.as()}, .y = y.as()};
  gradients wanted{.y = dy.as(), .x = dq.as(), .operands = {dk.as(), dv.as()}};
  if (masked) call.operands.insert(call.operands.begin() + 1, mask.as());
  if (masked) wanted.operands.insert(wanted.operands.begin() + 1, dmask.as());
  if (keeps) call.kept = {kept.as()}, wanted.kept = {dkept.as()};
  if (attention.statistics(type) > 0) call.statistics = statistics.as();
  attention.forward(call);
  attention.backward(call, wanted);
  std::vector<exact_attention> exact;
  for (std::int64_t b = 0; b < of.batches; ++b)
    exact.emplace_back(of, batch(q, b, of.batches), batch(k, b, of.batches), batch(v, b, of.batches),
                       masked ? batch(mask, b, of.batches) : doubles(), batch(dy, b, of.batches),
                       keeps ? batch(dkept, b, of.batches) : doubles(), causal);
  expect_near(y, all_of(exact, &exact_attention::y), "y", type);
  if (keeps) expect_near(kept, all_of(exact, &exact_attention::weights), "kept", type);
  if (of.keys == 1) return;  // of one weight everything is zero
  expect_near(dq, all_of(exact, &exact_attention::dq), "dq", type);
  expect_near(dk, all_of(exact, &exact_attention::dk), "dk", type);
  expect_near(dv, all_of(exact, &exact_attention::dv), "dv", type);
  if (masked) expect_near(dmask, all_of(exact, &exact_attention::dmask), "dmask", type);
}

TEST(Products, AttentionAndItsGradients) {
  for (const attention_sizes& of : kAttentions) {
    for (const dtype type : types_of_products()) {
      for (const bool masked : {false, true}) {
        for (const bool keeps : {false, true}) {
          SCOPED_TRACE(testing::Message() << of.rows << " x " << of.keys << ", dtype " << static_cast<int>(type)
                                          << (masked ? ", masked" : "") << (keeps ? ", keeps" : ""));
          check_attention(of, type, masked, keeps, false, masked ? 5 : 0);
          if (of.rows <= of.keys) check_attention(of, type, masked, keeps, true, 0);
        }
      }
    }
  }
}

TEST(Products, ScoresWithoutValues) {
  constexpr attention_sizes kOf{2, 3, 19, 45, 8, 0};
  array q({2, 3, 19, 8}, dtype::f32, 1), k({2, 1, 45, 8}, dtype::f32, 2), y({2, 3, 19, 45}, dtype::f32, 0),
      dy({2, 3, 19, 45}, dtype::f32, 3), dq({2, 3, 19, 8}, dtype::f32, 0), dk({2, 1, 45, 8}, dtype::f32, 0);
  const line softmax("scores | mul(0.5) | softmax");
  array statistics({std::max(softmax.statistics(dtype::f32), 1), 114}, dtype::f32, 0);
  values call{.x = q.as(), .operands = {k.as()}, .y = y.as()};
  if (softmax.statistics(dtype::f32) > 0) call.statistics = statistics.as();
  softmax.forward(call);
  softmax.backward(call, {.y = dy.as(), .x = dq.as(), .operands = {dk.as()}});
  std::vector<exact_attention> exact;
  for (std::int64_t b = 0; b < 2; ++b)
    exact.emplace_back(kOf, batch(q, b, 2), batch(k, b, 2), doubles(), doubles(), batch(dy, b, 2), doubles(), false);
  expect_near(y, all_of(exact, &exact_attention::weights), "y", dtype::f32);
  expect_near(dq, all_of(exact, &exact_attention::dq), "dq", dtype::f32);
  expect_near(dk, all_of(exact, &exact_attention::dk), "dk", dtype::f32);
}

TEST(Products, RefusalsNameTheArgument) {
  array x({4, 8}, dtype::f32, 1), w({3, 8}, dtype::f32, 2), half({3, 8}, dtype::f16, 2), y({4, 3}, dtype::f32, 0),
      keys({4, 8}, dtype::f32, 3);
  const line linear("linear");
  const auto forward = [&](const tensor& weight, const tensor& result) {
    return refusal([&] { linear.forward({.x = x.as(), .operands = {weight}, .y = result}); });
  };
  EXPECT_EQ(forward(w.as(), y.as()), "");
  EXPECT_EQ(forward(x.as(), y.as()), "onepass: y must have shape [4, 4], got [4, 3]");
  EXPECT_EQ(forward(y.as(), y.as()),
            "onepass: operand 0 (weight of 'linear') must have shape [N, 8] for x of shape [4, 8], got [4, 3]");
  EXPECT_NE(forward(half.as(), y.as()).find("operand 0 (weight of 'linear') must be float32, float64"),
            std::string::npos);
  EXPECT_NE(refusal([] { line("scores | values"); }).find("products alone"), std::string::npos);
  const line softmax("scores | softmax");
  EXPECT_EQ(refusal([&] { softmax.forward({.x = x.as(), .operands = {y.as()}, .y = y.as()}); }),
            "onepass: the keys must have shape [..., S, 8] with the batch sizes of x, the last of which may be 1, for "
            "x of shape [4, 8], got [4, 3]");
}

}  // namespace
}  // namespace onepass
