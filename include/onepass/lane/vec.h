// The CPU's lane: vec<T>, a SIMD register of consecutive columns, with operators. How it goes to and from memory is in
// cpu.h, its functions are in math.h.
#if defined(ONEPASS_LANE_VEC_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_LANE_VEC_H_
#undef ONEPASS_LANE_VEC_H_
#else
#define ONEPASS_LANE_VEC_H_
#endif

#include <hwy/highway.h>
#include <math.h>

#include "onepass/lane/target.h"
#include "onepass/lane/types.h"

ONEPASS_BEGIN

namespace hn = hwy::HWY_NAMESPACE;

template <class T>
struct vec_mask {
  hn::Mask<hn::ScalableTag<T>> raw;

  friend ONEPASS_FUNCTION vec_mask operator&(vec_mask a, vec_mask b) { return {hn::And(a.raw, b.raw)}; }
  friend ONEPASS_FUNCTION vec_mask operator|(vec_mask a, vec_mask b) { return {hn::Or(a.raw, b.raw)}; }
  friend ONEPASS_FUNCTION vec_mask operator!(vec_mask a) { return {hn::Not(a.raw)}; }
};

template <class T>
struct vec {
  using scalar = T;
  using tag = hn::ScalableTag<T>;
  using mask = vec_mask<T>;
  static constexpr int kLanes = static_cast<int>(hn::MaxLanes(tag()));

  hn::Vec<tag> raw;

  vec() = default;
  explicit ONEPASS_FUNCTION vec(T number) : raw(hn::Set(tag(), number)) {}
  explicit ONEPASS_FUNCTION vec(hn::Vec<tag> r) : raw(r) {}

  friend ONEPASS_FUNCTION vec operator+(vec a, vec b) { return vec(hn::Add(a.raw, b.raw)); }
  friend ONEPASS_FUNCTION vec operator-(vec a, vec b) { return vec(hn::Sub(a.raw, b.raw)); }
  friend ONEPASS_FUNCTION vec operator*(vec a, vec b) { return vec(hn::Mul(a.raw, b.raw)); }
  friend ONEPASS_FUNCTION vec operator/(vec a, vec b) { return vec(hn::Div(a.raw, b.raw)); }
  friend ONEPASS_FUNCTION vec operator-(vec a) { return vec(hn::Neg(a.raw)); }

  friend ONEPASS_FUNCTION mask operator<(vec a, vec b) { return {hn::Lt(a.raw, b.raw)}; }
  friend ONEPASS_FUNCTION mask operator<=(vec a, vec b) { return {hn::Le(a.raw, b.raw)}; }
  friend ONEPASS_FUNCTION mask operator>(vec a, vec b) { return {hn::Gt(a.raw, b.raw)}; }
  friend ONEPASS_FUNCTION mask operator>=(vec a, vec b) { return {hn::Ge(a.raw, b.raw)}; }
  friend ONEPASS_FUNCTION mask operator==(vec a, vec b) { return {hn::Eq(a.raw, b.raw)}; }
  friend ONEPASS_FUNCTION mask operator!=(vec a, vec b) { return {hn::Ne(a.raw, b.raw)}; }
};

// Of what a boolean tensor holds.
template <class T>
ONEPASS_FUNCTION typename vec<T>::mask is_set(vec<T> a) {
  return a != vec<T>(T(0));
}

// A lane of elements on their way to bfloat16: what is costly to compute may err by 2^-16 of its result (see math.h).
struct short_lane : vec<float> {
  short_lane() = default;
  explicit ONEPASS_FUNCTION short_lane(float number) : vec<float>(number) {}
  explicit ONEPASS_FUNCTION short_lane(hn::Vec<tag> r) : vec<float>(r) {}
  ONEPASS_FUNCTION short_lane(vec<float> lane) : vec<float>(lane) {}  // what operators give back
};

template <class L>
constexpr int lanes() {
  return L::kLanes;
}

