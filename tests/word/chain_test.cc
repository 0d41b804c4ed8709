// Words in sequence: the fold, the walk back, keeps and the point where backward resumes. Every lane holds one number.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/word/chain_test.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "onepass/lane/cpu.h"
#include "onepass/lane/math.h"
#include "onepass/word/chain.h"
#include "tests/lane/targets.h"

#ifndef ONEPASS_CHAIN_TEST_ONCE
#define ONEPASS_CHAIN_TEST_ONCE
namespace onepass::test {
// bias | gelu | scale | mul(c) | add | gate(silu);  bias | keep | tanh | scale, and the same resumed;  dropout | add
enum class the_chain : int { smooth, keeps, resumes, drops };
struct input {
  double x = 0, dy = 0, operand[4] = {}, parameter = 0, random = 0, kept = 0, kept_gradient = 0;
  unsigned wants = ~0u;
};
struct output {
  double y = 0, dx = 0, gradient[4] = {}, kept = 0;
  unsigned read = 0, given = 0;  // operands that backward read, and those that got a gradient
};
constexpr double kToSixteenths = 0x1.8p48;  // added and taken away again: rounds as a store would
}  // namespace onepass::test
#endif

ONEPASS_BEGIN

struct test_place {
  using L = vec<double>;
  const test::input& in;
  test::output& out;

  static double number(L v) { return sum_lanes(v) / lanes<L>(); }

  template <class, int I>
  L operand() {
    out.read |= 1u << I;
    return L(in.operand[I]);
  }
  template <int I>
  bool wants() const {
    return in.wants >> I & 1;
  }
  template <int I>
  void column_gradient(L g) {
    out.given |= 1u << I;
    out.gradient[I] = number(g);
  }
  template <int I>
  void column_gradient(L dy, L x) {
    column_gradient<I>(dy * x);
  }
  template <int I>
  void tensor_gradient(L g) {
    column_gradient<I>(g);
  }
  template <int>
  double parameter() const {
    return in.parameter;
  }
  template <class, int>
  L::mask keeps(int threshold) const {
    return L(in.random) >= L(threshold);
  }
  L rounded(L v) const { return (v + L(test::kToSixteenths)) - L(test::kToSixteenths); }
  template <int>
  L as_kept(L v) const {
    return rounded(v);
  }
  template <int>
  L keep(L v) {
    out.kept = number(rounded(v));
    return rounded(v);
  }
  template <class, int>
  L kept() const {
    return L(in.kept);
  }
  template <class, int>
  L kept_gradient() const {
    return L(in.kept_gradient);
  }
};

using smooth_chain =
    chain<placed<word::bias, 0, -1, -1>, placed<word::gelu, -1, -1, -1>, placed<word::scale, 1, -1, -1>,
          placed<word::mul, -1, 0, -1>, placed<word::add, 2, -1, -1>, placed<word::gate<word::silu>, 3, -1, -1>>;
using keep_chain = chain<placed<word::bias, 0, -1, -1>, placed<word::keep, -1, -1, 0>, placed<word::tanh, -1, -1, -1>,
                         placed<word::scale, 1, -1, -1>>;
using resume_chain = chain<placed<word::bias, 0, -1, -1>, placed<word::resume, -1, -1, 0>,
                           placed<word::tanh, -1, -1, -1>, placed<word::scale, 1, -1, -1>>;
using drop_chain = chain<placed<word::dropout, -1, 0, 0>, placed<word::add, 0, -1, -1>>;

static_assert(smooth_chain::operands == 4 && smooth_chain::needs_input && !smooth_chain::resumes);
static_assert(keep_chain::keeps == 1 && keep_chain::needs_input && !keep_chain::resumes);
static_assert(resume_chain::keeps == 1 && resume_chain::resumes && !resume_chain::needs_input, "x is not read then");
static_assert(drop_chain::dropouts == 1 && drop_chain::operands == 1 && !drop_chain::needs_input);

template <class Chain>
void run_one(const test::input& in, test::output& out) {
  using L = vec<double>;
  test_place at{in, out};
  out.y = test_place::number(Chain::forward(L(in.x), at));
  out.read = 0;
  out.dx = test_place::number(Chain::backward(L(in.x), L(in.dy), at));
}
void run_chain(test::the_chain which, const test::input& in, test::output& out) {
  switch (which) {
    case test::the_chain::smooth: return run_one<smooth_chain>(in, out);
    case test::the_chain::keeps: return run_one<keep_chain>(in, out);
    case test::the_chain::resumes: return run_one<resume_chain>(in, out);
    case test::the_chain::drops: return run_one<drop_chain>(in, out);
  }
}

