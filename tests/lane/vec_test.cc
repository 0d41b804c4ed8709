// The lane's operators against the same ones on numbers.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/lane/vec_test.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "onepass/lane/cpu.h"
#include "tests/lane/targets.h"

#ifndef ONEPASS_VEC_TEST_ONCE
#define ONEPASS_VEC_TEST_ONCE
namespace onepass::test {
constexpr int kCount = 16;  // numbers in and out of each case, a multiple of every target's lanes
// clang-format off
enum class operation : int { add, subtract, multiply, divide, negate, fma, min, max, abs, copy_sign, square_root, sign,
                             within, outside, first_three, iota, sum, largest, zipped, unzipped, quarter_turn };
// clang-format on
}  // namespace onepass::test
#endif

ONEPASS_BEGIN

template <class L>
ONEPASS_FUNCTION L apply_one(test::operation o, L a, L b) {
  using T = typename L::scalar;
  const L zero(T(0)), one(T(1)), two(T(2));
  switch (o) {
    case test::operation::add: return a + b;
    case test::operation::subtract: return a - b;
    case test::operation::multiply: return a * b;
    case test::operation::divide: return a / b;
    case test::operation::negate: return -a;
    case test::operation::fma: return fma(a, b, one);
    case test::operation::min: return min(a, b);
    case test::operation::max: return max(a, b);
    case test::operation::abs: return abs(a);
    case test::operation::copy_sign: return copy_sign(a, b);
    case test::operation::square_root: return sqrt(a);
    case test::operation::sign: return where(a > zero, one, where(a < zero, -one, where(a == zero, zero, two)));
    case test::operation::within: return where((a >= -one) & (a <= one), one, zero);
    case test::operation::outside: return where((a < -one) | !(a <= one), one, zero);
    case test::operation::first_three: return where(first_n<L>(lanes<L>() < 3 ? 1 : 3), a, zero);
    case test::operation::iota: return iota<L>(T(5));
    case test::operation::sum: return L(sum_lanes(a));
    case test::operation::largest: return L(max_lanes(a));
#if HWY_TARGET != HWY_SCALAR
    case test::operation::zipped: {
      const typename half_lane<L>::tag half;
      return zip<L>(half_lane<L>(hn::LowerHalf(half, a.raw)), half_lane<L>(hn::UpperHalf(half, a.raw)));
    }
    case test::operation::unzipped: {
      const auto of = unzip(a);
      return zip<L>(of.first, of.second);
    }
    case test::operation::quarter_turn: return quarter_turn(a);
#else
    default: break;
#endif
  }
  return zero;
}
template <class T>
int apply(test::operation o, const T* a, const T* b, T* to) {
  using L = vec<T>;
  for (int i = 0; i < test::kCount; i += lanes<L>()) {
    store_lane(apply_one(o, load_lane<L>(a + i), load_lane<L>(b + i)), to + i);
  }
  return lanes<L>();
}
int apply_f32(test::operation o, const float* a, const float* b, float* to) { return apply(o, a, b, to); }
int apply_f64(test::operation o, const double* a, const double* b, double* to) { return apply(o, a, b, to); }

ONEPASS_END

#if HWY_ONCE
#include <cmath>
#include <functional>
#include <limits>

