// A vector of consecutive columns on CUDA: V elements in one thread's registers. device/memory.cuda.h moves them.
#pragma once

#include "onepass/lane/coefficients.h"
#include "onepass/lane/pairs.h"
#include "onepass/lane/random.h"
#include "onepass/lane/target.h"
#include "onepass/lane/types.h"

// Significant bits of the results, at most. Where they are 11, functions may err by 2^-16 of the result; where they are
// 8, gelu by 2^-12 (past -4 by more, kTailExponent_f32), but not its slope.
#ifndef ONEPASS_RESULT_BITS
#define ONEPASS_RESULT_BITS 53
#endif

ONEPASS_BEGIN

template <int V>
struct pack_mask {
  bool m[V];
};

template <class T, int V>
struct pack {
  using scalar = T;
  static constexpr int kLanes = V;
  T v[V];

  pack() = default;
  explicit __device__ __forceinline__ pack(T all) {
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = all;
  }
};

template <class L>
constexpr __device__ int lanes() {
  return L::kLanes;
}

// Applies an expression in i to every element.
#define ONEPASS_EACH(type, expression)                      \
  type result;                                              \
  _Pragma("unroll") for (int i = 0; i < V; ++i) expression; \
  return result;

#define ONEPASS_BINARY(symbol)                                              \
  template <class T, int V>                                                 \
  ONEPASS_FUNCTION pack<T, V> operator symbol(pack<T, V> a, pack<T, V> b) { \
    using P = pack<T, V>;                                                   \
    ONEPASS_EACH(P, result.v[i] = a.v[i] symbol b.v[i])                     \
  }
ONEPASS_BINARY(+)
ONEPASS_BINARY(-)
ONEPASS_BINARY(*)
#undef ONEPASS_BINARY

#define ONEPASS_COMPARE(symbol)                                               \
  template <class T, int V>                                                   \
  ONEPASS_FUNCTION pack_mask<V> operator symbol(pack<T, V> a, pack<T, V> b) { \
    ONEPASS_EACH(pack_mask<V>, result.m[i] = a.v[i] symbol b.v[i])            \
  }
ONEPASS_COMPARE(<)
ONEPASS_COMPARE(<=)
ONEPASS_COMPARE(>)
ONEPASS_COMPARE(>=)
ONEPASS_COMPARE(==)
ONEPASS_COMPARE(!=)
#undef ONEPASS_COMPARE

// --- functions. For results of 32 and 64 bits CUDA's own, without fast maths: at most 2 ULP each (CUDA C++ programming
// guide, mathematical functions), and the chip's reciprocal (1 ULP); tanh in float is ours (3 ULP).

inline constexpr bool kShort = ONEPASS_RESULT_BITS <= kShortBits, kShorter = ONEPASS_RESULT_BITS <= 8;

