// Activations and their derivatives on every SIMD target: against closed forms in long double, each derivative against
// differences of its own forward, and at the values where formulas break.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/word/activation_test.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "onepass/lane/cpu.h"
#include "onepass/lane/functions.h"
#include "onepass/word/functions.h"
#include "tests/lane/targets.h"

#ifndef ONEPASS_ACTIVATION_TEST_ONCE
#define ONEPASS_ACTIVATION_TEST_ONCE
namespace onepass::test {
constexpr int kMostLanes = 16;                                   // counts of numbers are multiples of it
enum class direction : int { forward, backward, value, slope };  // the last two: of a word's `both`, where it has that
}  // namespace onepass::test
#endif

ONEPASS_BEGIN

template <class T, class A>
void run_one(test::direction d, const T* number, const T* x, const T* dy, int64 count, T* y) {
  using L = vec<T>;
  for (int64 i = 0; i < count; i += lanes<L>()) {
    const L at = load_lane<L>(x + i), gradient = load_lane<L>(dy + i);
    const auto run = [&](auto... a) ONEPASS_LAMBDA {
      if constexpr (word::has_both<A, L> && sizeof...(a) == 0) {
        if (d == test::direction::value) return L(A::both(at).value);
        if (d == test::direction::slope) return L(gradient * A::both(at).slope);
      }
      const bool is_forward = d == test::direction::forward || d == test::direction::value;
      return L(is_forward ? A::forward(at, a...) : A::backward(at, gradient, a...));
    };
    if constexpr (A::about.parameter[0] == '\0') store_lane(run(), y + i);
    else if constexpr (A::about.parameters == 1) store_lane(run(L(number[0])), y + i);
    else store_lane(run(L(number[0]), L(number[1])), y + i);
  }
}
template <class T, class... A>
void run_named(word::list<A...>, const char* name, test::direction d, const T* number, const T* x, const T* dy,
               int64 count, T* y) {
  const auto is = [name](const char* other) {
    int i = 0;
    while (name[i] != '\0' && name[i] == other[i]) ++i;
    return name[i] == other[i];
  };
  ((is(A::about.name) ? run_one<T, A>(d, number, x, dy, count, y) : void()), ...);
}
void run_f32(const char* name, test::direction d, const float* number, const float* x, const float* dy, int64 count,
             float* y) {
  run_named(word::activations(), name, d, number, x, dy, count, y);
  run_named(word::functions(), name, d, number, x, dy, count, y);
}
void run_f64(const char* name, test::direction d, const double* number, const double* x, const double* dy, int64 count,
             double* y) {
  run_named(word::activations(), name, d, number, x, dy, count, y);
  run_named(word::functions(), name, d, number, x, dy, count, y);
}

ONEPASS_END

#if HWY_ONCE
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "src/line/words.h"

namespace onepass {
HWY_EXPORT(run_f32);
HWY_EXPORT(run_f64);

namespace test {
namespace {

// Of a word, as many as it takes.
struct numbers {
  double first = 0, second = 0;
};

template <class T>
std::vector<T> run(const char* name, direction d, const numbers& given, const std::vector<T>& x, T dy = T(1)) {
  std::vector<T> padded = x;
  padded.resize((x.size() + kMostLanes - 1) / kMostLanes * kMostLanes);
  const std::vector<T> gradient(padded.size(), dy);
  std::vector<T> y(padded.size());
  const auto count = static_cast<int64>(padded.size());
  const T number[] = {static_cast<T>(given.first), static_cast<T>(given.second)};
  if constexpr (sizeof(T) == 4)
    HWY_DYNAMIC_DISPATCH(run_f32)(name, d, number, padded.data(), gradient.data(), count, y.data());
  else HWY_DYNAMIC_DISPATCH(run_f64)(name, d, number, padded.data(), gradient.data(), count, y.data());
  y.resize(x.size());
  return y;
}

using number = long double;

number sigmoid(number x) { return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)); }
number cdf(number x) { return std::erfc(-x * 0.70710678118654752440L) / 2; }
number density(number x) { return 0.39894228040143267794L * std::exp(-x * x / 2); }
number twice_u(number x) { return 1.59576912160573071176L * (x + 0.044715L * x * x * x); }
number twice_u_slope(number x) { return 1.59576912160573071176L * (1 + 3 * 0.044715L * x * x); }
// d(x · sigmoid(v(x))) / dx
number gated_slope(number x, number v, number dv) { return sigmoid(v) * (1 + x * dv * sigmoid(-v)); }
number softplus(number x) { return std::log1p(std::exp(x)); }
number sech(number x) { return 1 / std::cosh(x); }

// f and its derivative; `a` is the word's number.
struct activation {
  const char* name;
  number a;
  number (*f)(number x, number a);
  number (*df)(number x, number a);
  std::vector<double> kinks;  // where the derivative jumps
  double begins = -25;        // from where on differences are close to it
  double b = 0;               // the word's second number