ONEPASS_END

#if HWY_ONCE
#include <cmath>
#include <limits>

namespace onepass {
HWY_EXPORT(run_chain);

namespace test {
namespace {

output run(the_chain which, const input& in) {
  output out;
  HWY_DYNAMIC_DISPATCH(run_chain)(which, in, out);
  return out;
}

const input kInput{.x = 0.7, .dy = -1.25, .operand = {-0.3, 1.7, 0.4, -2.2}, .parameter = 0.6, .kept_gradient = 0.5};

class chain_test : public on_target {};
ONEPASS_ON_EVERY_TARGET(chain_test);

TEST_P(chain_test, the_fold_goes_left_to_right) {
  const double u = kInput.x - 0.3, v = 0.5 * u * std::erfc(-u / std::sqrt(2.0)) * 1.7 * 0.6 + 0.4;
  EXPECT_NEAR(run(the_chain::smooth, kInput).y, v / (1 + std::exp(-v)) * -2.2, 1e-15);
}

TEST_P(chain_test, gradients_are_differences) {
  constexpr double kStep = 0x1p-10;
  const output got = run(the_chain::smooth, kInput);
  EXPECT_EQ(got.given, 0b1111u);
  const auto difference = [](double input::*field, int operand) {
    const auto at = [&](double shift) {
      input in = kInput;
      (field ? in.*field : in.operand[operand]) += shift;
      return run(the_chain::smooth, in).y;
    };
    return kInput.dy * (8 * (at(kStep) - at(-kStep)) - (at(2 * kStep) - at(-2 * kStep))) / (12 * kStep);
  };
  EXPECT_NEAR(got.dx, difference(&input::x, 0), 1e-11);
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(got.gradient[i], difference(nullptr, i), 1e-11) << "operand " << i;
}

TEST_P(chain_test, unwanted_gradients_are_not_given) {
  input in = kInput;
  in.wants = 0b0101;
  const output got = run(the_chain::smooth, in);
  EXPECT_EQ(got.given, 0b0101u);
  EXPECT_EQ(got.dx, run(the_chain::smooth, kInput).dx);
}

TEST_P(chain_test, a_kept_value_is_what_the_rest_sees) {
  const output got = run(the_chain::keeps, kInput);
  EXPECT_EQ(got.kept, 0.375);  // 0.4 in sixteenths
  const double t = std::tanh(0.375);
  EXPECT_NEAR(got.y, t * 1.7, 1e-15);
  EXPECT_NEAR(got.dx, kInput.dy * 1.7 * (1 - t * t) + kInput.kept_gradient, 1e-15);
  EXPECT_EQ(got.gradient[0], got.dx);
  EXPECT_NEAR(got.gradient[1], kInput.dy * t, 1e-15);
}

TEST_P(chain_test, backward_resumes_from_the_kept_tensor) {
  input in = kInput;
  in.kept = 0.375;
  in.x = in.operand[0] = std::numeric_limits<double>::quiet_NaN();  // not to be read
  const output got = run(the_chain::resumes, in), expected = run(the_chain::keeps, kInput);
  EXPECT_EQ(got.dx, expected.dx);
  EXPECT_EQ(got.gradient[0], expected.gradient[0]);
  EXPECT_EQ(got.gradient[1], expected.gradient[1]);
  EXPECT_EQ(got.read, 0b10u);
}

TEST_P(chain_test, dropout_drops_the_same_both_ways) {
  input in = kInput;
  in.parameter = 0.25;
  in.random = 16383;
  EXPECT_EQ(run(the_chain::drops, in).y, in.operand[0]);
  EXPECT_EQ(run(the_chain::drops, in).dx, 0);
  in.random = 16384;
  EXPECT_NEAR(run(the_chain::drops, in).y, in.x * 4 / 3 + in.operand[0], 1e-15);
  EXPECT_NEAR(run(the_chain::drops, in).dx, in.dy * 4 / 3, 1e-15);
  EXPECT_EQ(run(the_chain::drops, in).gradient[0], in.dy);
}

}  // namespace
}  // namespace test
}  // namespace onepass
#endif
