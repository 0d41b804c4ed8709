// Functions of a lane. Each states its largest error in units in the last place of its result, on any target, over all
// arguments; tests/lane/math_test.cc sweeps them. NaN gives NaN and an infinity the limit. Results below the smallest
// normal number may be zero, but not those of expm1, log1p, tanh and erf, which keep their accuracy down to denormals.
// log1p, erf and normal_cdf of f64 are libm's, element by element.
#if defined(ONEPASS_LANE_MATH_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_LANE_MATH_H_
#undef ONEPASS_LANE_MATH_H_
#else
#define ONEPASS_LANE_MATH_H_
#endif

#include <math.h>

#include "onepass/lane/coefficients.h"
#include "onepass/lane/pairs.h"
#include "onepass/lane/vec.h"

ONEPASS_BEGIN
namespace detail {

namespace c = coefficients;

// The polynomial with these coefficients, lowest power first.
template <int From = 0, class T, int N>
ONEPASS_FUNCTION vec<T> polynomial(vec<T> x, const T (&coefficient)[N]) {
  if constexpr (From + 1 == N) return vec<T>(coefficient[From]);
  else return fma(polynomial<From + 1>(x, coefficient), x, vec<T>(coefficient[From]));
}

// How to take exp's argument apart, x = n ln 2 + r: for each type 1 / ln 2, ln 2 in two parts, the number that rounds
// to an integer when added, what then makes n an exponent, the arguments at which exp is 0, infinite and finite for
// sure and that at which expm1 is -1, and p of exp(r) - 1 = r + r² p(r) for both ways of choosing n.
template <class T>
struct exp_constants;
template <>
struct exp_constants<float> {
  static constexpr float kLog2E = 1.44269504f, kLn2High = c::kLn2High_f32, kLn2Low = c::kLn2Low_f32;
  static constexpr float kRound = 12582912.0f, kBias = 127.0f, kAlmostHalf = 0.49999997f;  // kRound is 1.5 · 2^23
  static constexpr float kZero = -88.0f, kInfinite = 89.0f, kFinite = 88.0f, kMinusOne = -18.0f;
  static constexpr int kMantissaBits = 23;
  static constexpr const auto& kNearest = c::kExpNearest_f32;
  static constexpr const auto& kBelow = c::kExpBelow_f32;
};
template <>
struct exp_constants<double> {
  static constexpr double kLog2E = 1.4426950408889634, kLn2High = c::kLn2High_f64, kLn2Low = c::kLn2Low_f64;
  static constexpr double kRound = 6755399441055744.0, kBias = 1023.0, kAlmostHalf = 0.49999999999999994;
  static constexpr double kZero = -709.0, kInfinite = 710.0, kFinite = 709.0, kMinusOne = -38.0;
  static constexpr int kMantissaBits = 52;
  static constexpr const auto& kNearest = c::kExpNearest_f64;
  static constexpr const auto& kBelow = c::kExpBelow_f64;
};

// 2^n for the integer n + bias in the low bits of t: 0 for n = -bias, infinity for n = bias + 1.
template <class T>
ONEPASS_FUNCTION vec<T> power_of_two(vec<T> t) {
  const typename vec<T>::tag d;
  const hn::RebindToUnsigned<typename vec<T>::tag> du;
  return vec<T>(hn::BitCast(d, hn::ShiftLeft<exp_constants<T>::kMantissaBits>(hn::BitCast(du, t.raw))));
}

// exp(x) = scale · (1 + expm1).
template <class T>
struct exponential {
  vec<T> scale, expm1;
};

// With the nearest power of two as scale, |expm1| < 0.42. A bias less than the type's makes scale smaller; `low` is
// added to x.
template <class T, class... Low>
ONEPASS_FUNCTION exponential<T> nearest_exponential(vec<T> x, T bias, Low... low) {
  using k = exp_constants<T>;
  const vec<T> t = fma(x, vec<T>(k::kLog2E), vec<T>(k::kRound + bias));
  const vec<T> n = t - vec<T>(k::kRound + bias);
  const vec<T> r = (fma(n, vec<T>(-k::kLn2Low), fma(n, vec<T>(-k::kLn2High), x)) + ... + low);
  return {power_of_two(t), fma(r * r, polynomial(r, k::kNearest), r)};
}

// With the power of two below as scale, 0 <= expm1 < 1 up to rounding. That takes one more addition, but one scale
// then reaches every normal result, and scale · expm1 + (scale - 1) does not cancel for x >= 0.
template <class T>
ONEPASS_FUNCTION exponential<T> exponential_below(vec<T> x) {
  using k = exp_constants<T>;
  const vec<T> t = fma(x, vec<T>(k::kLog2E), vec<T>(-k::kAlmostHalf)) + vec<T>(k::kRound + k::kBias);
  const vec<T> n = t - vec<T>(k::kRound + k::kBias);
  const vec<T> r = fma(n, vec<T>(-k::kLn2Low), fma(n, vec<T>(-k::kLn2High), x));
  return {power_of_two(t), fma(r * r, polynomial(r, k::kBelow), r)};
}

}  // namespace detail