namespace onepass {
HWY_EXPORT(apply_f32);
HWY_EXPORT(apply_f64);

namespace test {
namespace {

int run(operation o, const float* a, const float* b, float* to) { return HWY_DYNAMIC_DISPATCH(apply_f32)(o, a, b, to); }
int run(operation o, const double* a, const double* b, double* to) {
  return HWY_DYNAMIC_DISPATCH(apply_f64)(o, a, b, to);
}

template <class T>
struct inputs {
  static constexpr T kNan = std::numeric_limits<T>::quiet_NaN(), kInf = std::numeric_limits<T>::infinity();
  T a[kCount] = {T(1.5), T(-2),   0, T(-0.0), kNan,    3,        kInf, -kInf,
                 T(0.1), T(-0.7), 1, -1,      T(1e30), T(1e-30), 42,   T(-1e-3)};
  T b[kCount] = {T(-1), T(-3), T(-0.0), 0, 1, kNan, 1, 2, T(0.3), T(-0.2), 7, kInf, T(2), T(-3), 42, T(1e-3)};
};

bool same(double a, double b) { return std::isnan(a) ? std::isnan(b) : a == b; }

// f(a, b) is what each number should become.
template <class T>
void expect(operation o, const std::function<T(T, T)>& f) {
  const inputs<T> in;
  T out[kCount];
  run(o, in.a, in.b, out);
  for (int i = 0; i < kCount; ++i) {
    EXPECT_TRUE(same(static_cast<double>(out[i]), static_cast<double>(f(in.a[i], in.b[i]))))
        << "operation " << static_cast<int>(o) << " of " << in.a[i] << ", " << in.b[i] << " gave " << out[i];
  }
}

template <class T>
void expect_operators() {
  expect<T>(operation::add, [](T a, T b) { return a + b; });
  expect<T>(operation::subtract, [](T a, T b) { return a - b; });
  expect<T>(operation::multiply, [](T a, T b) { return a * b; });
  expect<T>(operation::divide, [](T a, T b) { return a / b; });
  expect<T>(operation::negate, [](T a, T) { return -a; });
  expect<T>(operation::abs, [](T a, T) { return std::fabs(a); });
  expect<T>(operation::copy_sign, [](T a, T b) { return std::copysign(a, b); });
  expect<T>(operation::square_root, [](T a, T) { return std::sqrt(a); });
  expect<T>(operation::min, [](T a, T b) { return a > b ? b : a; });  // so a NaN in the first place stays
  expect<T>(operation::max, [](T a, T b) { return a < b ? b : a; });
  expect<T>(operation::sign, [](T a, T) { return a > 0 ? T(1) : a < 0 ? T(-1) : a == 0 ? T(0) : T(2); });
  expect<T>(operation::within, [](T a, T) { return a >= -1 && a <= 1 ? T(1) : T(0); });
  expect<T>(operation::outside, [](T a, T) { return a >= -1 && a <= 1 ? T(0) : T(1); });
}

template <class T>
void expect_positions() {
  T a[kCount], out[kCount];
  for (int i = 0; i < kCount; ++i) a[i] = static_cast<T>((i * 7) % kCount + 1);
  const int lanes = run(operation::iota, a, a, out);
  for (int i = 0; i < kCount; ++i) EXPECT_EQ(out[i], static_cast<T>(5 + i % lanes));
  run(operation::first_three, a, a, out);
  for (int i = 0; i < kCount; ++i) EXPECT_EQ(out[i], i % lanes < (lanes < 3 ? 1 : 3) ? a[i] : 0);
  for (int i = 0; lanes > 1 && i < kCount; ++i) {
    const int in = i % lanes;
    run(operation::zipped, a, a, out);
    EXPECT_EQ(out[i], a[i - in + in / 2 + in % 2 * (lanes / 2)]);
    run(operation::unzipped, a, a, out);
    EXPECT_EQ(out[i], a[i]);
    run(operation::quarter_turn, a, a, out);
    EXPECT_EQ(out[i], in % 2 == 0 ? -a[i + 1] : a[i - 1]);
  }
  for (int first = 0; first < kCount; first += lanes) {
    T sum = 0, largest = a[first];
    for (int i = first; i < first + lanes; ++i) {
      sum += a[i];
      largest = std::max(largest, a[i]);
    }
    run(operation::sum, a, a, out);
    EXPECT_EQ(out[first], sum);
    run(operation::largest, a, a, out);
    EXPECT_EQ(out[first], largest);
  }
}

class vec_test : public on_target {};
ONEPASS_ON_EVERY_TARGET(vec_test);

TEST_P(vec_test, operators_f32) { expect_operators<float>(); }
TEST_P(vec_test, operators_f64) { expect_operators<double>(); }
TEST_P(vec_test, positions_f32) { expect_positions<float>(); }
TEST_P(vec_test, positions_f64) { expect_positions<double>(); }

TEST_P(vec_test, fma_is_a_product_and_a_sum) {
  const inputs<float> in;
  float out[kCount];
  run(operation::fma, in.a, in.b, out);
  for (int i = 0; i < kCount; ++i) {
    const float twice = in.a[i] * in.b[i] + 1.0f, once = std::fma(in.a[i], in.b[i], 1.0f);
    EXPECT_TRUE(same(static_cast<double>(out[i]), static_cast<double>(twice)) ||
                same(static_cast<double>(out[i]), static_cast<double>(once)));
  }
}

}  // namespace
}  // namespace test
}  // namespace onepass
#endif
