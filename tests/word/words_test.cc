// The words that are no activation, on every SIMD target: values, gradients, and what their descriptors promise.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/word/words_test.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "onepass/lane/cpu.h"
#include "onepass/lane/functions.h"
#include "onepass/word/functions.h"
#include "onepass/word/words.h"
#include "tests/lane/targets.h"

#ifndef ONEPASS_WORDS_TEST_ONCE
#define ONEPASS_WORDS_TEST_ONCE
namespace onepass::test {
// clang-format off
enum class the_word : int {
  bias, scale, mul, add, sub, times, div, gate_silu, gate_gelu, gate_elu, gated_silu, gated_softcap, mask_boolean,
  mask_additive, causal, dropout
};
// clang-format on
constexpr int kMostLanes = 16;  // counts of numbers are multiples of it
template <class T>
struct call {
  the_word word;
  T number;             // the line's number; the matrix row of `causal`
  const T *x, *o, *dy;  // o: the operand, the column of `causal`, the random numbers of `dropout`
  int64 count;
  T *y, *dx, *doperand;
};
}  // namespace onepass::test
#endif

ONEPASS_BEGIN

template <class L>
struct outcome {
  L y, dx, doperand;
};
template <class Word, class L, class... Number>
ONEPASS_FUNCTION outcome<L> with_operand(L x, L o, L dy, Number... n) {
  const word::gradients<L> g = Word::backward(x, o, dy, n...);
  return {Word::forward(x, o, n...), g.dx, g.doperand};
}
template <class L>
ONEPASS_FUNCTION outcome<L> apply(test::the_word w, L x, L o, L dy, typename L::scalar number) {
  const L none(0);
  switch (w) {
    case test::the_word::bias: return with_operand<word::bias>(x, o, dy);
    case test::the_word::scale: return with_operand<word::scale>(x, o, dy);
    case test::the_word::mul: return {word::mul::forward(x, L(number)), word::mul::backward(x, dy, L(number)), none};
    case test::the_word::add: return with_operand<word::add>(x, o, dy);
    case test::the_word::sub: return with_operand<word::sub>(x, o, dy);
    case test::the_word::times: return with_operand<word::times>(x, o, dy);
    case test::the_word::div: return with_operand<word::div>(x, o, dy);
    case test::the_word::gate_silu: return with_operand<word::gate<word::silu>>(x, o, dy);
    case test::the_word::gate_gelu: return with_operand<word::gate<word::gelu>>(x, o, dy);
    case test::the_word::gate_elu: return with_operand<word::gate<word::elu>>(x, o, dy, L(number));
    case test::the_word::gated_silu: return with_operand<word::gated<word::silu>>(x, o, dy);
    case test::the_word::gated_softcap: return with_operand<word::gated<word::soft_cap>>(x, o, dy, L(number));
    case test::the_word::mask_boolean: return with_operand<word::mask_boolean>(x, o, dy);
    case test::the_word::mask_additive: return with_operand<word::mask_additive>(x, o, dy);
    case test::the_word::causal:
      return {word::causal::forward(x, o, L(number)), word::causal::backward(dy, o, L(number)), none};
    case test::the_word::dropout: {
      const auto keeps = o >= L(static_cast<typename L::scalar>(word::dropout::threshold(number)));
      return {word::dropout::forward(x, keeps, number), word::dropout::backward(dy, keeps, number), none};
    }
  }
  return {none, none, none};
}
template <class T>
void run(const test::call<T>& c) {
  using L = vec<T>;
  for (int64 i = 0; i < c.count; i += lanes<L>()) {
    const outcome<L> out =
        apply(c.word, load_lane<L>(c.x + i), load_lane<L>(c.o + i), load_lane<L>(c.dy + i), c.number);
    store_lane(out.y, c.y + i), store_lane(out.dx, c.dx + i), store_lane(out.doperand, c.doperand + i);
  }
}
void run_f32(const test::call<float>& c) { run(c); }
void run_f64(const test::call<double>& c) { run(c); }

ONEPASS_END

