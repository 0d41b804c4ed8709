// A vector of consecutive columns on CUDA: V numbers in one thread's registers. Storage types are known when the
// kernel is compiled. No CUDA header is needed: conversions are single PTX instructions.
#pragma once

#include "onepass/lane/coefficients.h"
#include "onepass/lane/random.h"
#include "onepass/lane/target.h"
#include "onepass/lane/types.h"

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

// CUDA's own functions, without fast maths: at most 2 ULP each (CUDA C++ programming guide, mathematical functions).
#define ONEPASS_UNARY(name, single, twice)                          \
  ONEPASS_FUNCTION float name##_number(float x) { return single; }  \
  ONEPASS_FUNCTION double name##_number(double x) { return twice; } \
  template <class T, int V>                                         \
  ONEPASS_FUNCTION pack<T, V> name(pack<T, V> a) {                  \
    using P = pack<T, V>;                                           \
    ONEPASS_EACH(P, result.v[i] = name##_number(a.v[i]))            \
  }
ONEPASS_UNARY(exp, expf(x), ::exp(x))
ONEPASS_UNARY(expm1, expm1f(x), ::expm1(x))
ONEPASS_UNARY(log1p, log1pf(x), ::log1p(x))
ONEPASS_UNARY(tanh, tanhf(x), ::tanh(x))
ONEPASS_UNARY(erf, erff(x), ::erf(x))
ONEPASS_UNARY(sigmoid, __fdividef(1.0f, 1.0f + expf(-x)), 1.0 / (1.0 + ::exp(-x)))
ONEPASS_UNARY(normal_cdf, 0.5f * (1.0f + erff(x * 0.70710678f)), normcdf(x))
ONEPASS_UNARY(rsqrt, rsqrtf(x), ::rsqrt(x))
ONEPASS_UNARY(reciprocal, __fdividef(1.0f, x), 1.0 / x)
ONEPASS_UNARY(abs, fabsf(x), fabs(x))
#undef ONEPASS_UNARY

template <class L>
struct normal_pair {
  L cdf, density;
};
// As on the CPU (lane/math.h), with the chip's exp2 and reciprocal.
ONEPASS_FUNCTION normal_pair<float> normal_number(float x) {
  constexpr const auto& p = coefficients::kTailNumerator_f32;
  constexpr const auto& q = coefficients::kTailDenominator_f32;
  const float t = fminf(fabsf(x), 13.25f), half = -0.5f * t, high = half * t, low = fmaf(half, t, -high);
  const float power = high * 1.44269504f;  // in two parts: its error is a relative error of the result
  const float rest = fmaf(high, 1.44269504f, -power) + fmaf(high, 1.92596303e-8f, low * 1.44269504f);
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(power));
  e = fmaf(e, rest * 0.69314718f, e);
  const float above = fmaf(fmaf(fmaf(fmaf(p[4], t, p[3]), t, p[2]), t, p[1]), t, p[0]);
  const float below = fmaf(fmaf(fmaf(fmaf(fmaf(q[5], t, q[4]), t, q[3]), t, q[2]), t, q[1]), t, q[0]);
  const float tail = __fdividef(above, below) * e;
  return {x < 0.0f ? tail : 1.0f - tail, fabsf(x) > 13.25f ? 0.0f : 0.39894228f * e};
}
ONEPASS_FUNCTION normal_pair<double> normal_number(double x) {
  return {normcdf(x), 0.39894228040143268 * ::exp(-0.5 * x * x)};
}
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
  ONEPASS_EACH(P, result.v[i] = b.v[i] < a.v[i] ? b.v[i] : a.v[i])  // a NaN in a stays
}
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> max(pack<T, V> a, pack<T, V> b) {
  using P = pack<T, V>;
  ONEPASS_EACH(P, result.v[i] = b.v[i] > a.v[i] ? b.v[i] : a.v[i])
}
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> where(pack_mask<V> m, pack<T, V> yes, pack<T, V> no) {
  using P = pack<T, V>;
  ONEPASS_EACH(P, result.v[i] = m.m[i] ? yes.v[i] : no.v[i])
}
ONEPASS_FUNCTION float square_root(float x) { return sqrtf(x); }
ONEPASS_FUNCTION double square_root(double x) { return ::sqrt(x); }

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
  for (int i = 1; i < V; ++i) best = a.v[i] > best ? a.v[i] : best;
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
  };

  template <class T>
  static ONEPASS_FUNCTION pack<T, V> load(const void* at, int count) {
    buffer b;
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      b.words[i] = i * kNumbers < count ? static_cast<const word*>(at)[i] : word{};
    }
    pack<T, V> result;
#pragma unroll
    for (int i = 0; i < V; ++i) result.v[i] = from_storage<D, T>(b.numbers[i]);
    return result;
  }

  // Into shared memory; the data are there after wait_for_copies, for the thread that asked.
  static ONEPASS_FUNCTION void copy(void* to, const void* from, int count) {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      if (i * kNumbers >= count) continue;
      word* target = static_cast<word*>(to) + i;
      const word* source = static_cast<const word*>(from) + i;
      if constexpr (kBytes >= 4) {
        const auto address = static_cast<uint32>(__cvta_generic_to_shared(target));
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(source), "n"(kBytes)
                     : "memory");  // what was read from the place before is read before
      } else {
        *target = *source;
      }
    }
  }

  template <class T>
  static ONEPASS_FUNCTION void store(void* at, pack<T, V> value, int count) {
    buffer b;
#pragma unroll
    for (int i = 0; i < V; ++i) b.numbers[i] = to_storage<D>(value.v[i]);
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      if (i * kNumbers < count) static_cast<word*>(at)[i] = b.words[i];
    }
  }
};

ONEPASS_FUNCTION void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <dtype D, class T, int V>
ONEPASS_FUNCTION pack<T, V> rounded_to(pack<T, V> a) {
  using P = pack<T, V>;
  ONEPASS_EACH(P, result.v[i] = (from_storage<D, T>(to_storage<D>(a.v[i]))))
}

// 16 random bits for each of V columns from `column` on (a multiple of V; V divides 8): see lane/random.h.
template <class T, int V>
ONEPASS_FUNCTION pack<T, V> random_pack(const int64* state, int ordinal, int64 row, int64 column, int64 columns) {
  const uint64 group = static_cast<uint64>(row * ((columns + 7) / 8) + column / 8);
  const philox_words words =
      random_group(static_cast<uint64>(state[0]), static_cast<uint64>(state[1]), static_cast<uint32>(ordinal), group);
  const int first = static_cast<int>(column % 8);
  pack<T, V> result;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32 number = (words.word[i / 2] >> (16 * (i % 2))) & 0xffffu;
    if (V == 8) result.v[i % V] = static_cast<T>(number);
    else if (i >= first && i < first + V) result.v[i % V] = static_cast<T>(number);
  }
  return result;
}

#undef ONEPASS_EACH
ONEPASS_END