  numbers of() const { return {static_cast<double>(a), b}; }
};

const std::vector<activation>& activations() {
  static const std::vector<activation> all = {
      {"relu",
       0,
       [](number x, number) { return std::max(x, 0.0L); },
       [](number x, number) { return x > 0 ? 1.0L : 0.0L; },
       {0}},
      {"gelu",
       0,
       [](number x, number) { return x * cdf(x); },
       [](number x, number) { return cdf(x) + x * density(x); },
       {}},
      {"gelu_tanh",
       0,
       [](number x, number) { return x * sigmoid(twice_u(x)); },
       [](number x, number) { return gated_slope(x, twice_u(x), twice_u_slope(x)); },
       {}},
      {"silu",
       0,
       [](number x, number) { return x * sigmoid(x); },
       [](number x, number) { return gated_slope(x, x, 1); },
       {}},
      {"tanh",
       0,
       [](number x, number) { return std::tanh(x); },
       [](number x, number) { return sech(x) * sech(x); },
       {}},
      {"sigmoid",
       0,
       [](number x, number) { return sigmoid(x); },
       [](number x, number) { return sigmoid(x) * sigmoid(-x); },
       {}},
      {"relu_squared",
       0,
       [](number x, number) { return x > 0 ? x * x : 0.0L; },
       [](number x, number) { return 2 * std::max(x, 0.0L); },
       {0}},
      {"quick_gelu",
       0,
       [](number x, number) { return x * sigmoid(1.702L * x); },
       [](number x, number) { return gated_slope(x, 1.702L * x, 1.702L); },
       {}},
      {"softplus",
       0,
       [](number x, number) { return x > 20 ? x : softplus(x); },
       [](number x, number) { return x > 20 ? 1.0L : sigmoid(x); },
       {20}},
      {"mish",
       0,
       [](number x, number) { return x * std::tanh(softplus(x)); },
       [](number x, number) { return std::tanh(softplus(x)) + x * sigmoid(x) * sech(softplus(x)) * sech(softplus(x)); },
       {20}},
      {"hardswish",
       0,
       [](number x, number) { return x * std::min(std::max(x + 3, 0.0L), 6.0L) / 6; },
       [](number x, number) { return x <= -3  ? 0.0L
                                     : x >= 3 ? 1.0L
                                              : x / 3 + 0.5L; },
       {-3, 3}},
      {"elu",
       0.75L,
       [](number x, number a) { return x > 0 ? x : a * std::expm1(x); },
       [](number x, number a) { return x > 0 ? 1.0L : a * std::exp(x); },
       {0}},
      {"leaky_relu",
       0.125L,
       [](number x, number a) { return x > 0 ? x : a * x; },
       [](number x, number a) { return x > 0 ? 1.0L : a; },
       {0}},
      {"softsign",
       0,
       [](number x, number) { return x / (1 + std::fabs(x)); },
       [](number x, number) { return 1 / ((1 + std::fabs(x)) * (1 + std::fabs(x))); },
       {0}},
      {"exp", 0, [](number x, number) { return std::exp(x); }, [](number x, number) { return std::exp(x); }, {}},
      {"log", 0, [](number x, number) { return std::log(x); }, [](number x, number) { return 1 / x; }, {}, 1},
      {"sqrt",
       0,
       [](number x, number) { return std::sqrt(x); },
       [](number x, number) { return 0.5L / std::sqrt(x); },
       {},
       1},
      {"abs",
       0,
       [](number x, number) { return std::fabs(x); },
       [](number x, number) { return x > 0   ? 1.0L
                                     : x < 0 ? -1.0L
                                             : 0.0L; },
       {0}},
      {"neg", 0, [](number x, number) { return -x; }, [](number, number) { return -1.0L; }, {}},
      {"square", 0, [](number x, number) { return x * x; }, [](number x, number) { return 2 * x; }, {}},
      {"softcap",
       15,
       [](number x, number a) { return a * std::tanh(x / a); },
       [](number x, number a) { return sech(x / a) * sech(x / a); },
       {}},
      {"clamp",
       -1.5L,
       [](number x, number) { return std::min(std::max(x, -1.5L), 2.0L); },
       [](number x, number) { return x > -1.5L && x < 2 ? 1.0L : 0.0L; },
       {-1.5, 2},
       -25,
       2},
      {"pow",
       2.5L,
       [](number x, number a) { return std::pow(x, a); },
       [](number x, number a) { return a * std::pow(x, a - 1); },
       {},
       1},
  };
  return all;
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();

class activation_test : public on_target {};
ONEPASS_ON_EVERY_TARGET(activation_test);

TEST(activations, all_are_tested) {
  ASSERT_EQ(spec::activations().size(), activations().size());
  for (std::size_t i = 0; i < activations().size(); ++i)
    EXPECT_STREQ(spec::activations()[i]->name, activations()[i].name);
}

// Evenly over what matters, and by magnitude over the rest.
template <class T>
std::vector<T> sweep() {
  std::vector<T> x;
  for (int i = -(1 << 14); i <= 1 << 14; ++i) x.push_back(static_cast<T>(i * (30.0 / (1 << 14))));
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> exponent(-100, 13);
  for (int i = 0; i < 1 << 14; ++i) x.push_back(static_cast<T>((i % 2 ? 1 : -1) * std::exp2(exponent(random))));
  return x;
}

// Bounds of the error in f32 and f64, in units of epsilon · (|v| + |x v'|) of the value v: rounding x alone makes half
// of one. Seen: forward 1.57 (quick_gelu, f64), backward 4.03 (mish, f32 without FMA).
constexpr double kForwardError = 2, kBackwardError = 5;

// The largest error in that unit.
template <class T>
double worst_error(const activation& of, direction d, T& at) {
  const bool is_forward = d == direction::forward || d == direction::value;
  const auto reference = is_forward ? of.f : of.df;
  constexpr number kEpsilon = std::numeric_limits<T>::epsilon(), kFlushed = std::numeric_limits<T>::min();
  const std::vector<T> x = sweep<T>();
  const std::vector<T> y = run<T>(of.name, d, of.of(), x, T(1.5));
  const number dy = is_forward ? 1 : 1.5L;
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const number here = x[i], step = std::fabs(here) * 0x1p-20L;
    const number value = dy * reference(here, of.a);
    if (std::isnan(value) && std::isnan(y[i])) continue;
    if (std::fabs(value) > std::numeric_limits<T>::max() && std::isinf(y[i])) continue;
    const number change =
        std::fabs(dy * (reference(here + step, of.a) - reference(here - step, of.a))) * 0x1p19L;  // |x v'|
    const number error = std::fabs(static_cast<number>(y[i]) - value);
    if (std::isnan(error)) return at = x[i], kNan;
    const number growth = 1 + std::fabs(here);
    if (error <= kFlushed * growth * growth * growth) continue;  // exp is 0 below the smallest normal number
    const double relative = static_cast<double>(error / (kEpsilon * (std::fabs(value) + change)));
    if (relative > worst) worst = relative, at = x[i];
  }
  return worst;
}

template <class T>
void expect_closed_forms() {
  for (const activation& of : activations()) {
    T at{};
    for (const direction d : {direction::forward, direction::value}) {
      const double forward = worst_error<T>(of, d, at);
      EXPECT_LE(forward, kForwardError) << of.name << " at " << at;
    }
    for (const direction d : {direction::backward, direction::slope}) {
      const double backward = worst_error<T>(of, d, at);
      EXPECT_LE(backward, kBackwardError) << of.name << "'s derivative at " << at;
    }
  }
}

TEST_P(activation_test, closed_forms_f32) { expect_closed_forms<float>(); }
TEST_P(activation_test, closed_forms_f64) { expect_closed_forms<double>(); }

// Five points: the error is h⁴/30 of the fifth derivative, and epsilon / h of rounding.
TEST_P(activation_test, derivatives_are_differences) {
  constexpr double kStep = 0x1p-10;
  for (const activation& of : activations()) {
    std::vector<double> x;
    for (int i = -2000; i <= 2000; ++i) {
      const double here = (i + 0.5) / 80;  // [-25, 25]
      const auto near = [here](double kink) { return std::fabs(here - kink) <= 2 * kStep; };
      if (here > of.begins && std::none_of(of.kinks.begin(), of.kinks.end(), near)) x.push_back(here);
    }
    const auto forward = [&](double shift) {
      std::vector<double> at = x;
      for (double& v : at) v += shift;
      return run(of.name, direction::forward, of.of(), at);
    };
    const auto a = forward(-2 * kStep), b = forward(-kStep), c = forward(kStep), d = forward(2 * kStep);
    const auto backward = run(of.name, direction::backward, of.of(), x, -0.75);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double difference = (8 * (c[i] - b[i]) - (d[i] - a[i])) / (12 * kStep);
      ASSERT_NEAR(backward[i], -0.75 * difference, 2e-11 * (1 + std::fabs(difference))) << of.name << " at " << x[i];
    }
  }
}