// A NaN stays.
ONEPASS_FUNCTION float min_number(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}
ONEPASS_FUNCTION float max_number(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}
ONEPASS_FUNCTION double min_number(double a, double b) { return b < a ? b : a; }
ONEPASS_FUNCTION double max_number(double a, double b) { return b > a ? b : a; }
ONEPASS_FUNCTION float exp2_number(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
ONEPASS_FUNCTION float reciprocal_number(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
ONEPASS_FUNCTION float log2_number(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
ONEPASS_FUNCTION double reciprocal_number(double x) { return 1.0 / x; }
// For results of 16 bits 2 ULP, which takes half the instructions of a division that is rounded.
ONEPASS_FUNCTION float quotient_number(float a, float b) {
  if constexpr (!kShort) return a / b;
  float y;
  asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
ONEPASS_FUNCTION double quotient_number(double a, double b) { return a / b; }
// The chip's logarithm and exponential err by 2^-22 of 1: near 0, where that is much of the result, a series.
ONEPASS_FUNCTION float log1p_number(float x) {
  if constexpr (!kShort) return ::log1pf(x);
  const float near = x * fmaf(fmaf(x, 0.33333333f, -0.5f), x, 1.0f);
  const float far = log2_number(1.0f + x) * 0.69314718f;
  return fabsf(x) < 0.03125f ? near : far;
}
ONEPASS_FUNCTION double log1p_number(double x) { return ::log1p(x); }
ONEPASS_FUNCTION float expm1_number(float x) {
  if constexpr (!kShort) return ::expm1f(x);
  const float near = x * fmaf(fmaf(x, 0.16666667f, 0.5f), x, 1.0f);
  const float far = exp2_number(x * 1.44269504f) - 1.0f;
  return fabsf(x) < 0.0625f ? near : far;
}
ONEPASS_FUNCTION double expm1_number(double x) { return ::expm1(x); }
ONEPASS_FUNCTION float exp_number(float x) { return kShort ? exp2_number(x * 1.44269504f) : expf(x); }
ONEPASS_FUNCTION double exp_number(double x) { return ::exp(x); }
// exp(x - shift), for results of 16 bits as exp2 of one fma. The shift's product is rounded; it is the same wherever
// the shift is. Shifts past 2^100 must not overflow: there, of all numbers up to the shift, only itself is not made 0.
struct exponent {
  float factor, offset;
};
ONEPASS_FUNCTION exponent exponent_of(float shift) {
  const float factor = fabsf(shift) < 0x1p100f ? 1.44269504f : 0x1p-20f;
  return {factor, -__fmul_rn(shift, factor)};
}
ONEPASS_FUNCTION float exp_minus_number(float x, float shift) {  // of one shift and another: both rounded
  if constexpr (!kShort) return expf(x - shift);
  const exponent e = exponent_of(shift);
  return exp2_number(__fadd_rn(__fmul_rn(x, e.factor), e.offset));
}
ONEPASS_FUNCTION double exp_minus_number(double x, double shift) { return ::exp(x - shift); }
ONEPASS_FUNCTION float log_number(float x) { return logf(x); }
ONEPASS_FUNCTION double log_number(double x) { return ::log(x); }
ONEPASS_FUNCTION float sigmoid_number(float x) { return reciprocal_number(1.0f + exp_number(-x)); }
ONEPASS_FUNCTION double sigmoid_number(double x) { return 1.0 / (1.0 + ::exp(-x)); }
// For results of 16 bits the rest errs by 2^-24 of 1: of what is added to the value.
template <class T>
ONEPASS_FUNCTION logistic_pair<T> logistic_number(T x) {
  if constexpr (kShort && sizeof(T) == 4) {
    const T value = sigmoid_number(x);
    return {value, T(1) - value};
  } else {
    const T e = exp_number(-::fabs(x)), r = reciprocal_number(T(1) + e), far = e * r;
    return {x < T(0) ? far : r, x < T(0) ? r : far};
  }
}
// 1 - tanh|x| = 2 / (1 + exp(2|x|)), of which both tanh and its slope are made: one exponential and one reciprocal
// where both are wanted.
ONEPASS_FUNCTION float tanh_rest_number(float x) {
  return reciprocal_number(fmaf(exp2_number(2.88539008f * fabsf(x)), 0.5f, 0.5f));
}
ONEPASS_FUNCTION double tanh_rest_number(double x) { return 2.0 / (1.0 + ::exp(2.0 * ::fabs(x))); }
ONEPASS_FUNCTION float tanh_number(float x) {
  const float square = x * x, far = copysignf(1.0f - tanh_rest_number(x), x);
  if constexpr (kShort) return fabsf(x) < 0.03125f ? x * fmaf(square, -0.33333332f, 1.0f) : far;
  float p = fmaf(fmaf(square, -6.542541985e-3f, 0.02127274826f), square, -0.05390334769f);
  p = fmaf(fmaf(p, square, 0.1333308225f), square, -0.33333332f);
  return fabsf(x) < 0.55f ? fmaf(p * square, x, x) : far;
}
ONEPASS_FUNCTION double tanh_number(double x) { return ::tanh(x); }

// Φ(-t) = ratio · exponential, and exponential = exp(-t²/2). As on the CPU (lane/math.h), with the chip's exp2 and
// reciprocal. For results of more than 16 bits t goes no farther than kFarthest, where all is zero. A NaN stays.
inline constexpr float kFarthest = kShorter ? 13.0f : 13.25f;
struct normal_tail {
  float ratio, exponential;
};
ONEPASS_FUNCTION normal_tail normal_tail_of(float t) {
  if constexpr (kShort) {
    const float s = reciprocal_number(fmaf(coefficients::kShortTailSlope_f32, t, 1.0f));
    const float e = exp2_number(t * t * -0.72134752f);
    constexpr const auto& p = coefficients::kShortTail_f32;
    return {fmaf(fmaf(fmaf(fmaf(fmaf(p[5], s, p[4]), s, p[3]), s, p[2]), s, p[1]), s, p[0]) * s, e};
  } else {
    constexpr const auto& p = coefficients::kTailNumerator_f32;
    constexpr const auto& q = coefficients::kTailDenominator_f32;
    const float half = -0.5f * t, high = __fmul_rn(half, t), low = fmaf(half, t, -high);
    const float power = __fmul_rn(high, 1.44269504f);  // in two parts: its error is a relative error of the result
    const float rest = fmaf(high, 1.44269504f, -power) + fmaf(high, 1.92596303e-8f, low * 1.44269504f);
    float e = exp2_number(power);
    e = fmaf(e, rest * 0.69314718f, e);
    const float above = fmaf(fmaf(fmaf(fmaf(p[4], t, p[3]), t, p[2]), t, p[1]), t, p[0]);
    const float below = fmaf(fmaf(fmaf(fmaf(fmaf(q[5], t, q[4]), t, q[3]), t, q[2]), t, q[1]), t, q[0]);
    return {above * reciprocal_number(below), e};
  }
}

ONEPASS_FUNCTION normal_pair<float> normal_number(float x) {
  const normal_tail of = normal_tail_of(kShort ? fabsf(x) : min_number(fabsf(x), kFarthest));
  const float tail = of.ratio * of.exponential;
  return {x < 0.0f ? tail : 1.0f - tail, 0.39894228f * of.exponential};
}
ONEPASS_FUNCTION normal_pair<double> normal_number(double x) {
  return {normcdf(x), 0.39894228040143268 * ::exp(-0.5 * x * x)};
}
ONEPASS_FUNCTION float normal_cdf_number(float x) { return normal_number(x).cdf; }
ONEPASS_FUNCTION double normal_cdf_number(double x) { return normcdf(x); }
// x · Φ(x)
ONEPASS_FUNCTION float normal_part_number(float x) {
  const float t = min_number(fabsf(x), kFarthest);
  float tail;
  if constexpr (kShorter) {
    constexpr const auto& p = coefficients::kTailExponent_f32;
    float exponent = p[7];
#pragma unroll
    for (int i = 6; i >= 0; --i) exponent = fmaf(exponent, t, p[i]);
    tail = exp2_number(exponent);
  } else {
    const normal_tail of = normal_tail_of(t);
    tail = of.ratio * of.exponential;
  }
  return fmaf(-t, tail, max_number(x, 0.0f));
}
ONEPASS_FUNCTION double normal_part_number(double x) { return x * normcdf(x); }
// Its derivative.
ONEPASS_FUNCTION float normal_slope_number(float x) {
  const float t = kShort ? fabsf(x) : min_number(fabsf(x), kFarthest);
  const normal_tail of = normal_tail_of(t);
  const float slope = fmaf(-0.39894228f, t, of.ratio) * of.exponential;  // at -t
  return x < 0.0f ? slope : 1.0f - slope;
}
ONEPASS_FUNCTION double normal_slope_number(double x) {
  const normal_pair<double> normal = normal_number(x);
  return ::fma(x, normal.density, normal.cdf);
}

#define ONEPASS_UNARY(name, expression)            \
  template <class T, int V>                        \
  ONEPASS_FUNCTION pack<T, V> name(pack<T, V> a) { \
    using P = pack<T, V>;                          \
    ONEPASS_EACH(P, result.v[i] = expression)      \
  }
ONEPASS_UNARY(exp, exp_number(a.v[i]))
ONEPASS_UNARY(sigmoid, sigmoid_number(a.v[i]))
ONEPASS_UNARY(tanh, tanh_number(a.v[i]))
ONEPASS_UNARY(reciprocal, reciprocal_number(a.v[i]))
ONEPASS_UNARY(normal_cdf, normal_cdf_number(a.v[i]))
ONEPASS_UNARY(normal_part, normal_part_number(a.v[i]))
ONEPASS_UNARY(normal_slope, normal_slope_number(a.v[i]))
ONEPASS_UNARY(expm1, expm1_number(a.v[i]))
ONEPASS_UNARY(log1p, log1p_number(a.v[i]))
ONEPASS_UNARY(erf, ::erf(a.v[i]))
ONEPASS_UNARY(rsqrt, ::rsqrt(a.v[i]))
ONEPASS_UNARY(abs, ::fabs(a.v[i]))
#undef ONEPASS_UNARY

template <class T, int V>
ONEPASS_FUNCTION pack<T, V> operator/(pack<T, V> a, pack<T, V> b) {
  using P = pack<T, V>;
  ONEPASS_EACH(P, result.v[i] = quotient_number(a.v[i], b.v[i]))
}

// A pair for every element.
#define ONEPASS_PAIR(type, name, expression)             \
  template <class T, int V>                              \
  ONEPASS_FUNCTION type<pack<T, V>> name(pack<T, V> a) { \
    type<pack<T, V>> result;                             \
    auto& [first, second] = result;                      \
    _Pragma("unroll") for (int i = 0; i < V; ++i) {      \
      const type<T> one = expression;                    \
      const auto& [its_first, its_second] = one;         \
      first.v[i] = its_first, second.v[i] = its_second;  \
    }                                                    \
    return result;                                       \
  }
ONEPASS_PAIR(tanh_pair, tanh_and_rest, (tanh_pair<T>{tanh_number(a.v[i]), tanh_rest_number(a.v[i])}))
ONEPASS_PAIR(logistic_pair, logistic, logistic_number(a.v[i]))
ONEPASS_PAIR(normal_pair, normal, normal_number(a.v[i]))
#undef ONEPASS_PAIR

template <class T, int V>
ONEPASS_FUNCTION pack<T, V> operator-(pack<T, V> a) {
  using P = pack<T, V>;
  ONEPASS_EACH(P, result.v[i] = -a.v[i])
}
ONEPASS_FUNCTION float fma_number(float a, float b, float c) { return fmaf(a, b, c); }
ONEPASS_FUNCTION double fma_number(double a, double b, double c) { return ::fma(a, b, c); }
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> fma(pack<T, V> a, pack<T, V> b, pack<T, V> c) {
  using P = pack<T, V>;
  ONEPASS_EACH(P, result.v[i] = fma_number(a.v[i], b.v[i], c.v[i]))
}
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> min(pack<T, V> a, pack<T, V> b) {
  using P = pack<T, V>;
  ONEPASS_EACH(P, result.v[i] = min_number(a.v[i], b.v[i]))
}
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> max(pack<T, V> a, pack<T, V> b) {
  using P = pack<T, V>;
  ONEPASS_EACH(P, result.v[i] = max_number(a.v[i], b.v[i]))
}
// Of what a boolean tensor holds (see from_storage): of floats the bits say it in fewer instructions.
template <class T, int V>
ONEPASS_FUNCTION pack_mask<V> is_set(pack<T, V> a) {
  pack_mask<V> result;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if constexpr (sizeof(T) == 4) result.m[i] = __float_as_uint(a.v[i]) != 0;
    else result.m[i] = a.v[i] != T(0);
  }
  return result;
}
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> where(pack_mask<V> m, pack<T, V> yes, pack<T, V> no) {
  using P = pack<T, V>;
  ONEPASS_EACH(P, result.v[i] = m.m[i] ? yes.v[i] : no.v[i])
}
// (a - centre) factor + offset. Results of 16 bits come from numbers that have no more: a centre that is large beside
// what is left has lost it before, and the offset is nothing.
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> centred_product(pack<T, V> a, pack<T, V> centre, pack<T, V> factor, pack<T, V> offset) {
  if constexpr (kShort) return fma(a, factor, -(centre * factor));
  else return fma(a - centre, factor, offset);
}
template <int V>
ONEPASS_FUNCTION pack<float, V> exp2_of(pack<float, V> a, exponent e) {
  using P = pack<float, V>;
  ONEPASS_EACH(P, result.v[i] = exp2_number(fmaf(a.v[i], e.factor, e.offset)))
}
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> exp_minus(pack<T, V> a, T shift) {
  using P = pack<T, V>;
  if constexpr (kShort && sizeof(T) == 4) {
    return exp2_of(a, exponent_of(shift));
  } else {
    return exp(a - P(shift));
  }
}
// A term of Σ exp(a - shift), of a up to the shift: the relative error of exp2 of a product grows with the exponent, as
// the term's share of the sum falls.
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> exp_term(pack<T, V> a, T shift) {
  using P = pack<T, V>;
  if constexpr (!kShort && sizeof(T) == 4) {
    ONEPASS_EACH(P, result.v[i] = exp2_number((a.v[i] - shift) * 1.44269504f))
  } else {
    return exp_minus(a, shift);
  }
}
// log(1 + a) of a from -0.5 to 0: 2 artanh(a / (2 + a)), as a series.
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> log1p_term(pack<T, V> a) {
  using P = pack<T, V>;
  if constexpr (sizeof(T) == 4) {
    const auto of = [](float x) {
      const float s = x * reciprocal_number(2.0f + x), q = s * s;
      float sum = fmaf(q, 0.18181818f, 0.22222222f);
      sum = fmaf(q, sum, 0.28571429f), sum = fmaf(q, sum, 0.4f), sum = fmaf(q, sum, 0.66666667f);
      return fmaf(s * q, sum, s + s);
    };
    ONEPASS_EACH(P, result.v[i] = of(a.v[i]))
  } else {
    return log1p(a);
  }
}
// log(a) where what counts is the absolute error, 2^-22 near 1.
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> log_term(pack<T, V> a) {
  using P = pack<T, V>;
  if constexpr (sizeof(T) == 4) {
    ONEPASS_EACH(P, result.v[i] = log2_number(a.v[i]) * 0.69314718f)
  } else {
    ONEPASS_EACH(P, result.v[i] = ::log(a.v[i]))
  }
}
ONEPASS_FUNCTION float reciprocal_root(float x) { return rsqrtf(x); }
ONEPASS_FUNCTION double reciprocal_root(double x) { return ::rsqrt(x); }

template <class L>
ONEPASS_FUNCTION pack_mask<L::kLanes> first_n(int count) {
  constexpr int V = L::kLanes;
  ONEPASS_EACH(pack_mask<V>, result.m[i] = i < count)
}
template <class L>
ONEPASS_FUNCTION L iota(typename L::scalar first) {
  constexpr int V = L::kLanes;
  ONEPASS_EACH(L, result.v[i] = first + static_cast<typename L::scalar>(i))
}
// first[0], second[0], first[1], second[1], ...
template <class T, int V>
ONEPASS_FUNCTION pack<T, 2 * V> zip(pack<T, V> first, pack<T, V> second) {
  pack<T, 2 * V> result;
#pragma unroll
  for (int i = 0; i < V; ++i) result.v[2 * i] = first.v[i], result.v[2 * i + 1] = second.v[i];
  return result;
}
// Each pair of elements (a, b) as a point, turned by a quarter: (-b, a).
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> quarter_turn(pack<T, V> a) {
  pack<T, V> result;
#pragma unroll
  for (int i = 0; i < V; i += 2) result.v[i] = -a.v[i + 1], result.v[i + 1] = a.v[i];
  return result;
}
template <class T, int V>
ONEPASS_FUNCTION T sum_lanes(pack<T, V> a) {
  T total = a.v[0];
#pragma unroll
  for (int i = 1; i < V; ++i) total += a.v[i];
  return total;
}
template <class T, int V>
ONEPASS_FUNCTION T max_lanes(pack<T, V> a) {
  T best = a.v[0];
#pragma unroll
  for (int i = 1; i < V; ++i) best = max_number(best, a.v[i]);
  return best;
}

// What random numbers depend on besides their place.
struct random_state {
  uint64 seed, offset;
};
ONEPASS_FUNCTION random_state load_random_state(const int64* state) {
  const auto* words = reinterpret_cast<const long long*>(state);
  return {static_cast<uint64>(__ldg(words)), static_cast<uint64>(__ldg(words + 1))};
}

// The four words of the group of eight elements that a column is in (see lane/random.h).
ONEPASS_FUNCTION philox_words random_words(random_state state, int ordinal, int64 row, int64 column, int64 columns) {
  const uint64 group = static_cast<uint64>(row * ((columns + 7) / 8) + column / 8);
  return random_group(state.seed, state.offset, static_cast<uint32>(ordinal), group);
}

// Where the 16 random bits of V columns from `column` on (a multiple of V; V divides 8), which `words` has, are at
// least the threshold, from 0 to 65536: words are compared whole, with the bits in question on top. At a threshold of
// 65536 one number in 2^33 passes; dropout multiplies it by 0.
template <int V>
ONEPASS_FUNCTION pack_mask<V> random_at_least(const philox_words& words, int64 column, int threshold) {
  const int first = static_cast<int>(column % 8);
  const uint32 least = threshold < 65536 ? static_cast<uint32>(threshold) << 16 : ~0u;
  pack_mask<V> result;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32 word = words.word[i / 2];
    if (V == 8 || (i >= first && i < first + V)) result.m[i % V] = (i % 2 == 0 ? word << 16 : word) >= least;
  }
  return result;
}

#undef ONEPASS_EACH
ONEPASS_END
