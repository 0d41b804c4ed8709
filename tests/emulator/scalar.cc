// What a thread does on its own, in registers.
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <limits>

#include "tests/emulator/machine.h"

namespace onepass::emulator {
namespace {

using i16 = std::int16_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

// f(T{}) for the type of that name.
template <class F>
step with_type(const std::string& type, const F& f) {
  if (type == "u16" || type == "b16") return f(u16{});
  if (type == "s16") return f(i16{});
  if (type == "u32" || type == "b32") return f(u32{});
  if (type == "s32") return f(i32{});
  if (type == "u64" || type == "b64") return f(u64{});
  if (type == "s64") return f(i64{});
  if (type == "f32") return f(float{});
  if (type == "f64") return f(double{});
  if (type == "pred") return f(u16{});
  if (type == "u8" || type == "b8") return f(std::uint8_t{});
  return nullptr;
}
template <class F>
step with_integer(const std::string& type, const F& f) {
  return with_type(type, [&](auto zero) -> step {
    if constexpr (std::is_integral_v<decltype(zero)>) return f(zero);
    else return nullptr;
  });
}

#define ONEPASS_STEP(body) [](thread& t, const instruction& i) { body; }
#define ONEPASS_ARITHMETIC(expression)                                            \
  with_type(type, [](auto zero) -> step {                                         \
    using T = decltype(zero);                                                     \
    return ONEPASS_STEP(const T a = get<T>(t, i, 1); const T b = get<T>(t, i, 2); \
                        set<T>(t, i, 0, static_cast<T>(expression)));             \
  })
#define ONEPASS_INTEGER(expression)                                                         \
  with_integer(type, [](auto zero) -> step {                                                \
    using T = decltype(zero);                                                               \
    return ONEPASS_STEP(const T a = get<T>(t, i, 1);                                        \
                        [[maybe_unused]] const T b = get<T>(t, i, i.of.size() > 2 ? 2 : 1); \
                        set<T>(t, i, 0, static_cast<T>(expression)));                       \
  })

// Wraps around, as the chip's integers do.
template <class T>
T added(T a, T b) {
  if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<u64>(a) + static_cast<u64>(b));
  else return a + b;
}
template <class T>
T subtracted(T a, T b) {
  if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<u64>(a) - static_cast<u64>(b));
  else return a - b;
}
template <class T>
T multiplied(T a, T b) {
  if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<u64>(a) * static_cast<u64>(b));
  else return a * b;
}
template <class T>
T divided(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    if (b == 0) throw std::runtime_error("division by 0");
    return b == static_cast<T>(-1) ? static_cast<T>(0 - static_cast<u64>(a)) : static_cast<T>(a / b);
  } else {
    return a / b;
  }
}
template <class T>
T high_product(T a, T b) {
  using wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return static_cast<T>(static_cast<wide>(a) * static_cast<wide>(b) >> (8 * sizeof(T)));
}
// A NaN loses, or, where it is asked for, wins.
template <bool kLeast, bool kKeepsNaN, class T>
T extreme(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (kKeepsNaN && (std::isnan(a) || std::isnan(b))) return std::numeric_limits<T>::quiet_NaN();
    return kLeast ? std::fmin(a, b) : std::fmax(a, b);
  } else {
    return (b < a) == kLeast ? b : a;
  }
}
template <class T>
T shifted_left(T a, u32 by) {
  return by >= 8 * sizeof(T) ? T(0) : static_cast<T>(static_cast<u64>(a) << by);
}
template <class T>
T shifted_right(T a, u32 by) {
  if (by >= 8 * sizeof(T)) return a < 0 ? static_cast<T>(-1) : T(0);
  return static_cast<T>(a >> by);
}
float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