// What PyTorch 2.15 gives (f64), with elu's and leaky_relu's defaults. NaN stands where PyTorch gives NaN, too: there
// is no promise then. At the kinks the derivative is PyTorch's choice.
struct special {
  const char* name;
  double x, y, slope;
  numbers given = {kNan};  // NaN: the default
};
constexpr special kSpecial[] = {{"relu", 0, 0, 0},
                                {"relu", -0.0, 0, 0},
                                {"relu", kInf, kInf, 1},
                                {"relu", -kInf, 0, 0},
                                {"relu", 1e4, 1e4, 1},
                                {"relu", -1e4, 0, 0},
                                {"gelu", 0, 0, 0.5},
                                {"gelu", kInf, kInf, kNan},
                                {"gelu", -kInf, kNan, kNan},
                                {"gelu", 1e4, 1e4, 1},
                                {"gelu", -1e4, 0, 0},
                                {"gelu_tanh", 0, 0, 0.5},
                                {"gelu_tanh", kInf, kInf, kNan},
                                {"gelu_tanh", -kInf, kNan, kNan},
                                {"gelu_tanh", 1e4, 1e4, 1},
                                {"gelu_tanh", -1e4, 0, 0},
                                {"gelu_tanh", 1e15, 1e15, 1},
                                {"gelu_tanh", -1e15, 0, 0},  // x³ overflows f32
                                {"silu", 0, 0, 0.5},
                                {"silu", kInf, kInf, kNan},
                                {"silu", -kInf, kNan, kNan},
                                {"silu", 1e4, 1e4, 1},
                                {"silu", -1e4, 0, 0},
                                {"tanh", 0, 0, 1},
                                {"tanh", kInf, 1, 0},
                                {"tanh", -kInf, -1, 0},
                                {"tanh", 1e4, 1, 0},
                                {"tanh", -1e4, -1, 0},
                                {"sigmoid", 0, 0.5, 0.25},
                                {"sigmoid", kInf, 1, 0},
                                {"sigmoid", -kInf, 0, 0},
                                {"sigmoid", 1e4, 1, 0},
                                {"sigmoid", -1e4, 0, 0},
                                {"relu_squared", 0, 0, 0},
                                {"relu_squared", kInf, kInf, kInf},
                                {"relu_squared", -kInf, 0, 0},
                                {"relu_squared", 1e4, 1e8, 2e4},
                                {"relu_squared", -1e4, 0, 0},
                                {"quick_gelu", 0, 0, 0.5},
                                {"quick_gelu", kInf, kInf, kNan},
                                {"quick_gelu", -kInf, kNan, kNan},
                                {"quick_gelu", 1e4, 1e4, 1},
                                {"quick_gelu", -1e4, 0, 0},
                                {"quick_gelu", 3e38, 3e38, 1},
                                {"quick_gelu", -3e38, 0, 0},  // 1.702x overflows f32
                                {"softplus", 0, 0.6931471805599453, 0.5},
                                {"softplus", kInf, kInf, 1},
                                {"softplus", -kInf, 0, 0},
                                {"softplus", 1e4, 1e4, 1},
                                {"softplus", -1e4, 0, 0},
                                {"softplus", 20, 20.000000002061153, 0.9999999979388464},
                                {"softplus", 20.5, 20.5, 1},
                                {"mish", 0, 0, 0.6},
                                {"mish", kInf, kInf, kNan},
                                {"mish", -kInf, kNan, kNan},
                                {"mish", 1e4, 1e4, 1},
                                {"mish", -1e4, 0, 0},
                                {"mish", 20, 20, 1},
                                {"hardswish", 0, 0, 0.5},
                                {"hardswish", kInf, kInf, 1},
                                {"hardswish", -kInf, kNan, 0},
                                {"hardswish", 1e4, 1e4, 1},
                                {"hardswish", -1e4, 0, 0},
                                {"hardswish", -3, 0, 0},
                                {"hardswish", 3, 3, 1},
                                {"elu", 0, 0, 1},
                                {"elu", kInf, kInf, 1},
                                {"elu", -kInf, -1, 0},
                                {"elu", 1e4, 1e4, 1},
                                {"elu", -1e4, -1, 0},
                                {"leaky_relu", 0, 0, 0.01},
                                {"leaky_relu", kInf, kInf, 1},
                                {"leaky_relu", -kInf, -kInf, 0.01},
                                {"leaky_relu", 1e4, 1e4, 1},
                                {"leaky_relu", -1e4, -100, 0.01},
                                {"softsign", 0, 0, 1},
                                {"softsign", kInf, kNan, kNan},
                                {"softsign", -kInf, kNan, kNan},
                                {"softsign", 1e4, 0.9999000099990001, 9.998000299960005e-09},
                                {"softsign", -1e4, -0.9999000099990001, 9.998000299960005e-09},
                                {"exp", 0, 1, 1},
                                {"exp", kInf, kInf, kInf},
                                {"exp", -kInf, 0, 0},
                                {"exp", 1e4, kInf, kInf},
                                {"exp", -1e4, 0, 0},
                                {"log", 0, -kInf, kInf},
                                {"log", -0.0, -kInf, -kInf},
                                {"log", kInf, kInf, 0},
                                {"log", 1, 0, 1},
                                {"log", -2, kNan, -0.5},
                                {"sqrt", 0, 0, kInf},
                                {"sqrt", -0.0, -0.0, -kInf},
                                {"sqrt", kInf, kInf, 0},
                                {"sqrt", -1, kNan, kNan},
                                {"abs", 0, 0, 0},
                                {"abs", -0.0, 0, 0},
                                {"abs", kInf, kInf, 1},
                                {"abs", -kInf, kInf, -1},
                                {"abs", kNan, kNan, 0},
                                {"neg", kInf, -kInf, -1},
                                {"neg", 0, -0.0, -1},
                                {"square", -kInf, kInf, -kInf},
                                {"square", -0.0, 0, -0.0},
                                {"softcap", 0, 0, 1, {30}},
                                {"softcap", kInf, 30, 0, {30}},
                                {"softcap", -kInf, -30, 0, {30}},
                                {"softcap", -1e5, -30, 0, {30}},
                                {"clamp", -0.0, -0.0, 0, {0, 1}},
                                {"clamp", 0, 0, 0, {0, 1}},
                                {"clamp", 1, 1, 0, {0, 1}},
                                {"clamp", 0.5, 0.5, 1, {0, 1}},
                                {"clamp", -1, 0, 0, {0, 1}},
                                {"clamp", kInf, 1, 0, {0, 1}},
                                {"clamp", kInf, kInf, 1, {0, kInf}},
                                {"clamp", -kInf, 0, 0, {0, kInf}},
                                {"clamp", -kInf, -kInf, 1, {-kInf, 0}},
                                {"clamp", kNan, kNan, 0, {0, kInf}},
                                {"clamp", kNan, kNan, 0, {0, 1}},
                                {"clamp", 0.5, -1, 0, {1, -1}},
                                {"pow", -2, -8, 12, {3}},
                                {"pow", -2, 16, -32, {4}},
                                {"pow", -2, -0.125, -0.1875, {-3}},
                                {"pow", -2, kNan, kNan, {0.5}},
                                {"pow", 0, 0, kInf, {0.5}},
                                {"pow", 0, 0, 1, {1}},
                                {"pow", 0, 0, 0, {2}},
                                {"pow", 0, 1, 0, {0}},
                                {"pow", kNan, 1, 0, {0}},
                                {"pow", kInf, kInf, kInf, {1.5}},
                                {"pow", 0, kInf, -kInf, {-1}},
                                {"pow", -0.0, -kInf, -kInf, {-1}}};