// 2 ULP.
template <class T>
ONEPASS_FUNCTION vec<T> exp(vec<T> x) {
  using k = detail::exp_constants<T>;
  const detail::exponential<T> e = detail::exponential_below(min(max(x, vec<T>(k::kZero)), vec<T>(k::kInfinite)));
  return (vec<T>(T(1)) + e.expm1) * e.scale;  // scale may be infinite, expm1 just below zero: no fma
}

// 3 ULP.
template <class T>
ONEPASS_FUNCTION vec<T> sigmoid(vec<T> x) {
  using k = detail::exp_constants<T>;
  const detail::exponential<T> e =
      detail::nearest_exponential(min(max(x, vec<T>(k::kZero)), vec<T>(k::kFinite)), k::kBias);
  const vec<T> exp_x = fma(e.scale, e.expm1, e.scale);
  return exp_x / (vec<T>(T(1)) + exp_x);
}

// Neither by a subtraction: what is made of the rest of saturated values stays accurate.
template <class T>
ONEPASS_FUNCTION logistic_pair<vec<T>> logistic(vec<T> x) {
  const vec<T> one(T(1)), e = exp(-abs(x)), r = one / (one + e), far = e * r;
  const auto below = x < vec<T>(T(0));
  return {where(below, far, r), where(below, r, far)};
}

// 2 ULP.
template <class T>
ONEPASS_FUNCTION vec<T> expm1(vec<T> x) {
  using k = detail::exp_constants<T>;
  x = min(max(x, vec<T>(k::kMinusOne)), vec<T>(k::kInfinite));
  const detail::exponential<T> e = detail::nearest_exponential(x, k::kBias - T(1));  // 2^n may overflow: half of it
  const vec<T> half = fma(e.scale, e.expm1, e.scale - vec<T>(T(0.5)));
  return half + half;
}

template <class T>
ONEPASS_FUNCTION tanh_pair<vec<T>> tanh_and_rest(vec<T> x) {
  const vec<T> one(T(1)), most(detail::exp_constants<T>::kFinite / T(2));
  const vec<T> distance = abs(x), a = min(distance, most);
  const detail::exponential<T> e = detail::exponential_below(a + a);
  // 1 + exp(2|x|) = sum + low; 2 / (sum + low) = rest (1 + more), and 1 - rest = far + left.
  const vec<T> above = e.scale + one, sum = fma(e.scale, e.expm1, above), low = fma(e.scale, e.expm1, above - sum);
  const vec<T> r = one / sum, rest = r + r, more = fma(-sum, r, one) - low * r, far = one - rest;
  const vec<T> left = (one - far) - rest;
  vec<T> near, limit;
  if constexpr (sizeof(T) == 4) {
    limit = vec<T>(T(0.7));
    near = fma(a * a * a, detail::polynomial(a * a, coefficients::kTanh_f32), a);
  } else {
    limit = one;
    near = fma(e.scale, e.expm1, e.scale - one) * r;
  }
  return {copy_sign(where(a < limit, near, far + fma(-rest, more, left)), x),
          where(distance > most, vec<T>(T(0)), fma(rest, more, rest))};
}

// f32: 1 ULP, f64: 3 ULP.
template <class T>
ONEPASS_FUNCTION vec<T> tanh(vec<T> x) {
  return tanh_and_rest(x).value;
}

