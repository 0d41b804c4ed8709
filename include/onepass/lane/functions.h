// More functions of a lane, which users' words may call. Largest errors as in math.h; on CUDA they are the chip's (CUDA
// C++ programming guide, mathematical functions: at most 2 ULP, pow 4 in float).
#if defined(ONEPASS_LANE_FUNCTIONS_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_LANE_FUNCTIONS_H_
#undef ONEPASS_LANE_FUNCTIONS_H_
#else
#define ONEPASS_LANE_FUNCTIONS_H_
#endif

#include "onepass/lane/target.h"

#if defined(__CUDACC__)
#include "onepass/lane/cuda.h"

ONEPASS_BEGIN

// What takes many instructions is called: of a row's many elements, each would have its own.
template <class T>
__device__ __noinline__ T far_sine_number(T x, int quarter) {
  return quarter == 0 ? ::sin(x) : ::cos(x);
}
template <class T>
__device__ __noinline__ T any_power_number(T x, T exponent) {
  return ::pow(x, exponent);
}
template <class T>
ONEPASS_FUNCTION T power_number(T x, T exponent) {
  if (exponent == T(1)) return x;
  if (exponent == T(2)) return x * x;
  if (exponent == T(3)) return x * x * x;
  if (exponent == T(0.5)) return ::sqrt(x);
  if (exponent == T(-0.5)) return ::rsqrt(x);
  return any_power_number(x, exponent);
}
// sin(x), or a quarter of a turn farther: cos(x). x = n π/2 + rest, with π/2 in three parts (Cody and Waite), of which
// the first difference is exact; 2 ULP.
ONEPASS_FUNCTION float sine_number(float x, int quarter) {
  if (!(fabsf(x) <= 105615.0f)) return far_sine_number(x, quarter);
  const float n = rintf(x * 0.636619772f);
  const float rest = fmaf(n, 1.71512451e-15f, fmaf(n, 4.37113883e-8f, fmaf(n, -1.57079637f, x)));
  const float square = rest * rest;
  float sine = fmaf(fmaf(-1.958738707e-4f, square, 8.332745936e-3f), square, -0.1666666465f);
  sine = fmaf(sine * square, rest, rest);
  float cosine = fmaf(fmaf(2.454743721e-5f, square, -1.38883007e-3f), square, 0.04166666465f);
  cosine = fmaf(cosine, square * square, fmaf(-0.5f, square, 1.0f));
  const int turns = static_cast<int>(n) + quarter;
  const float found = (turns & 1) != 0 ? cosine : sine;
  return (turns & 2) != 0 ? -found : found;
}
ONEPASS_FUNCTION double sine_number(double x, int quarter) { return far_sine_number(x, quarter); }

#define ONEPASS_UNARY(name, expression)                                       \
  template <class T, int V>                                                   \
  ONEPASS_FUNCTION pack<T, V> name(pack<T, V> a) {                            \
    pack<T, V> result;                                                        \
    _Pragma("unroll") for (int i = 0; i < V; ++i) result.v[i] = (expression); \
    return result;                                                            \
  }
ONEPASS_UNARY(sin, sine_number(a.v[i], 0))
ONEPASS_UNARY(cos, sine_number(a.v[i], 1))
ONEPASS_UNARY(log, ::log(a.v[i]))
ONEPASS_UNARY(full_exp, exp_number(a.v[i]))
ONEPASS_UNARY(sqrt, ::sqrt(a.v[i]))
ONEPASS_UNARY(floor, ::floor(a.v[i]))
#undef ONEPASS_UNARY

template <class T, int V>
ONEPASS_FUNCTION pack<T, V> pow(pack<T, V> a, pack<T, V> b) {
  pack<T, V> result;
#pragma unroll
  for (int i = 0; i < V; ++i) result.v[i] = power_number(a.v[i], b.v[i]);
  return result;
}
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> copy_sign(pack<T, V> magnitude, pack<T, V> sign) {
  pack<T, V> result;
#pragma unroll
  for (int i = 0; i < V; ++i) result.v[i] = ::copysign(magnitude.v[i], sign.v[i]);
  return result;
}

ONEPASS_END

#else
#include <hwy/contrib/math/math-inl.h>

#include "onepass/lane/convert.h"
#include "onepass/lane/math.h"

ONEPASS_BEGIN

namespace detail {

// Highway's sine and cosine are made for arguments up to 39000; libm, element by element, takes the others.
template <class T>
ONEPASS_FUNCTION bool are_small(vec<T> x) {
  return hn::AllTrue(typename vec<T>::tag(), (abs(x) <= vec<T>(T(39000))).raw);
}

}  // namespace detail