step find_arithmetic(const std::string& base, const std::string& type, bool keeps_nan) {
  if (base == "add") return ONEPASS_ARITHMETIC(added<T>(a, b));
  if (base == "sub") return ONEPASS_ARITHMETIC(subtracted<T>(a, b));
  if (base == "mul") return ONEPASS_ARITHMETIC(multiplied<T>(a, b));
  if (base == "div") return ONEPASS_ARITHMETIC(divided<T>(a, b));
  if (base == "min")
    return keeps_nan ? ONEPASS_ARITHMETIC((extreme<true, true, T>(a, b)))
                     : ONEPASS_ARITHMETIC((extreme<true, false, T>(a, b)));
  if (base == "max")
    return keeps_nan ? ONEPASS_ARITHMETIC((extreme<false, true, T>(a, b)))
                     : ONEPASS_ARITHMETIC((extreme<false, false, T>(a, b)));
  if (base == "rem") return ONEPASS_INTEGER(a - multiplied<T>(divided<T>(a, b), b));
  if (base == "and") return ONEPASS_INTEGER(a & b);
  if (base == "or") return ONEPASS_INTEGER(a | b);
  if (base == "xor") return ONEPASS_INTEGER(a ^ b);
  if (base == "popc") return ONEPASS_INTEGER(std::popcount(static_cast<std::make_unsigned_t<T>>(a)));
  if (base == "clz") return ONEPASS_INTEGER(std::countl_zero(static_cast<std::make_unsigned_t<T>>(a)));
  if (base == "not" && type == "pred") return ONEPASS_STEP(set<u16>(t, i, 0, get<u16>(t, i, 1) == 0));
  if (base == "not") return ONEPASS_INTEGER(~a);
  if (base == "shl")
    return with_integer(type, [](auto zero) -> step {
      using T = decltype(zero);
      return ONEPASS_STEP(set<T>(t, i, 0, shifted_left<T>(get<T>(t, i, 1), get<u32>(t, i, 2))));
    });
  if (base == "shr")
    return with_integer(type, [](auto zero) -> step {
      using T = decltype(zero);
      return ONEPASS_STEP(set<T>(t, i, 0, shifted_right<T>(get<T>(t, i, 1), get<u32>(t, i, 2))));
    });
  if (base == "neg")
    return with_type(type, [](auto zero) -> step {
      using T = decltype(zero);
      if constexpr (std::is_integral_v<T>) return ONEPASS_STEP(set<T>(t, i, 0, subtracted<T>(0, get<T>(t, i, 1))));
      else return ONEPASS_STEP(set<T>(t, i, 0, -get<T>(t, i, 1)));
    });
  if (base == "abs")
    return with_type(type, [](auto zero) -> step {
      using T = decltype(zero);
      if constexpr (std::is_floating_point_v<T>) return ONEPASS_STEP(set<T>(t, i, 0, std::fabs(get<T>(t, i, 1))));
      else return ONEPASS_STEP(const T a = get<T>(t, i, 1); set<T>(t, i, 0, a < 0 ? subtracted<T>(0, a) : a));
    });
  if (base == "selp")
    return with_type(type, [](auto zero) -> step {
      using T = decltype(zero);
      return ONEPASS_STEP(set<T>(t, i, 0, get<T>(t, i, get<u16>(t, i, 3) != 0 ? 1 : 2)));
    });
  return nullptr;
}

step find_product(const std::string& base, const std::string& how, const std::string& type) {
  if (base == "mul" && how == "hi") return ONEPASS_INTEGER(high_product<T>(a, b));
  if (base == "mul" && how == "wide") {
    if (type == "s32") return ONEPASS_STEP(set<i64>(t, i, 0, i64{get<i32>(t, i, 1)} * get<i32>(t, i, 2)));
    if (type == "u32") return ONEPASS_STEP(set<u64>(t, i, 0, u64{get<u32>(t, i, 1)} * get<u32>(t, i, 2)));
    if (type == "u16") return ONEPASS_STEP(set<u32>(t, i, 0, u32{get<u16>(t, i, 1)} * get<u16>(t, i, 2)));
    if (type == "s16") return ONEPASS_STEP(set<i32>(t, i, 0, i32{get<i16>(t, i, 1)} * get<i16>(t, i, 2)));
  }
  if (base == "mad" && how == "lo")
    return with_integer(type, [](auto zero) -> step {
      using T = decltype(zero);
      return ONEPASS_STEP(set<T>(t, i, 0, added<T>(multiplied<T>(get<T>(t, i, 1), get<T>(t, i, 2)), get<T>(t, i, 3))));
    });
  if (base == "fma" && how == "rm" && type == "f32")
    return ONEPASS_STEP(std::fesetround(FE_DOWNWARD); volatile float a = get<float>(t, i, 1);
                        volatile float sum = std::fma(a, get<float>(t, i, 2), get<float>(t, i, 3));
                        std::fesetround(FE_TONEAREST); set<float>(t, i, 0, sum));
  if (base == "fma")
    return with_type(type, [](auto zero) -> step {
      using T = decltype(zero);
      if constexpr (std::is_floating_point_v<T>)
        return ONEPASS_STEP(set<T>(t, i, 0, std::fma(get<T>(t, i, 1), get<T>(t, i, 2), get<T>(t, i, 3))));
      else return nullptr;
    });
  return nullptr;
}