// 2 ULP; -infinity at -1, NaN below.
ONEPASS_FUNCTION vec<float> log1p(vec<float> x) {
  using L = vec<float>;
  const L::tag d;
  const hn::RebindToSigned<L::tag> di;
  // 1 + x = 2^n (1 + f) with f in [-1/4, 1/2); f comes from x itself, so that nothing is lost where 1 + x rounds.
  const auto u = hn::BitCast(di, (L(1.0f) + x).raw);
  const auto exponent = hn::Set(di, static_cast<int32_t>(0xff800000u));
  const auto n = hn::And(hn::Sub(u, hn::Set(di, 0x3f400000)), exponent);  // n · 2^23
  const L scaled_x(hn::BitCast(d, hn::Sub(hn::BitCast(di, x.raw), n)));
  const L four_scale(hn::BitCast(d, hn::Sub(hn::Set(di, 0x40800000), n)));  // 4 · 2^-n: 2^-128 would be denormal
  const L f = scaled_x + fma(four_scale, L(0.25f), L(-1.0f));
  const L log1p_f = fma(f * f, detail::polynomial(f, coefficients::kLog1p_f32), f);
  constexpr float kLn2 = 0.69314718f / 8388608.0f;
  const L result = fma(L(hn::ConvertTo(d, n)), L(kLn2), log1p_f);
  const L infinity(__builtin_huge_valf());
  const L outside = where(x == L(-1.0f), -infinity, where(x < L(-1.0f), L(__builtin_nanf("")), x));
  return where((x > L(-1.0f)) & (x < infinity), result, outside);
}

namespace detail {

// exp(-t²/2) = scale · (1 + expm1) for 0 <= t <= 13.25.
ONEPASS_FUNCTION exponential<float> normal_exponential(vec<float> t) {
  using L = vec<float>;
  // -t²/2 in two parts: the error of one would be a relative error of the result.
#if HWY_NATIVE_FMA
  const L half_t = L(-0.5f) * t;
  const L high = half_t * t;
  const L low(hn::MulSub(half_t.raw, t.raw, high.raw));
#else
  const L::tag d;
  const hn::RebindToUnsigned<L::tag> du;
  const L head(hn::BitCast(d, hn::And(hn::BitCast(du, t.raw), hn::Set(du, 0xfffff000u))));
  const L high = L(-0.5f) * head * head;  // exact
  const L low = L(-0.5f) * (t + head) * (t - head);
#endif
  return nearest_exponential(high, exp_constants<float>::kBias, low);
}

// Φ(-t), with relative accuracy: the exponential times a quotient of polynomials.
ONEPASS_FUNCTION vec<float> normal_tail(vec<float> t, exponential<float> e) {
  using L = vec<float>;
  const L p = polynomial(t, c::kTailNumerator_f32), q = polynomial(t, c::kTailDenominator_f32);
  return fma(e.expm1, p, p) / q * e.scale;
}

}  // namespace detail

// The normal distribution function Φ(x). f32: 1.1e-7 absolute, and 8 ULP, so that the tail of gelu, x · Φ(x), is right
// as well. f64: 1.3e-16 absolute; below zero its relative error grows as x² · 1.1e-16.
ONEPASS_FUNCTION vec<float> normal_cdf(vec<float> x) {
  const vec<float> t = min(abs(x), vec<float>(13.25f));
  const vec<float> tail = detail::normal_tail(t, detail::normal_exponential(t));
  return where(x < vec<float>(0.0f), tail, vec<float>(1.0f) - tail);
}

// Φ(x) and its derivative, exp(-x²/2) / √(2π), of 2 ULP (f32), zero past 13.25: they share the exponential.
ONEPASS_FUNCTION normal_pair<vec<float>> normal(vec<float> x) {
  using L = vec<float>;
  const L most(13.25f), distance = abs(x), t = min(distance, most);
  const detail::exponential<float> e = detail::normal_exponential(t);
  const L tail = detail::normal_tail(t, e);
  const L density = fma(e.expm1, L(0.39894228f), L(0.39894228f)) * e.scale;
  return {where(x < L(0.0f), tail, L(1.0f) - tail), where(distance > most, L(0.0f), density)};
}

// 3 ULP.
ONEPASS_FUNCTION vec<float> erf(vec<float> x) {
  using L = vec<float>;
  const L a = abs(x), t = min(a * L(1.41421356f), L(13.25f));
  const L tail = detail::normal_tail(t, detail::normal_exponential(t));
  const L far = copy_sign(L(1.0f) - (tail + tail), x);
  const L near = fma(detail::polynomial(x * x, coefficients::kErf_f32), x, x);
  return where(a < L(0.6f), near, far);
}

