// The scalar types that every layer agrees on; free of any library, so that NVRTC can read it.
#pragma once

namespace onepass {

using int64 = long long;
using uint64 = unsigned long long;
using uint32 = unsigned int;
using uint16 = unsigned short;
using uint8 = unsigned char;
using int8 = signed char;

// NVRTC knows neither <limits> nor the compiler's built-in infinity.
inline constexpr double kInfinity = __builtin_bit_cast(double, 0x7ff0000000000000ull);

// How a number is stored: the dtype, PyTorch's name of it, its name among c10's ScalarTypes, and what holds a number.
#define ONEPASS_DTYPES(of)                                                                             \
  of(f32, float32, Float, float) of(f64, float64, Double, double) of(bf16, bfloat16, BFloat16, uint16) \
      of(f16, float16, Half, uint16) of(boolean, bool, Bool, uint8) of(i64, int64, Long, int64)        \
          of(i32, int32, Int, int) of(f8e4m3, float8_e4m3fn, Float8_e4m3fn, uint8)                     \
              of(f8e5m2, float8_e5m2, Float8_e5m2, uint8) of(i8, int8, Char, int8)

inline constexpr int kShortBits = 11;  // significant ones of float16; bfloat16 has 8

// Arithmetic is float, or double where x is f64.
#define ONEPASS_ENUMERATOR(name, torch_name, scalar_type, storage) , name
enum class dtype : int { none ONEPASS_DTYPES(ONEPASS_ENUMERATOR) };
#undef ONEPASS_ENUMERATOR

// Written out: kernels on the CPU ask at run time, the likely types first.
constexpr int size_of(dtype type) {
  if (type == dtype::f64 || type == dtype::i64) return 8;
  if (type == dtype::f32 || type == dtype::i32) return 4;
  return type == dtype::boolean || type >= dtype::f8e4m3 ? 1 : type == dtype::none ? 0 : 2;
}
#define ONEPASS_CHECK_SIZE(name, torch_name, scalar_type, storage) \
  static_assert(size_of(dtype::name) == sizeof(storage));
ONEPASS_DTYPES(ONEPASS_CHECK_SIZE)
#undef ONEPASS_CHECK_SIZE

// What `quantize` stores a value as, beside a scale; and the largest number of each.
constexpr bool is_code(dtype type) { return type >= dtype::f8e4m3; }
constexpr double largest_code(dtype type) {
  return type == dtype::f8e4m3 ? 448 : type == dtype::f8e5m2 ? 57344 : type == dtype::i8 ? 127 : 0;
}

// Whether a store of a number as such a code saturates: then no word need do it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool saturates(dtype type) { return is_code(type) && type != dtype::i8; }
#else
constexpr bool saturates(dtype) { return false; }
#endif

constexpr bool is_integer(dtype type) { return type == dtype::i64 || type == dtype::i32; }
constexpr bool is_floating(dtype type) {  // arithmetic takes it
  return type != dtype::none && type != dtype::boolean && !is_integer(type) && !is_code(type);
}

// Of a result that is a row, of a line on x: x's dtype, or one of its own; float32 is float64 beside that.
constexpr dtype result_dtype(dtype x, dtype own) {
  return own == dtype::none || (own == dtype::f32 && x == dtype::f64) ? x : own;
}

constexpr const char* name_of(dtype type) {
#define ONEPASS_NAME(name, torch_name, scalar_type, storage) \
  if (type == dtype::name) return #name;
  ONEPASS_DTYPES(ONEPASS_NAME)
#undef ONEPASS_NAME
  return "none";
}
constexpr const char* torch_name_of(dtype type) {
#define ONEPASS_NAME(name, torch_name, scalar_type, storage) \
  if (type == dtype::name) return #torch_name;
  ONEPASS_DTYPES(ONEPASS_NAME)
#undef ONEPASS_NAME
  return "none";
}

}  // namespace onepass
