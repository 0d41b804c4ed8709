// Functions of short_lane, whose results are rounded to 16 bits, against libm in double.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/lane/short_math_test.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "onepass/lane/cpu.h"
#include "onepass/lane/math.h"
#include "tests/lane/targets.h"

#ifndef ONEPASS_SHORT_MATH_TEST_ONCE
#define ONEPASS_SHORT_MATH_TEST_ONCE
namespace onepass::test {
enum class short_function : int { exp, sigmoid, normal_cdf, normal_density, normal_part };
}  // namespace onepass::test
#endif

ONEPASS_BEGIN

// count is a multiple of every target's lanes.
template <class F>
ONEPASS_FUNCTION void each_short(const float* x, int64 count, float* y, const F& f) {
  using L = vec<float>;
  for (int64 i = 0; i < count; i += lanes<L>()) store_lane(f(short_lane(load_lane<L>(x + i))), y + i);
}
void evaluate_short(test::short_function f, const float* x, int64 count, float* y) {
  using L = short_lane;
  switch (f) {
    case test::short_function::exp: return each_short(x, count, y, [](L v) ONEPASS_LAMBDA { return exp(v); });
    case test::short_function::sigmoid: return each_short(x, count, y, [](L v) ONEPASS_LAMBDA { return sigmoid(v); });
    case test::short_function::normal_cdf:
      return each_short(x, count, y, [](L v) ONEPASS_LAMBDA { return normal(v).cdf; });
    case test::short_function::normal_density:
      return each_short(x, count, y, [](L v) ONEPASS_LAMBDA { return normal(v).density; });
    case test::short_function::normal_part:
      return each_short(x, count, y, [](L v) ONEPASS_LAMBDA { return normal_part(v); });
  }
}

ONEPASS_END

#if HWY_ONCE
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "tests/lane/math_reference.h"

namespace onepass {
HWY_EXPORT(evaluate_short);

namespace test {
namespace {

class short_test : public on_target {
 protected:
  static void run(short_function f, const float* x, int64 count, float* y) {
    HWY_DYNAMIC_DISPATCH(evaluate_short)(f, x, count, y);
  }
};
ONEPASS_ON_EVERY_TARGET(short_test);

TEST_P(short_test, errs_as_little_as_promised) {
  struct promised {
    short_function f;
    function exact;
    double relative, most;  // up to that argument
  };
  const promised all[] = {{short_function::exp, function::exp, 0x1p-16, 88},
                          {short_function::sigmoid, function::sigmoid, 0x1p-16, 1e38},
                          {short_function::normal_cdf, function::normal_cdf, 0x1p-16, 1e38},
                          {short_function::normal_density, function::normal_density, 0x1p-16, 13.25},
                          {short_function::normal_part, function::gelu, 0x1.4p-13, 4},
                          {short_function::normal_part, function::gelu, 0x1.4p-8, 12.9}};
  std::vector<float> x = near_edges<float>();
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 12799) {
    float v;
    const auto low = static_cast<uint32_t>(bits);
    std::memcpy(&v, &low, 4);
    x.push_back(v);
  }
  x.resize(x.size() / 64 * 64);
  std::vector<float> y(x.size());
  for (const promised& p : all) {
    run(p.f, x.data(), static_cast<int64>(x.size()), y.data());
    double largest = 0;
    float where = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (std::isnan(x[i])) {
        EXPECT_TRUE(std::isnan(y[i]));
      }
      if (!(std::fabs(x[i]) <= p.most)) continue;
      const double exact = reference<double>(p.exact, static_cast<double>(x[i]));
      if (std::fabs(exact) < std::numeric_limits<float>::min()) continue;
      const double error = std::fabs(static_cast<double>(y[i]) / exact - 1);
      if (!(error <= largest)) largest = error, where = x[i];
    }
    std::printf("  short %d: largest relative error %.3g at %.9g\n", static_cast<int>(p.f), largest,
                static_cast<double>(where));
    EXPECT_LE(largest, p.relative) << "short function " << static_cast<int>(p.f) << " at " << where;
  }
}

TEST_P(short_test, limits) {
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  const auto at = [](short_function f, float v) {
    float in[64], out[64];
    std::fill(in, in + 64, v);
    run(f, in, 64, out);
    return out[0];
  };
  EXPECT_EQ(at(short_function::exp, -kInfinite), 0.0f);
  EXPECT_EQ(at(short_function::exp, kInfinite), kInfinite);
  EXPECT_EQ(at(short_function::sigmoid, -kInfinite), 0.0f);
  EXPECT_EQ(at(short_function::sigmoid, kInfinite), 1.0f);
  EXPECT_EQ(at(short_function::normal_cdf, kInfinite), 1.0f);
  EXPECT_EQ(at(short_function::normal_density, kInfinite), 0.0f);
  EXPECT_EQ(at(short_function::normal_part, kInfinite), kInfinite);
  EXPECT_NEAR(at(short_function::normal_part, -kInfinite), 0.0f, 1e-36f);
  EXPECT_TRUE(std::isnan(at(short_function::normal_part, std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace
}  // namespace test
}  // namespace onepass
#endif