// 3 ULP.
template <class T>
ONEPASS_FUNCTION vec<T> sin(vec<T> x) {
  if (!detail::are_small(x)) return each_lane(x, [](T a) ONEPASS_LAMBDA { return ::sin(a); });
  return vec<T>(hn::Sin(typename vec<T>::tag(), x.raw));
}
// 3 ULP.
template <class T>
ONEPASS_FUNCTION vec<T> cos(vec<T> x) {
  if (!detail::are_small(x)) return each_lane(x, [](T a) ONEPASS_LAMBDA { return ::cos(a); });
  return vec<T>(hn::Cos(typename vec<T>::tag(), x.raw));
}
// exp, also of short lanes, whose own is infinite from 2^127.5 on.
template <class T>
ONEPASS_FUNCTION vec<T> full_exp(vec<T> x) {
  return exp(x);
}
// 1 ULP; -infinity at 0, NaN below.
template <class T>
ONEPASS_FUNCTION vec<T> log(vec<T> x) {
  using L = vec<T>;
  const L zero(T(0)), infinity(static_cast<T>(kInfinity));
  const L inside(hn::Log(typename L::tag(), x.raw));
  const L outside = where(x == zero, -infinity, where(x < zero, L(static_cast<T>(__builtin_nan(""))), x));
  return where((x > zero) & (x < infinity), inside, outside);
}
// On CUDA they are faster than `exp` and `log` (lane/cuda.h).
template <class T>
ONEPASS_FUNCTION vec<T> exp_term(vec<T> x, T shift) {
  return exp(vec<T>(x - vec<T>(shift)));
}
template <class T>
ONEPASS_FUNCTION vec<T> log_term(vec<T> x) {
  return log(x);
}
template <class T>
ONEPASS_FUNCTION vec<T> log1p_term(vec<T> x) {
  return log1p(x);
}
// Exact.
template <class T>
ONEPASS_FUNCTION vec<T> floor(vec<T> x) {
  return vec<T>(hn::Floor(x.raw));
}

namespace detail {

// libm's, element by element.
ONEPASS_FUNCTION vec<double> any_power(vec<double> x, vec<double> exponent) {
  HWY_ALIGN double number[vec<double>::kLanes];
  store_lane(exponent, number);
  const double* next = number;
  return each_lane(x, [&next](double a) ONEPASS_LAMBDA { return ::pow(a, *next++); });
}
// exp(p log|x|), in double so that nothing of it is lost in float.
ONEPASS_FUNCTION vec<double> power_of_magnitude(vec<double> x, vec<double> exponent) {
  return exp(vec<double>(exponent * log(abs(x))));
}
ONEPASS_FUNCTION vec<float> any_power(vec<float> x, vec<float> exponent) {
  using L = vec<float>;
  using W = vec<double>;
  const W::tag wide;
#if HWY_TARGET == HWY_SCALAR
  L y(storage::narrow(wide,
                      power_of_magnitude(W(hn::PromoteTo(wide, x.raw)), W(hn::PromoteTo(wide, exponent.raw))).raw));
#else
  const L::tag d;
  const hn::Half<L::tag> half;
  const auto lower = [&](L of) ONEPASS_LAMBDA { return W(hn::PromoteTo(wide, hn::LowerHalf(half, of.raw))); };
  const auto upper = [&](L of) ONEPASS_LAMBDA { return W(hn::PromoteTo(wide, hn::UpperHalf(half, of.raw))); };
  const W low = power_of_magnitude(lower(x), lower(exponent)), high = power_of_magnitude(upper(x), upper(exponent));
  L y(hn::Combine(d, storage::narrow(wide, high.raw), storage::narrow(wide, low.raw)));
#endif
  const L zero(0.0f), one(1.0f), half_exponent = L(0.5f) * exponent;
  const auto is_whole = floor(exponent) == exponent, is_odd = is_whole & (floor(half_exponent) != half_exponent);
  y = where((exponent == zero) | (abs(x) == one), one, y);
  y = where(is_odd, copy_sign(y, x), y);
  return where((x < zero) & (x > L(-__builtin_huge_valf())) & !is_whole, L(__builtin_nanf("")), y);
}

template <class T>
ONEPASS_FUNCTION bool are_all(vec<T> x, T number) {
  return hn::AllTrue(typename vec<T>::tag(), (x == vec<T>(number)).raw);
}

}  // namespace detail

// 1 ULP; 2 for the exponents 3 and -1/2. For 1/2 and -1/2 the roots, as torch.pow: NaN at -infinity, signed at -0.
template <class T>
ONEPASS_FUNCTION vec<T> pow(vec<T> x, vec<T> exponent) {
  if (detail::are_all(exponent, T(1))) return x;
  if (detail::are_all(exponent, T(2))) return x * x;
  if (detail::are_all(exponent, T(3))) return x * x * x;
  if (detail::are_all(exponent, T(0.5))) return sqrt(x);
  if (detail::are_all(exponent, T(-0.5))) return rsqrt(x);
  return detail::any_power(x, exponent);
}

ONEPASS_END
#endif
#endif
