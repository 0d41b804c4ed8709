// A vector of consecutive columns on CUDA: V numbers in one thread's registers. Storage types are known when the
// kernel is compiled. No CUDA header is needed: conversions are single PTX instructions.
#pragma once

#include "onepass/lane/coefficients.h"
#include "onepass/lane/random.h"
#include "onepass/lane/target.h"
#include "onepass/lane/types.h"

// Significant bits of the results, at most. Where they are 11, functions may err by 2^-16 of the result; where they are
// 8, gelu by 2^-12.
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

// Applies an expression in i to every number.
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
ONEPASS_BINARY(/)
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
// guide, mathematical functions), and the chip's reciprocal (1 ULP).

inline constexpr bool kShort = ONEPASS_RESULT_BITS <= 11, kShorter = ONEPASS_RESULT_BITS <= 8;

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
ONEPASS_FUNCTION double reciprocal_number(double x) { return 1.0 / x; }
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
ONEPASS_FUNCTION float sigmoid_number(float x) { return reciprocal_number(1.0f + exp_number(-x)); }
ONEPASS_FUNCTION double sigmoid_number(double x) { return 1.0 / (1.0 + ::exp(-x)); }
ONEPASS_FUNCTION float tanh_number(float x) {
  if constexpr (!kShort) return tanhf(x);
  const float square = x * x;
  const float near = fmaf(fmaf(fmaf(square, -0.05396825f, 0.13333333f), square, -0.33333333f), square, 1.0f) * x;
  const float far = fmaf(-2.0f, reciprocal_number(1.0f + exp_number(x + x)), 1.0f);
  return fabsf(x) < 0.25f ? near : far;
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
    if constexpr (kShorter) {
      constexpr const auto& p = coefficients::kShorterTail_f32;
      return {fmaf(fmaf(fmaf(p[3], s, p[2]), s, p[1]), s, p[0]) * s, e};
    } else {
      constexpr const auto& p = coefficients::kShortTail_f32;
      return {fmaf(fmaf(fmaf(fmaf(fmaf(p[5], s, p[4]), s, p[3]), s, p[2]), s, p[1]), s, p[0]) * s, e};
    }
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

template <class L>
struct normal_pair {
  L cdf, density;
};
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
ONEPASS_UNARY(expm1, ::expm1(a.v[i]))
ONEPASS_UNARY(log1p, ::log1p(a.v[i]))
ONEPASS_UNARY(erf, ::erf(a.v[i]))
ONEPASS_UNARY(rsqrt, ::rsqrt(a.v[i]))
ONEPASS_UNARY(abs, ::fabs(a.v[i]))
#undef ONEPASS_UNARY

template <class T, int V>
ONEPASS_FUNCTION normal_pair<pack<T, V>> normal(pack<T, V> a) {
  normal_pair<pack<T, V>> result;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const normal_pair<T> one = normal_number(a.v[i]);
    result.cdf.v[i] = one.cdf;
    result.density.v[i] = one.density;
  }
  return result;
}

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
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> where(pack_mask<V> m, pack<T, V> yes, pack<T, V> no) {
  using P = pack<T, V>;
  ONEPASS_EACH(P, result.v[i] = m.m[i] ? yes.v[i] : no.v[i])
}
// (a - centre) factor. Results of 16 bits come from numbers that have no more: a centre that is large beside what is
// left has lost it before.
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> centred_product(pack<T, V> a, pack<T, V> centre, pack<T, V> factor) {
  if constexpr (kShort) return fma(a, factor, -(centre * factor));
  else return (a - centre) * factor;
}
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> exp_minus(pack<T, V> a, T shift) {
  using P = pack<T, V>;
  if constexpr (kShort && sizeof(T) == 4) {
    const exponent e = exponent_of(shift);
    ONEPASS_EACH(P, result.v[i] = exp2_number(fmaf(a.v[i], e.factor, e.offset)))
  } else {
    return exp(a - P(shift));
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

// --- storage

template <dtype D>
struct stored;
template <>
struct stored<dtype::f32> {
  using type = float;
};
template <>
struct stored<dtype::f64> {
  using type = double;
};
template <>
struct stored<dtype::bf16> {
  using type = uint16;
};
template <>
struct stored<dtype::f16> {
  using type = uint16;
};
template <>
struct stored<dtype::boolean> {
  using type = uint8;
};

template <dtype D, class T>
ONEPASS_FUNCTION T from_storage(typename stored<D>::type s) {
  if constexpr (D == dtype::bf16) {
    return static_cast<T>(__uint_as_float(static_cast<uint32>(s) << 16));
  } else if constexpr (D == dtype::f16) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(s));
    return static_cast<T>(x);
  } else if constexpr (D == dtype::boolean) {
    return s ? T(1) : T(0);
  } else {
    return static_cast<T>(s);
  }
}