// Half as many elements, on their way from memory to a lane or back.
template <class L>
struct half_lane {
  using scalar = typename L::scalar;
  using tag = hn::Half<typename L::tag>;
  static constexpr int kLanes = L::kLanes / 2;

  hn::Vec<tag> raw;

  explicit ONEPASS_FUNCTION half_lane(hn::Vec<tag> r) : raw(r) {}
};
#if HWY_TARGET != HWY_SCALAR  // whose lanes have one element
namespace detail {
// Of a lane's two halves one element of each in turn, and back.
template <int Lanes, bool Back>
struct zipped_order {
  static_assert(Lanes % 2 == 0);
  int32_t of[Lanes];
  constexpr zipped_order() : of() {
    for (int i = 0; i < Lanes; ++i) of[i] = Back ? i % (Lanes / 2) * 2 + i / (Lanes / 2) : i / 2 + i % 2 * (Lanes / 2);
  }
};
template <bool Back, class T>
ONEPASS_FUNCTION vec<T> reordered(vec<T> a) {
  static constexpr zipped_order<vec<T>::kLanes, Back> order;
  const typename vec<T>::tag d;
  hn::TFromD<hn::RebindToSigned<typename vec<T>::tag>> places[vec<T>::kLanes];
  for (int i = 0; i < vec<T>::kLanes; ++i) places[i] = order.of[i];
  return vec<T>(hn::TableLookupLanes(a.raw, hn::SetTableIndices(d, places)));
}
}  // namespace detail
// first[0], second[0], first[1], second[1], ...
template <class L>
ONEPASS_FUNCTION L zip(half_lane<L> first, half_lane<L> second) {
  return L(detail::reordered<false>(vec<typename L::scalar>(hn::Combine(typename L::tag(), second.raw, first.raw))));
}
template <class L>
struct unzipped {
  half_lane<L> first, second;
};
template <class L>
ONEPASS_FUNCTION unzipped<L> unzip(L a) {
  const auto apart = detail::reordered<true>(vec<typename L::scalar>(a)).raw;
  return {half_lane<L>(hn::LowerHalf(typename half_lane<L>::tag(), apart)),
          half_lane<L>(hn::UpperHalf(typename half_lane<L>::tag(), apart))};
}
// Each pair of elements (a, b) as a point, turned by a quarter: (-b, a).
template <class T>
ONEPASS_FUNCTION vec<T> quarter_turn(vec<T> a) {
  const auto swapped = hn::Reverse2(typename vec<T>::tag(), a.raw);
  return vec<T>(hn::OddEven(swapped, hn::Neg(swapped)));
}
#endif

// a·b + c; rounded once on targets with FMA, twice on the others.
template <class T>
ONEPASS_FUNCTION vec<T> fma(vec<T> a, vec<T> b, vec<T> c) {
  return vec<T>(hn::MulAdd(a.raw, b.raw, c.raw));
}
template <class T>
ONEPASS_FUNCTION vec<T> abs(vec<T> a) {
  return vec<T>(hn::Abs(a.raw));
}
template <class T>
ONEPASS_FUNCTION vec<T> where(vec_mask<T> m, vec<T> a, vec<T> b) {
  return vec<T>(hn::IfThenElse(m.raw, a.raw, b.raw));
}
// min(a, b) is a > b ? b : a on every target, so a NaN in the first place stays one; max likewise.
template <class T>
ONEPASS_FUNCTION vec<T> min(vec<T> a, vec<T> b) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_SSSE3
  return vec<T>(hn::Min(b.raw, a.raw));  // minps gives its second operand where either is NaN
#else
  return where(a > b, b, a);
#endif
}
template <class T>
ONEPASS_FUNCTION vec<T> max(vec<T> a, vec<T> b) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_SSSE3
  return vec<T>(hn::Max(b.raw, a.raw));
#else
  return where(a < b, b, a);