template <class T>
void expect_special_values() {
  constexpr double kEpsilon = std::numeric_limits<T>::epsilon();
  const auto fits = [](T got, double expected) {
    const auto g = static_cast<double>(got);
    return std::isnan(expected) || g == expected || std::fabs(g - expected) <= 2 * kEpsilon * std::fabs(expected);
  };
  for (const special& s : kSpecial) {
    const numbers parameter =
        std::isnan(s.given.first) ? numbers{spec::find(spec::activations(), s.name)->parameter_default} : s.given;
    const std::vector<T> x(1, static_cast<T>(s.x));
    const T y = run(s.name, direction::forward, parameter, x)[0],
            slope = run(s.name, direction::backward, parameter, x)[0];
    EXPECT_TRUE(fits(y, s.y)) << s.name << "(" << s.x << ") = " << y << ", expected " << s.y;
    EXPECT_TRUE(fits(slope, s.slope)) << s.name << "'(" << s.x << ") = " << slope << ", expected " << s.slope;
  }
  for (const activation& of : activations()) {
    const std::vector<T> x(1, std::numeric_limits<T>::quiet_NaN());
    EXPECT_TRUE(std::isnan(run(of.name, direction::forward, of.of(), x)[0])) << of.name;
  }
}

// What the planner goes by.
TEST_P(activation_test, zeros_are_mapped_to_zero_where_the_descriptor_says_so) {
  for (const activation& of : activations()) {
    bool maps = true;  // whatever its numbers are
    for (const numbers& given : {of.of(), numbers{0, 0}, numbers{1, 1}}) {
      maps &= run<double>(of.name, direction::forward, given, {0})[0] == 0;
      maps &= std::isfinite(run<double>(of.name, direction::backward, given, {0})[0]);
    }
    EXPECT_EQ(maps, spec::find(spec::activations(), of.name)->maps_zero_to_zero) << of.name;
  }
}

TEST_P(activation_test, special_values_f32) { expect_special_values<float>(); }
TEST_P(activation_test, special_values_f64) { expect_special_values<double>(); }

}  // namespace
}  // namespace test
}  // namespace onepass
#endif
