// The scalar types that every layer agrees on; free of any library, so that NVRTC can read it.
#pragma once

namespace onepass {

using int64 = long long;
using uint64 = unsigned long long;
using uint32 = unsigned int;
using uint16 = unsigned short;
using uint8 = unsigned char;

// NVRTC knows neither <limits> nor the compiler's built-in infinity.
inline constexpr double kInfinity = __builtin_bit_cast(double, 0x7ff0000000000000ull);

// How a number is stored. Arithmetic is float, or double where x is f64.
enum class dtype : int { none, f32, f64, bf16, f16, boolean };

inline constexpr int kShortBits = 11;  // significant ones of float16; bfloat16 has 8

constexpr int size_of(dtype type) {
  return type == dtype::f64 ? 8 : type == dtype::f32 ? 4 : type == dtype::boolean ? 1 : type == dtype::none ? 0 : 2;
}

}  // namespace onepass