#endif
}
template <class T>
ONEPASS_FUNCTION vec<T> copy_sign(vec<T> magnitude, vec<T> sign) {
  return vec<T>(hn::CopySign(magnitude.raw, sign.raw));
}
template <class T>
ONEPASS_FUNCTION vec<T> sqrt(vec<T> a) {
  return vec<T>(hn::Sqrt(a.raw));
}
template <class T>
ONEPASS_FUNCTION T reciprocal_number(T a) {
  return T(1) / a;
}
ONEPASS_FUNCTION float log1p_number(float a) { return ::log1pf(a); }
ONEPASS_FUNCTION double log1p_number(double a) { return ::log1p(a); }
ONEPASS_FUNCTION float log_number(float a) { return ::logf(a); }
ONEPASS_FUNCTION double log_number(double a) { return ::log(a); }
ONEPASS_FUNCTION float reciprocal_root(float a) { return 1.0f / ::sqrtf(a); }
ONEPASS_FUNCTION double reciprocal_root(double a) { return 1.0 / ::sqrt(a); }
// (a - centre) factor + offset
template <class T>
ONEPASS_FUNCTION vec<T> centred_product(vec<T> a, vec<T> centre, vec<T> factor, vec<T> offset) {
  return fma(a - centre, factor, offset);
}

// A whole register of the arithmetic's own type, at any address.
template <class L>
ONEPASS_FUNCTION L load_lane(const typename L::scalar* at) {
  return L(hn::LoadU(typename L::tag(), at));
}
template <class T>
ONEPASS_FUNCTION void store_lane(vec<T> value, T* at) {
  hn::StoreU(value.raw, hn::ScalableTag<T>(), at);
}

// The first `count` elements, touching no others; zero in the lanes behind.
template <class L>
ONEPASS_FUNCTION L load_first(const typename L::scalar* at, int count) {
  const typename L::tag d;
#if HWY_TARGET <= HWY_AVX2 && HWY_ARCH_X86
  return L(hn::MaskedLoad(hn::FirstN(d, static_cast<size_t>(count)), d, at));
#else
  HWY_ALIGN typename L::scalar number[L::kLanes] = {};
  for (int i = 0; i < count; ++i) number[i] = at[i];
  return L(hn::Load(d, number));
#endif
}
template <class T>
ONEPASS_FUNCTION void store_first(vec<T> value, T* at, int count) {
  const hn::ScalableTag<T> d;
#if HWY_TARGET <= HWY_AVX2 && HWY_ARCH_X86
  hn::BlendedStore(value.raw, hn::FirstN(d, static_cast<size_t>(count)), d, at);
#else
  HWY_ALIGN T number[vec<T>::kLanes];
  hn::Store(value.raw, d, number);
  for (int i = 0; i < count; ++i) at[i] = number[i];
#endif
}

// first, first + 1, ...
template <class L>
ONEPASS_FUNCTION L iota(typename L::scalar first) {
  return L(hn::Iota(typename L::tag(), first));
}
// True in the first `count` lanes.
template <class L>
ONEPASS_FUNCTION typename L::mask first_n(int count) {
  return {hn::FirstN(typename L::tag(), static_cast<size_t>(count))};
}
template <class T>
ONEPASS_FUNCTION T sum_lanes(vec<T> a) {
  return hn::GetLane(hn::SumOfLanes(hn::ScalableTag<T>(), a.raw));
}
template <class T>
ONEPASS_FUNCTION T max_lanes(vec<T> a) {
  return hn::GetLane(hn::MaxOfLanes(hn::ScalableTag<T>(), a.raw));
}

// f of each element by itself, for what is not worth a vector form.
template <class T, class F>
ONEPASS_FUNCTION vec<T> each_lane(vec<T> a, const F& f) {
  HWY_ALIGN T number[vec<T>::kLanes];
  hn::Store(a.raw, hn::ScalableTag<T>(), number);
  for (int i = 0; i < vec<T>::kLanes; ++i) number[i] = f(number[i]);
  return vec<T>(hn::Load(hn::ScalableTag<T>(), number));
}

ONEPASS_END
#endif