template <dtype D, class T>
ONEPASS_FUNCTION typename stored<D>::type to_storage(T x) {
  if constexpr (D == dtype::bf16) {
    uint16 s;
    if constexpr (sizeof(T) == 8)
      asm("{ .reg .f32 f; cvt.rn.f32.f64 f, %1; cvt.rn.bf16.f32 %0, f; }" : "=h"(s) : "d"(x));
    else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(s) : "f"(x));
    return s;
  } else if constexpr (D == dtype::f16) {
    uint16 s;
    if constexpr (sizeof(T) == 8) asm("cvt.rn.f16.f64 %0, %1;" : "=h"(s) : "d"(x));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(s) : "f"(x));
    return s;
  } else {
    return static_cast<typename stored<D>::type>(x);
  }
}

// Two numbers of 16 bits in one instruction.
template <dtype D>
ONEPASS_FUNCTION uint32 pair_to_storage(float low, float high) {
  uint32 both;
  if constexpr (D == dtype::bf16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

template <int Bytes>
struct access;
template <>
struct access<1> {
  using type = uint8;
};
template <>
struct access<2> {
  using type = uint16;
};
template <>
struct access<4> {
  using type = uint32;
};
template <>
struct access<8> {
  using type = uint2;
};
template <>
struct access<16> {
  using type = uint4;
};

// V numbers as they lie in memory, moved in accesses of at most E numbers and 16 bytes. E divides the row and its
// alignment, so that no access straddles the row's end: `count` cuts at whole accesses.
template <dtype D, int V, int E>
struct memory {
  static constexpr int kBytes = E * size_of(D) < 16 ? E * size_of(D) : 16;
  static constexpr int kNumbers = kBytes / size_of(D);
  static constexpr int kAccesses = V / kNumbers;
  using word = typename access<kBytes>::type;
  union buffer {
    word words[kAccesses];
    typename stored<D>::type numbers[V];
    uint32 pairs[V * size_of(D) < 4 ? 1 : V * size_of(D) / 4];  // of numbers of 16 bits; any four bytes
  };

  // From global memory that no one writes while the kernel runs: loads may pass stores.
  static ONEPASS_FUNCTION buffer load(const void* at, int count) {
    return load(at, count, [](const word* from) { return __ldg(from); });
  }
  // From memory that threads write.
  static ONEPASS_FUNCTION buffer load_written(const void* at, int count) {
    return load(at, count, [](const word* from) { return *from; });
  }
  // As load, where a row has `before` numbers in front of these and `after` from the first of these on. Where accesses
  // would be small and many, numbers inside the row come in whole aligned 16 bytes. Aligned: these themselves are.
  template <bool Aligned, class Index>
  static ONEPASS_FUNCTION buffer load_in_row(const void* at, int count, Index before, Index after) {
    constexpr int kSize = size_of(D), kWholes = V * kSize / 16;
    if constexpr (kAccesses <= 1 || V * kSize % 16 != 0) {
      return load(at, count);
    } else {
      const int shift = Aligned ? 0 : shift_of(at);
      const bool inside =
          count == V && (Aligned || (before >= shift / kSize && after >= (16 * (kWholes + 1) - shift) / kSize));
      const auto* from = reinterpret_cast<const uint4*>(static_cast<const char*>(at) - shift);
      uint32 piece[4 * (kWholes + 1)];
#pragma unroll
      for (int i = 0; i <= kWholes; ++i) {
        const uint4 whole = inside && !(Aligned && i == kWholes) ? __ldg(from + i) : uint4{};
        piece[4 * i] = whole.x, piece[4 * i + 1] = whole.y, piece[4 * i + 2] = whole.z, piece[4 * i + 3] = whole.w;
      }
      buffer b = load(at, inside ? 0 : count);  // the row's first and last
#pragma unroll
      for (int i = 0; i < 4 * kWholes + 2; ++i) piece[i] = (shift & 8) != 0 ? piece[i + 2] : piece[i];
#pragma unroll
      for (int i = 0; i < 4 * kWholes + 1; ++i) piece[i] = (shift & 4) != 0 ? piece[i + 1] : piece[i];
#pragma unroll
      for (int i = 0; i < 4 * kWholes; ++i)
        b.pairs[i] |= kSize == 2 ? __funnelshift_r(piece[i], piece[i + 1], (shift & 2) * 8) : piece[i];
      return b;
    }
  }
  template <class T>
  static ONEPASS_FUNCTION pack<T, V> numbers_of(buffer b) {
    pack<T, V> result;
#pragma unroll
    for (int i = 0; i < V; ++i) result.v[i] = from_storage<D, T>(b.numbers[i]);
    return result;
  }

  // Into shared memory; the data are there after wait_for_copy_groups, for the thread that asked.
  static ONEPASS_FUNCTION void copy(void* to, const void* from, int count) {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      if (i * kNumbers >= count) continue;
      word* target = static_cast<word*>(to) + i;
      const word* source = static_cast<const word*>(from) + i;
      if constexpr (kBytes >= 4) {
        const auto address = static_cast<uint32>(__cvta_generic_to_shared(target));
        // What was read from the place before is read before.
        if constexpr (kBytes == 16)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(source) : "memory");
        else
          asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(source), "n"(kBytes) : "memory");
      } else {
        *target = *source;
      }
    }
  }

  template <class T>
  static ONEPASS_FUNCTION buffer buffer_of(pack<T, V> value) {
    buffer b;
    if constexpr (size_of(D) == 2 && sizeof(T) == 4 && V % 2 == 0) {
#pragma unroll
      for (int i = 0; i < V / 2; ++i) b.pairs[i] = pair_to_storage<D>(value.v[2 * i], value.v[2 * i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) b.numbers[i] = to_storage<D>(value.v[i]);
    }
    return b;
  }
  template <class T>
  static ONEPASS_FUNCTION void store(void* at, pack<T, V> value, int count) {
    const buffer b = buffer_of(value);
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      if (i * kNumbers < count) static_cast<word*>(at)[i] = b.words[i];
    }
  }

  // As store, by all threads of a warp (`warp`, bits) at once. `follows`: the thread before has the numbers in front of
  // these; `leads`: the thread behind has those behind. Where accesses would be small and many, threads pass numbers
  // on, so that whole aligned 16 bytes are written: all but a row's and a warp's first and last.
  template <class T>
  static ONEPASS_FUNCTION void store_in_row(void* at, pack<T, V> value, int count, bool follows, bool leads,
                                            uint32 warp) {
    constexpr int kSize = size_of(D);
    if constexpr (kAccesses <= 1 || V * kSize != 16) {
      store(at, value, count);
    } else {
      const buffer b = buffer_of(value);
      const int shift = shift_of(at);
      uint32 piece[8];  // those of the thread before, and these
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        piece[i] = __shfl_up_sync(warp, b.pairs[i], 1);
        piece[4 + i] = b.pairs[i];
      }
      const bool whole = count == V && (follows || shift == 0);
      const int behind = __shfl_down_sync(warp, static_cast<int>(whole), 1);  // every thread of the warp
      const bool whole_behind = leads && shift != 0 && behind != 0;
      const int left = 16 - shift;  // bytes of the window to leave out
#pragma unroll
      for (int i = 0; i < 4; ++i) piece[i] = (left & 16) != 0 ? piece[i + 4] : piece[i];
#pragma unroll
      for (int i = 0; i < 6; ++i) piece[i] = (left & 8) != 0 ? piece[i + 2] : piece[i];
#pragma unroll
      for (int i = 0; i < 5; ++i) piece[i] = (left & 4) != 0 ? piece[i + 1] : piece[i];
      if constexpr (kSize == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) piece[i] = __funnelshift_r(piece[i], piece[i + 1], (left & 2) * 8);
      }
      if (whole) *reinterpret_cast<uint4*>(static_cast<char*>(at) - shift) = {piece[0], piece[1], piece[2], piece[3]};