step find_function(const std::string& base, const std::string& type) {
#define ONEPASS_FUNCTION_OF(T, expression) ONEPASS_STEP(const T a = get<T>(t, i, 1); set<T>(t, i, 0, expression))
  if (type == "f32") {
    if (base == "ex2") return ONEPASS_FUNCTION_OF(float, flushed(std::exp2(flushed(a))));
    if (base == "lg2") return ONEPASS_FUNCTION_OF(float, std::log2(flushed(a)));
    if (base == "rcp") return ONEPASS_FUNCTION_OF(float, flushed(1.0f / flushed(a)));
    if (base == "rsqrt") return ONEPASS_FUNCTION_OF(float, 1.0f / std::sqrt(a));
    if (base == "sqrt") return ONEPASS_FUNCTION_OF(float, std::sqrt(a));
    if (base == "sin") return ONEPASS_FUNCTION_OF(float, std::sin(a));
    if (base == "cos") return ONEPASS_FUNCTION_OF(float, std::cos(a));
    if (base == "copysign") return ONEPASS_FUNCTION_OF(float, std::copysign(get<float>(t, i, 2), a));
  }
  if (type == "f64") {
    if (base == "rcp") return ONEPASS_FUNCTION_OF(double, 1.0 / a);
    if (base == "rsqrt") return ONEPASS_FUNCTION_OF(double, 1.0 / std::sqrt(a));
    if (base == "sqrt") return ONEPASS_FUNCTION_OF(double, std::sqrt(a));
    if (base == "copysign") return ONEPASS_FUNCTION_OF(double, std::copysign(get<double>(t, i, 2), a));
  }
  return nullptr;
}

// What is not ordered, for a NaN, says yes where the name ends in u.
template <class T>
step find_comparison(const std::string& how) {
#define ONEPASS_COMPARISON(expression) \
  ONEPASS_STEP(const T a = get<T>(t, i, 1); const T b = get<T>(t, i, 2); set<u16>(t, i, 0, (expression) ? 1 : 0))
  if (how == "eq") return ONEPASS_COMPARISON(a == b);
  if (how == "lt" || how == "lo") return ONEPASS_COMPARISON(a < b);
  if (how == "le" || how == "ls") return ONEPASS_COMPARISON(a <= b);
  if (how == "gt" || how == "hi") return ONEPASS_COMPARISON(a > b);
  if (how == "ge" || how == "hs") return ONEPASS_COMPARISON(a >= b);
  if constexpr (std::is_floating_point_v<T>) {
    if (how == "ne") return ONEPASS_COMPARISON(a < b || a > b);
    if (how == "neu") return ONEPASS_COMPARISON(a != b);
    if (how == "equ") return ONEPASS_COMPARISON(!(a < b || a > b));
    if (how == "ltu") return ONEPASS_COMPARISON(!(a >= b));
    if (how == "leu") return ONEPASS_COMPARISON(!(a > b));
    if (how == "gtu") return ONEPASS_COMPARISON(!(a <= b));
    if (how == "geu") return ONEPASS_COMPARISON(!(a < b));
    if (how == "nan") return ONEPASS_COMPARISON(std::isnan(a) || std::isnan(b));
    if (how == "num") return ONEPASS_COMPARISON(!std::isnan(a) && !std::isnan(b));
  } else if (how == "ne") {
    return ONEPASS_COMPARISON(a != b);
  }
  return nullptr;
}

