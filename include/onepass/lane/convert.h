// From one type of number to another, in registers: what Highway 1.0.3 lacks or rounds wrongly.
#if defined(ONEPASS_LANE_CONVERT_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_LANE_CONVERT_H_
#undef ONEPASS_LANE_CONVERT_H_
#else
#define ONEPASS_LANE_CONVERT_H_
#endif

#include "onepass/lane/vec.h"

// F16C and NEON convert f16 exactly as IEEE says. Highway's own fallback truncates and knows neither inf nor NaN.
// It stays out of line: inlined at every tensor, it would be a tenth of the kernels' code.
#undef ONEPASS_NATIVE_F16
#undef ONEPASS_F16_FUNCTION
#if (HWY_TARGET <= HWY_AVX2 && HWY_ARCH_X86 && !defined(HWY_DISABLE_F16C)) || HWY_ARCH_ARM_A64
#define ONEPASS_NATIVE_F16 1
#define ONEPASS_F16_FUNCTION ONEPASS_FUNCTION
#else
#define ONEPASS_NATIVE_F16 0
#define ONEPASS_F16_FUNCTION HWY_NOINLINE
#endif

ONEPASS_BEGIN
namespace storage {

template <class D>
using vector = hn::Vec<D>;
template <class D>
using bits_32 = hn::Vec<hn::Rebind<uint32_t, D>>;
template <class D>
using bits_16 = hn::Vec<hn::Rebind<uint16_t, D>>;

// D is any tag of float down to `narrow`.

#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
template <class D>
inline constexpr bool kWholeAvx512 = hn::MaxLanes(D()) == 16;
alignas(64) inline constexpr uint16_t kSpread[32] = {0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
                                                     0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
alignas(64) inline constexpr uint16_t kGather[32] = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
#endif

// On AVX-512 one permutation of 16-bit words does what takes two instructions elsewhere: 7 % of a bf16 GELU.
template <class D>
ONEPASS_FUNCTION vector<D> from_bf16(D d, bits_16<D> bits) {
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  if constexpr (kWholeAvx512<D>) {
    const hn::ScalableTag<uint16_t> d16;
    const auto spread = hn::Load(d16, kSpread).raw;
    return hn::BitCast(d, hn::Vec<decltype(d16)>{
                              _mm512_maskz_permutexvar_epi16(0xaaaaaaaau, spread, _mm512_castsi256_si512(bits.raw))});
  }
#endif
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(hn::Rebind<uint32_t, D>(), bits)));
}

// Round to nearest, ties to even, in the upper half of each; every NaN becomes the quiet one. The lower half is noise.
template <class D>
ONEPASS_FUNCTION bits_32<D> round_to_bf16(D, vector<D> value) {
  const hn::Rebind<uint32_t, D> du;
  const auto bits = hn::BitCast(du, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu)));
  return hn::IfThenElse(hn::RebindMask(du, hn::Eq(value, value)), rounded, hn::Set(du, 0x7fc00000u));
}
template <class D>
ONEPASS_FUNCTION bits_16<D> to_bf16(D d, vector<D> value) {
  const auto rounded = round_to_bf16(d, value);
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  if constexpr (kWholeAvx512<D>) {
    const auto gather = hn::Load(hn::ScalableTag<uint16_t>(), kGather).raw;
    return bits_16<D>{_mm512_castsi512_si256(_mm512_permutexvar_epi16(gather, rounded.raw))};
  }
#endif
  return hn::DemoteTo(hn::Rebind<uint16_t, D>(), hn::BitCast(hn::Rebind<int32_t, D>(), hn::ShiftRight<16>(rounded)));
}

template <class D>
ONEPASS_F16_FUNCTION vector<D> from_f16(D d, bits_16<D> bits_of_16) {
#if ONEPASS_NATIVE_F16
  return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), bits_of_16));