// 0.5 ULP.
template <class T>
ONEPASS_FUNCTION vec<T> reciprocal(vec<T> x) {
  return vec<T>(T(1)) / x;
}

// 1.5 ULP.
template <class T>
ONEPASS_FUNCTION vec<T> rsqrt(vec<T> x) {
  return vec<T>(T(1)) / sqrt(x);
}

ONEPASS_FUNCTION vec<double> log1p(vec<double> x) {
  return each_lane(x, [](double a) ONEPASS_LAMBDA { return ::log1p(a); });
}
ONEPASS_FUNCTION vec<double> normal_cdf(vec<double> x) {
  return each_lane(x, [](double a) ONEPASS_LAMBDA { return 0.5 * ::erfc(-0.70710678118654752 * a); });
}
ONEPASS_FUNCTION normal_pair<vec<double>> normal(vec<double> x) {
  using L = vec<double>;
  return {normal_cdf(x), L(0.39894228040143268) * exp(L(-0.5) * x * x)};
}
// x · Φ(x), with the accuracy of Φ.
template <class T>
ONEPASS_FUNCTION vec<T> normal_part(vec<T> x) {
  return x * normal_cdf(x);
}
ONEPASS_FUNCTION vec<double> erf(vec<double> x) {
  return each_lane(x, [](double a) ONEPASS_LAMBDA { return ::erf(a); });
}

// --- of short lanes: 2^-16 of the result, and 2^-12 where gelu is all that is asked for (kTailExponent_f32: past x =
// -4 up to 32 times that).
namespace detail {

// 2^x for -127 <= x <= 128: zero and infinity at the ends.
ONEPASS_FUNCTION vec<float> short_exp2(vec<float> x) {
  using L = vec<float>;
  constexpr float kRound = exp_constants<float>::kRound + exp_constants<float>::kBias;
  const L t = x + L(kRound);
  return polynomial(x - (t - L(kRound)), c::kShortExp2_f32) * power_of_two(t);
}

// Φ(-t) = e s p(s), e = exp(-t²/2), for 0 <= t <= 13.25.
struct short_tail {
  vec<float> e, s;
};
ONEPASS_FUNCTION short_tail short_tail_of(vec<float> t) {
  using L = vec<float>;
  return {short_exp2(t * t * L(-0.72134752f)), L(1.0f) / fma(t, L(c::kShortTailSlope_f32), L(1.0f))};
}

}  // namespace detail

ONEPASS_FUNCTION short_lane exp(short_lane x) {
  using L = vec<float>;
  return detail::short_exp2(min(max(x * L(1.44269504f), L(-127.0f)), L(128.0f)));
}
// exp(x - shift)
template <class L>
ONEPASS_FUNCTION L exp_minus(L x, typename L::scalar shift) {
  return exp(L(x - L(shift)));
}
ONEPASS_FUNCTION short_lane sigmoid(short_lane x) {
  using L = vec<float>;
  return L(1.0f) / (L(1.0f) + exp(short_lane(-x)));
}
// The rest errs by 2^-24 of 1: of what is added to the value.
ONEPASS_FUNCTION logistic_pair<short_lane> logistic(short_lane x) {
  const short_lane value = sigmoid(x);
  return {value, vec<float>(1.0f) - value};
}
ONEPASS_FUNCTION short_lane normal_part(short_lane x) {
  using L = vec<float>;
  const L t = min(abs(x), L(13.0f));
  return max(x, L(0.0f)) - t * detail::short_exp2(detail::polynomial(t, coefficients::kTailExponent_f32));
}
ONEPASS_FUNCTION normal_pair<short_lane> normal(short_lane x) {
  using L = vec<float>;
  const L most(13.25f), distance = abs(x), t = min(distance, most);
  const detail::short_tail of = detail::short_tail_of(t);
  const L tail = detail::polynomial(of.s, coefficients::kShortTail_f32) * (of.s * of.e);
  return {where(x < L(0.0f), tail, L(1.0f) - tail), where(distance > most, L(0.0f), L(0.39894228f) * of.e)};
}
// The derivative of x Φ(x).
template <class L>
ONEPASS_FUNCTION L normal_slope(L x) {
  const normal_pair<L> n = normal(x);
  return fma(x, n.density, n.cdf);
}

ONEPASS_END
#endif