template <class To, class From>
To truncated(From x) {
  if (std::isnan(x)) return 0;
  const From cut = std::trunc(x);
  if (cut <= static_cast<From>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (cut >= static_cast<From>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  return static_cast<To>(cut);
}

// Saturates. NaN is the one that has all bits but the sign.
template <int kMantissa, int kBias>
u16 to_code(float x, float largest) {
  if (std::isnan(x)) return 0x7f;
  const auto exponent = [](float m) { return m > 0 ? std::max(std::ilogb(m), 1 - kBias) : 1 - kBias; };
  const auto steps = [&](float m, int e) { return std::nearbyint(std::ldexp(m, kMantissa - e)); };
  const float given = std::fmin(std::fabs(x), largest);
  const float rounded = std::ldexp(steps(given, exponent(given)), exponent(given) - kMantissa);
  const int e = exponent(rounded);
  const int code = ((e + kBias - 1) << kMantissa) + static_cast<int>(steps(rounded, e));
  return static_cast<u16>(code | (std::signbit(x) ? 128 : 0));
}

u16 pair_of_e4m3(float low, float high) {
  return static_cast<u16>(to_code<3, 7>(high, 448) << 8 | to_code<3, 7>(low, 448));
}
u16 pair_of_e5m2(float low, float high) {
  return static_cast<u16>(to_code<2, 15>(high, 57344) << 8 | to_code<2, 15>(low, 57344));
}

step find_half_conversion(const std::string& to, const std::string& from) {
  if (to == "e4m3x2") return ONEPASS_STEP(set<u16>(t, i, 0, pair_of_e4m3(get<float>(t, i, 2), get<float>(t, i, 1))));
  if (to == "e5m2x2") return ONEPASS_STEP(set<u16>(t, i, 0, pair_of_e5m2(get<float>(t, i, 2), get<float>(t, i, 1))));
  if (to == "f32" && from == "f16") return ONEPASS_STEP(set<float>(t, i, 0, from_half(get<u16>(t, i, 1), false)));
  if (to == "f32" && from == "bf16") return ONEPASS_STEP(set<float>(t, i, 0, from_half(get<u16>(t, i, 1), true)));
  if (to == "bf16" && from == "f32") return ONEPASS_STEP(set<u16>(t, i, 0, to_half(get<float>(t, i, 1), true)));
  if (to == "f16" && from == "f32") return ONEPASS_STEP(set<u16>(t, i, 0, to_half(get<float>(t, i, 1), false)));
  if (to == "f16" && from == "f64")
    return ONEPASS_STEP(set<u16>(t, i, 0, std::bit_cast<u16>(static_cast<_Float16>(get<double>(t, i, 1)))));
  if (to == "bf16x2")
    return ONEPASS_STEP(
        set<u32>(t, i, 0, u32{to_half(get<float>(t, i, 1), true)} << 16 | to_half(get<float>(t, i, 2), true)));
  if (to == "f16x2")
    return ONEPASS_STEP(
        set<u32>(t, i, 0, u32{to_half(get<float>(t, i, 1), false)} << 16 | to_half(get<float>(t, i, 2), false)));
  return nullptr;
}

step find_conversion(const parts& of) {
  const std::string &to = of[of.size() - 2], &from = of.back();
  if (of[1] == "sat")
    return ONEPASS_STEP(const float a = get<float>(t, i, 1); set<float>(t, i, 0, a > 0 ? std::fmin(a, 1.0f) : 0.0f));
  if (const step half = find_half_conversion(to, from)) return half;
  return with_type(from, [&](auto from_zero) {
    using From = decltype(from_zero);
    return with_type(to, [](auto to_zero) -> step {
      using To = decltype(to_zero);
      if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>)
        return ONEPASS_STEP(set<To>(t, i, 0, truncated<To>(get<From>(t, i, 1))));
      else return ONEPASS_STEP(set<To>(t, i, 0, static_cast<To>(get<From>(t, i, 1))));
    });
  });
}

u32 permuted(u32 a, u32 b, u32 selector) {
  const u64 bytes = u64{b} << 32 | a;
  u32 result = 0;
  for (int k = 0; k < 4; ++k) {
    const u32 which = selector >> 4 * k & 15;
    u32 byte = static_cast<u32>(bytes >> 8 * (which & 7)) & 255;
    if (which & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * k;
  }
  return result;
}

u32 with_field(u32 a, u32 b, u32 at, u32 length) {
  const u32 mask = static_cast<u32>((u64{1} << std::min(length, 32u)) - 1);
  return at > 31 ? b : (b & ~(mask << at)) | (a & mask) << at;
}

// Of several narrow registers one wide one, or the other way round.
template <class Wide, int kParts>
step find_pack(bool opens) {
  constexpr int kBits = 8 * sizeof(Wide) / kParts;
  if (opens)
    return ONEPASS_STEP(const Wide from = get<Wide>(t, i, kParts); for (std::size_t k = 0; k < kParts; ++k)
                            set<u64>(t, i, k, from >> kBits * k & ((u64{1} << kBits) - 1)));
  return ONEPASS_STEP(Wide to = 0; for (std::size_t k = 0; k < kParts; ++k) to |=
                                   (get<Wide>(t, i, 1 + k) & static_cast<Wide>((u64{1} << kBits) - 1)) << kBits * k;
                      set<Wide>(t, i, 0, to));
}

step find_move(const std::string& type, const instruction& i) {
  if (i.of.size() == 2)
    return with_type(type, [](auto zero) -> step {
      using T = decltype(zero);
      return ONEPASS_STEP(set<T>(t, i, 0, static_cast<T>(get<T>(t, i, 1) + static_cast<T>(i.of[1].offset))));
    });
  if (type == "b32" && i.of.size() == 3) return find_pack<u32, 2>(i.opens);
  if (type == "b64" && i.of.size() == 3) return find_pack<u64, 2>(i.opens);
  if (type == "b64" && i.of.size() == 5) return find_pack<u64, 4>(i.opens);
  return nullptr;
}

step find_bits(const parts& of) {
  if (of[0] == "prmt")
    return ONEPASS_STEP(set<u32>(t, i, 0, permuted(get<u32>(t, i, 1), get<u32>(t, i, 2), get<u32>(t, i, 3))));
  if (of[0] == "bfi" && of[1] == "b32")
    return ONEPASS_STEP(set<u32>(
        t, i, 0, with_field(get<u32>(t, i, 1), get<u32>(t, i, 2), get<u32>(t, i, 3) & 255, get<u32>(t, i, 4) & 255)));
  if (of[0] == "shf") {
    if (of[1] == "r" && of[2] == "wrap")
      return ONEPASS_STEP(set<u32>(
          t, i, 0, static_cast<u32>((u64{get<u32>(t, i, 2)} << 32 | get<u32>(t, i, 1)) >> (get<u32>(t, i, 3) & 31))));
    if (of[1] == "l" && of[2] == "wrap")
      return ONEPASS_STEP(set<u32>(
          t, i, 0,
          static_cast<u32>((u64{get<u32>(t, i, 2)} << 32 | get<u32>(t, i, 1)) << (get<u32>(t, i, 3) & 31) >> 32)));
  }
  return nullptr;
}

step find(const parts& of, const instruction& i) {
  const std::string &base = of[0], &type = of.back();
  if (base == "ret" || base == "exit") return ONEPASS_STEP((void)i; t.is = state::done);
  if (base == "call")  // of __assertfail, the one function that kernels call
    return ONEPASS_STEP((void)t; (void)i; throw std::runtime_error("emulator: an assertion of the kernel failed"));
  if (base == "st" && of[1] == "param") return ONEPASS_STEP((void)t; (void)i);
  if (base == "bra") return ONEPASS_STEP(t.at = i.target);
  if (base == "mov") return find_move(type, i);
  if (base == "cvta") return ONEPASS_STEP(set<u64>(t, i, 0, get<u64>(t, i, 1)));
  if (base == "cvt") return find_conversion(of);
  if (base == "setp") return with_type(type, [&](auto zero) { return find_comparison<decltype(zero)>(of[1]); });
  if (const step bits = find_bits(of)) return bits;
  if (of.size() > 2)
    if (const step product = find_product(base, of[1], type)) return product;
  if (has(of, "sat") || (has(of, "ftz") && base != "ex2" && base != "lg2" && base != "rcp")) return nullptr;
  if (const step function = find_function(base, type)) return function;
  return find_arithmetic(base, type, has(of, "NaN"));
}

}  // namespace

bool find_scalar(const parts& of, instruction& i) { return (i.run = find(of, i)) != nullptr; }

float from_half(std::uint16_t bits, bool is_bf16) {
  return is_bf16 ? std::bit_cast<float>(u32{bits} << 16) : static_cast<float>(std::bit_cast<_Float16>(bits));
}
std::uint16_t to_half(float x, bool is_bf16) {
  if (!is_bf16) return std::bit_cast<u16>(static_cast<_Float16>(x));
  if (std::isnan(x)) return 0x7fff;
  const u32 bits = std::bit_cast<u32>(x);
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace onepass::emulator