#else
  const hn::Rebind<uint32_t, D> du;
  const auto bits = hn::PromoteTo(du, bits_of_16);
  const hn::Rebind<int32_t, D> di;
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000u)));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffu));
  const auto moved = hn::ShiftLeft<13>(magnitude);
  const auto normal = hn::Add(moved, hn::Set(du, 112u << 23));
  const auto infinite = hn::Add(moved, hn::Set(du, 224u << 23));  // inf and NaN: exponent 31 becomes 255
  // Denormals go through an integer: no f32 denormal on the way, which a thread may have set to flush.
  const auto denormal = hn::BitCast(
      du, hn::Mul(hn::ConvertTo(d, hn::BitCast(di, magnitude)), hn::Set(d, 5.9604644775390625e-8f)));  // 2^-24
  const auto below = [&](auto a, uint32_t b) ONEPASS_LAMBDA {
    return hn::RebindMask(du, hn::Lt(hn::BitCast(di, a), hn::Set(di, static_cast<int32_t>(b))));
  };
  const auto finite = hn::IfThenElse(below(magnitude, 0x0400u), denormal, normal);
  return hn::BitCast(d, hn::Or(sign, hn::IfThenElse(below(magnitude, 0x7c00u), finite, infinite)));
#endif
}

template <class D>
ONEPASS_F16_FUNCTION bits_16<D> to_f16(D d, vector<D> value) {
#if ONEPASS_NATIVE_F16
  (void)d;
  return hn::BitCast(hn::Rebind<uint16_t, D>(), hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), value));
#else
  const hn::Rebind<uint32_t, D> du;
  const hn::Rebind<int32_t, D> di;
  const auto bits = hn::BitCast(du, value);
  const auto sign = hn::ShiftRight<16>(hn::And(bits, hn::Set(du, 0x80000000u)));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffffu));
  const auto below = [&](uint32_t b) ONEPASS_LAMBDA {
    return hn::RebindMask(du, hn::Lt(hn::BitCast(di, magnitude), hn::Set(di, static_cast<int32_t>(b))));
  };
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const auto normal = hn::ShiftRight<13>(hn::Add(hn::Add(magnitude, odd), hn::Set(du, 0xfffu - (112u << 23))));
  // Adding 0.5 leaves the f16 denormal, rounded to even by the adder, in the low bits.
  const auto half = hn::Set(d, 0.5f);
  const auto denormal = hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), half)), hn::BitCast(du, half));
  const auto nan = hn::Or(hn::Set(du, 0x7e00u), hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 0x3ffu)));
  const auto finite = hn::IfThenElse(below(0x38800000u), denormal, normal);
  const auto large = hn::IfThenElse(below(0x7f800001u), hn::Set(du, 0x7c00u), nan);
  const auto bits_of_16 = hn::Or(sign, hn::IfThenElse(below(0x47800000u), finite, large));
  return hn::DemoteTo(hn::Rebind<uint16_t, D>(), hn::BitCast(di, bits_of_16));
#endif
}

// f64 to f32, as many elements on both sides; D is a tag of double.
template <class D>
ONEPASS_FUNCTION vector<hn::Rebind<float, D>> narrow(D d, vector<D> value) {
  const hn::Rebind<float, D> df;
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR  // their DemoteTo saturates where IEEE says infinity
  double wide[hn::MaxLanes(d)];
  float number[hn::MaxLanes(d)];
  hn::StoreU(value, d, wide);
  for (size_t i = 0; i < hn::MaxLanes(d); ++i) number[i] = static_cast<float>(wide[i]);
  return hn::LoadU(df, number);
#else
  (void)d;
  return hn::DemoteTo(df, value);
#endif
}

// To f32, rounded to odd: a second rounding to 16 bits then gives what one rounding would. Rare, so out of line.
template <class D>
HWY_NOINLINE vector<hn::Rebind<float, D>> narrow_to_odd(D d, vector<D> value) {
  const hn::Rebind<float, D> df;
  const hn::Rebind<int32_t, D> di;
  const auto nearest = narrow(d, value);
  const auto back = hn::PromoteTo(d, nearest);
  // -1 where nearest is too far from zero, +1 where too near, 0 where exact (or NaN); as numbers, to cross widths.
  const auto one = hn::Set(d, 1.0);
  const auto too_far = hn::IfThenElseZero(hn::Gt(hn::Abs(back), hn::Abs(value)), one);
  const auto too_near = hn::IfThenElseZero(hn::Lt(hn::Abs(back), hn::Abs(value)), one);
  const auto step = hn::ConvertTo(di, narrow(d, hn::Sub(too_near, too_far)));
  const auto bits = hn::BitCast(di, nearest);
  const auto even = hn::Eq(hn::And(bits, hn::Set(di, 1)), hn::Zero(di));
  return hn::BitCast(df, hn::Add(bits, hn::IfThenElseZero(even, step)));
}

}  // namespace storage
ONEPASS_END
#endif