#pragma unroll
      for (int i = 0; i < kAccesses; ++i) {
        const bool done = i * kBytes < left ? whole : whole_behind;
        if (i * kNumbers < count && !done) static_cast<word*>(at)[i] = b.words[i];
      }
    }
  }

 private:
  // Bytes behind the 16 aligned ones before: a multiple of what an access moves.
  static ONEPASS_FUNCTION int shift_of(const void* at) {
    return static_cast<int>(reinterpret_cast<uint64>(at) & (16 - kBytes));
  }
  template <class Read>
  static ONEPASS_FUNCTION buffer load(const void* at, int count, const Read& read) {
    buffer b;
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      b.words[i] = i * kNumbers < count ? read(static_cast<const word*>(at) + i) : word{};
    }
    return b;
  }
};

// Into the second-level cache.
ONEPASS_FUNCTION void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Copies in groups: all but the last kPending groups have arrived.
ONEPASS_FUNCTION void close_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
ONEPASS_FUNCTION void wait_for_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

template <dtype D, class T, int V>
ONEPASS_FUNCTION pack<T, V> rounded_to(pack<T, V> a) {
  return memory<D, V, 1>::template numbers_of<T>(memory<D, V, 1>::buffer_of(a));
}

// What random numbers depend on besides their place.
struct random_state {
  uint64 seed, offset;
};
ONEPASS_FUNCTION random_state load_random_state(const int64* state) {
  const auto* words = reinterpret_cast<const long long*>(state);
  return {static_cast<uint64>(__ldg(words)), static_cast<uint64>(__ldg(words + 1))};
}

// Where the 16 random bits of V columns from `column` on (a multiple of V; V divides 8; see lane/random.h) are at least
// the threshold, from 0 to 65536: words are compared whole, with the bits in question on top. Of a threshold of 65536
// one number in 2^33 does not know.
template <int V>
ONEPASS_FUNCTION pack_mask<V> random_at_least(random_state state, int ordinal, int64 row, int64 column, int64 columns,
                                              int threshold) {
  const uint64 group = static_cast<uint64>(row * ((columns + 7) / 8) + column / 8);
  const philox_words words = random_group(state.seed, state.offset, static_cast<uint32>(ordinal), group);
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

// Programmatic dependent launch: the kernel behind may begin while this one's last blocks still run, and waits for what
// they write.
ONEPASS_FUNCTION void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
ONEPASS_FUNCTION void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#undef ONEPASS_EACH
ONEPASS_END