#if HWY_ONCE
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace onepass {
HWY_EXPORT(run_f32);
HWY_EXPORT(run_f64);

namespace test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();

template <class T>
struct numbers {
  std::vector<T> y, dx, doperand;
};

template <class T>
numbers<T> run(the_word w, const std::vector<T>& x, const std::vector<T>& o, const std::vector<T>& dy,
               double number = 0) {
  numbers<T> out{x, x, x};
  const auto count = static_cast<int64>(x.size());
  const call<T> c{w,     static_cast<T>(number), x.data(),      o.data(),           dy.data(),
                  count, out.y.data(),           out.dx.data(), out.doperand.data()};
  if constexpr (sizeof(T) == 4) HWY_DYNAMIC_DISPATCH(run_f32)(c);
  else HWY_DYNAMIC_DISPATCH(run_f64)(c);
  return out;
}

constexpr std::size_t kCount = 1024;

std::vector<double> normals(unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0, 2);
  std::vector<double> all(kCount);
  for (double& v : all) v = normal(random);
  all[seed] = 0;  // a masked place, say
  return all;
}
const std::vector<double> kX = normals(1), kO = normals(2), kDy = normals(3);

class words_test : public on_target {};
ONEPASS_ON_EVERY_TARGET(words_test);

TEST_P(words_test, values) {
  const auto expect = [](the_word w, double number, const auto& of) {
    const numbers<double> got = run(w, kX, kO, kDy, number);
    for (std::size_t i = 0; i < kCount; ++i) EXPECT_EQ(got.y[i], of(kX[i], kO[i]));
  };
  expect(the_word::bias, 0, [](double x, double b) { return x + b; });
  expect(the_word::scale, 0, [](double x, double g) { return x * g; });
  expect(the_word::mul, 0.3, [](double x, double) { return x * 0.3; });
  expect(the_word::add, 0, [](double x, double r) { return x + r; });
  expect(the_word::sub, 0, [](double x, double t) { return x - t; });
  expect(the_word::times, 0, [](double x, double t) { return x * t; });
  expect(the_word::div, 0, [](double x, double t) { return x / t; });
  expect(the_word::mask_additive, 0, [](double x, double m) { return x + m; });
  const numbers<double> gate = run(the_word::gate_silu, kX, kO, kDy), gated = run(the_word::gated_silu, kO, kX, kDy);
  for (std::size_t i = 0; i < kCount; ++i) {
    const double expected = kX[i] / (1 + std::exp(-kX[i])) * kO[i];
    EXPECT_NEAR(gate.y[i], expected, 4e-15 * std::fabs(expected));
    EXPECT_EQ(gated.y[i], gate.y[i]);
    EXPECT_EQ(gated.dx[i], gate.doperand[i]);
    EXPECT_EQ(gated.doperand[i], gate.dx[i]);
  }
}

// dx and d operand against five-point differences of the word's own forward.
TEST_P(words_test, gradients_are_differences) {
  constexpr double kStep = 0x1p-10;
  for (const the_word w : {the_word::bias, the_word::scale, the_word::mul, the_word::add, the_word::sub,
                           the_word::times, the_word::div, the_word::gate_silu, the_word::gate_gelu, the_word::gate_elu,
                           the_word::gated_silu, the_word::gated_softcap, the_word::mask_additive}) {
    const auto forward = [&](double dx, double doperand) {
      std::vector<double> x = kX, o = kO;
      for (double& v : x) v += dx;
      for (double& v : o) v += doperand;
      return run(w, x, o, kDy, 0.75).y;
    };
    const auto expect = [&](const std::vector<double>& got, double x, double o, const char* of) {
      const auto a = forward(-2 * x, -2 * o), b = forward(-x, -o), c = forward(x, o), d = forward(2 * x, 2 * o);
      for (std::size_t i = 0; i < kCount; ++i) {
        if (w == the_word::gate_elu && std::fabs(kX[i]) <= 2 * kStep) continue;  // its kink
        if (w == the_word::div && std::fabs(kO[i]) < 1) continue;                // differences are not near there
        const double difference = kDy[i] * (8 * (c[i] - b[i]) - (d[i] - a[i])) / (12 * kStep);
        ASSERT_NEAR(got[i], difference, 5e-11 * (1 + std::fabs(difference)))
            << of << " of word " << static_cast<int>(w) << " at " << kX[i] << ", " << kO[i];
      }
    };
    const numbers<double> got = run(w, kX, kO, kDy, 0.75);
    expect(got.dx, kStep, 0, "dx");
    if (w != the_word::mul) expect(got.doperand, 0, kStep, "the operand's gradient");
  }
}

// The planner leaves out what a descriptor says backward does not read, and passes dy on where a gradient is dy itself.
template <class Word>
void expect_descriptor(the_word w) {
  constexpr descriptor about = Word::about;
  const std::vector<double> unknown(kCount, kNan);
  const numbers<double> whole = run(w, kX, kO, kDy, 0.75);
  const numbers<double> without =
      run(w, about.backward_needs_input ? kX : unknown, about.backward_needs_operand ? kO : unknown, kDy, 0.75);
  EXPECT_EQ(without.dx, whole.dx) << about.name;
  EXPECT_EQ(without.doperand, whole.doperand) << about.name;
  EXPECT_EQ(about.passes_gradient, whole.dx == kDy) << about.name;
  EXPECT_EQ(about.operand_gradient_is_dy, whole.doperand == kDy) << about.name;
}

TEST_P(words_test, descriptors_tell_what_backward_reads) {
  using namespace HWY_NAMESPACE::word;
  expect_descriptor<bias>(the_word::bias);
  expect_descriptor<scale>(the_word::scale);
  expect_descriptor<mul>(the_word::mul);
  expect_descriptor<add>(the_word::add);
  expect_descriptor<sub>(the_word::sub);
  expect_descriptor<times>(the_word::times);
  expect_descriptor<HWY_NAMESPACE::word::div>(the_word::div);
  expect_descriptor<gated<silu>>(the_word::gated_silu);
  expect_descriptor<gate<silu>>(the_word::gate_silu);
  expect_descriptor<gate<elu>>(the_word::gate_elu);
  expect_descriptor<mask_boolean>(the_word::mask_boolean);
  expect_descriptor<mask_additive>(the_word::mask_additive);
}

TEST_P(words_test, boolean_masks_hide_whatever_stands_there) {
  std::vector<double> x = kX, keep(kCount), dy = kDy;
  for (std::size_t i = 0; i < kCount; ++i) keep[i] = i % 3 == 0;
  x[0] = kInf, x[1] = kNan, x[2] = kInf, dy[4] = kNan, dy[5] = -kInf;
  const numbers<double> got = run(the_word::mask_boolean, x, keep, dy);
  for (std::size_t i = 0; i < kCount; ++i) {
    EXPECT_EQ(got.y[i], keep[i] != 0 ? x[i] : -kInf);
    EXPECT_EQ(got.dx[i], keep[i] != 0 ? dy[i] : 0);
  }
}

TEST_P(words_test, causal_hides_what_is_above_the_diagonal) {
  std::vector<double> column(kCount);
  for (std::size_t i = 0; i < kCount; ++i) column[i] = static_cast<double>(i);
  for (const int row : {0, 1, 500, 1023, 2000}) {
    const numbers<double> got = run(the_word::causal, kX, column, kDy, row);
    for (std::size_t i = 0; i < kCount; ++i) {
      EXPECT_EQ(got.y[i], static_cast<int>(i) <= row ? kX[i] : -kInf);
      EXPECT_EQ(got.dx[i], static_cast<int>(i) <= row ? kDy[i] : 0);
    }
  }
}

template <class T>
void expect_dropout() {
  constexpr int kAll = 65536;
  std::vector<T> random(kAll), x(kAll, T(3)), dy(kAll, T(-7));
  for (int i = 0; i < kAll; ++i) random[static_cast<std::size_t>(i)] = static_cast<T>(i);
  for (const double p : {0.0, 1e-6, 1e-5, 0.1, 0.25, 1.0 / 3, 0.5, 0.9, 0.99999, 1.0}) {
    const int dropped = static_cast<int>(std::lround(p * kAll));  // of all 2^16 random numbers
    const T factor = dropped == kAll ? T(0) : static_cast<T>(kAll) / static_cast<T>(kAll - dropped);
    const numbers<T> got = run(the_word::dropout, x, random, dy, p);
    for (int i = 0; i < kAll; ++i) {
      ASSERT_EQ(got.y[static_cast<std::size_t>(i)], i < dropped ? T(0) : T(3) * factor)
          << "p = " << p << ", random number " << i;
      ASSERT_EQ(got.dx[static_cast<std::size_t>(i)], i < dropped ? T(0) : T(-7) * factor)
          << "p = " << p << ", random number " << i;
    }
  }
}
TEST_P(words_test, dropout_keeps_by_thresholds_and_the_mean_f32) { expect_dropout<float>(); }
TEST_P(words_test, dropout_keeps_by_thresholds_and_the_mean_f64) { expect_dropout<double>(); }

TEST_P(words_test, dropped_numbers_are_zero_whatever_they_were) {
  const std::vector<double> x(kMostLanes, kInf), dy(kMostLanes, kNan), random(kMostLanes, 65535);
  const numbers<double> got = run(the_word::dropout, x, random, dy, 1.0);
  EXPECT_EQ(got.y, std::vector<double>(kMostLanes, 0));
  EXPECT_EQ(got.dx, std::vector<double>(kMostLanes, 0));
}

}  // namespace
}  // namespace test
}  // namespace onepass
#endif
