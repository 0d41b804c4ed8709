// Between a lane and memory: numbers stored as f32, f64, bf16, f16 or bool, the type known at run time only.
// A row's type does not change along the row, so the branches below are predicted and cost next to nothing.
#if defined(ONEPASS_LANE_CPU_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_LANE_CPU_H_
#undef ONEPASS_LANE_CPU_H_
#else
#define ONEPASS_LANE_CPU_H_
#endif

#include "onepass/lane/convert.h"

ONEPASS_BEGIN
namespace storage {

// --- whole registers of D's elements at any address; D is a tag of float.
template <class D>
ONEPASS_FUNCTION bits_16<D> load_16(D, const char* at) {
  return hn::LoadU(hn::Rebind<uint16_t, D>(), reinterpret_cast<const uint16_t*>(at));
}

template <class D>
ONEPASS_FUNCTION vector<D> load_boolean(D d, const char* at) {
  const hn::Rebind<uint8_t, D> d8;
  return hn::ConvertTo(d, hn::PromoteTo(hn::Rebind<int32_t, D>(), hn::LoadU(d8, reinterpret_cast<const uint8_t*>(at))));
}

// As many f64 as D has elements: two registers of them, one on the scalar target. Rare, so out of line.
template <class D>
HWY_NOINLINE vector<D> load_f64(D d, const char* at) {
  const hn::ScalableTag<double> wide;
  const double* numbers = reinterpret_cast<const double*>(at);
  const auto low = narrow(wide, hn::LoadU(wide, numbers));
  if constexpr (hn::MaxLanes(d) == hn::MaxLanes(wide)) return low;  // half a lane, or the scalar target's
#if HWY_TARGET != HWY_SCALAR
  else return hn::Combine(d, narrow(wide, hn::LoadU(wide, numbers + hn::MaxLanes(wide))), low);
#endif
}

// Any type but f64.
template <class D>
ONEPASS_FUNCTION vector<D> load_f32(D d, const char* at, dtype type) {
  if (type == dtype::f32) return hn::LoadU(d, reinterpret_cast<const float*>(at));
  if (type == dtype::bf16) return from_bf16(d, load_16(d, at));
  if (type == dtype::f16) return from_f16(d, load_16(d, at));
  return load_boolean(d, at);
}

// bf16 or f16.
template <class D>
ONEPASS_FUNCTION bits_16<D> to_16(D d, vector<D> value, dtype type) {
  return type == dtype::bf16 ? to_bf16(d, value) : to_f16(d, value);
}

// Fewer bytes than a register's storage, never touching the one behind the last.
ONEPASS_FUNCTION void copy_bytes(const char* from, char* to, size_t bytes) {
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  const hn::ScalableTag<uint8_t> d;
  for (size_t done = 0; done < bytes; done += 64) {
    const auto present = hn::FirstN(d, bytes - done < 64 ? bytes - done : 64);
    const auto v = hn::MaskedLoad(present, d, reinterpret_cast<const uint8_t*>(from + done));
    hn::BlendedStore(v, present, d, reinterpret_cast<uint8_t*>(to + done));
  }
#else
  size_t done = 0;
  for (; done + 8 <= bytes; done += 8) hwy::CopyBytes<8>(from + done, to + done);
  if (bytes & 4) hwy::CopyBytes<4>(from + done, to + done);
  done += bytes & 4;
  if (bytes & 2) hwy::CopyBytes<2>(from + done, to + done);
  done += bytes & 2;
  if (bytes & 1) to[done] = from[done];
#endif
}

// Writes a register, or half of one, to `at`; put writes one hardware register.
template <class L, class Put>
ONEPASS_FUNCTION void write(char* at, dtype type, L value, const Put& put) {
  const typename L::tag d;
  if constexpr (sizeof(typename L::scalar) == 4) {
    if (HWY_LIKELY(type == dtype::f32)) {
      put(value.raw, d, reinterpret_cast<float*>(at));
    } else if (type == dtype::f64) {
      const hn::ScalableTag<double> wide;
      double* to = reinterpret_cast<double*>(at);
      if constexpr (L::kLanes == hn::MaxLanes(wide)) {
        put(hn::PromoteTo(wide, value.raw), wide, to);
      } else {
#if HWY_TARGET != HWY_SCALAR
        const hn::Half<decltype(d)> half;
        put(hn::PromoteTo(wide, hn::LowerHalf(half, value.raw)), wide, to);
        put(hn::PromoteTo(wide, hn::UpperHalf(half, value.raw)), wide, to + L::kLanes / 2);
#endif
      }
    } else {
      put(to_16(d, value.raw, type), hn::Rebind<uint16_t, decltype(d)>(), reinterpret_cast<uint16_t*>(at));
    }
  } else {
    const hn::Rebind<float, decltype(d)> df;
    if (HWY_LIKELY(type == dtype::f64)) {
      put(value.raw, d, reinterpret_cast<double*>(at));
    } else if (type == dtype::f32) {
      put(narrow(d, value.raw), df, reinterpret_cast<float*>(at));
    } else {
      put(to_16(df, narrow_to_odd(d, value.raw), type), hn::Rebind<uint16_t, decltype(d)>(),
          reinterpret_cast<uint16_t*>(at));
    }
  }
}

struct streamed {
  template <class V, class D, class N>
  ONEPASS_FUNCTION void operator()(V v, D d, N* to) const {
    if constexpr (hn::MaxLanes(d) * sizeof(N) >= 16) hn::Stream(v, d, to);
    else hn::StoreU(v, d, to);  // there is no streaming store of 8 bytes or fewer
  }
};

}  // namespace storage

// Numbers column, column + 1, ... of a row whose first is at `row`.
template <class L>
ONEPASS_FUNCTION L load(const void* row, dtype type, int64 column) {
  const typename L::tag d;
  const char* at = static_cast<const char*>(row) + column * size_of(type);
  if constexpr (sizeof(typename L::scalar) == 4) {
    if (HWY_UNLIKELY(type == dtype::f64)) return L(storage::load_f64(d, at));
    return L(storage::load_f32(d, at, type));
  } else {
    if (HWY_LIKELY(type == dtype::f64)) return L(hn::LoadU(d, reinterpret_cast<const double*>(at)));
    return L(hn::PromoteTo(d, storage::load_f32(hn::Rebind<float, decltype(d)>(), at, type)));
  }
}

// The first element of the row in every lane.
template <class L>
ONEPASS_FUNCTION L broadcast(const void* row, dtype type) {
  using T = typename L::scalar;
  if (type == dtype::f32) return L(static_cast<T>(*static_cast<const float*>(row)));
  if (type == dtype::f64) return L(static_cast<T>(*static_cast<const double*>(row)));
  if (type == dtype::boolean) return L(static_cast<T>(*static_cast<const uint8*>(row)));
  const hn::Rebind<float, typename L::tag> df;
  const auto bits = hn::Set(hn::Rebind<uint16_t, typename L::tag>(), *static_cast<const uint16*>(row));
  const auto numbers = type == dtype::bf16 ? storage::from_bf16(df, bits) : storage::from_f16(df, bits);
  if constexpr (sizeof(T) == 4) return L(numbers);
  else return L(hn::PromoteTo(typename L::tag(), numbers));
}

// Rounded once, to nearest, ties to even. No tensor that a line writes is boolean.
template <class T>
ONEPASS_FUNCTION void store(void* row, dtype type, int64 column, vec<T> value) {
  storage::write(static_cast<char*>(row) + column * size_of(type), type, value,
                 [](auto v, auto d, auto* to) ONEPASS_LAMBDA { hn::StoreU(v, d, to); });
}

template <class L>
ONEPASS_FUNCTION void store(void* row, dtype type, int64 column, half_lane<L> value) {
  storage::write(static_cast<char*>(row) + column * size_of(type), type, value,
                 [](auto v, auto d, auto* to) ONEPASS_LAMBDA { hn::StoreU(v, d, to); });
}

// Ends of rows are rare and stay out of line: inlined at every operand, they would be most of a kernel's code.
namespace storage {
template <class L>
HWY_NOINLINE void load_partial_into(const void* row, dtype type, int64 column, int count, typename L::scalar* numbers) {
  alignas(64) char stored[L::kLanes * 8] = {};
  const int64 size = size_of(type);
  copy_bytes(static_cast<const char*>(row) + column * size, stored, static_cast<size_t>(count * size));
  store_lane(load<L>(stored, type, 0), numbers);
}
template <class L>
HWY_NOINLINE void store_partial_from(void* row, dtype type, int64 column, int count,
                                     const typename L::scalar* numbers) {
  alignas(64) char stored[L::kLanes * 8];
  const int64 size = size_of(type);
  store(stored, type, 0, load_lane<L>(numbers));
  copy_bytes(stored, static_cast<char*>(row) + column * size, static_cast<size_t>(count * size));
}
}  // namespace storage

// load where only `count` elements are left: reads no others, which are zero in the lane.
template <class L>
ONEPASS_FUNCTION L load_partial(const void* row, dtype type, int64 column, int count) {
  HWY_ALIGN typename L::scalar numbers[L::kLanes];
  storage::load_partial_into<L>(row, type, column, count, numbers);
  return load_lane<L>(numbers);
}

// store of the first `count` elements; writes no others.
template <class T>
ONEPASS_FUNCTION void store_partial(void* row, dtype type, int64 column, vec<T> value, int count) {
  HWY_ALIGN T numbers[vec<T>::kLanes];
  store_lane(value, numbers);
  storage::store_partial_from<vec<T>>(row, type, column, count, numbers);
}

// Past the caches: for results larger than they are. `column` is a multiple of the lanes and can_stream holds.
template <class T>
ONEPASS_FUNCTION void stream(void* row, dtype type, int64 column, vec<T> value) {
  storage::write(static_cast<char*>(row) + column * size_of(type), type, value, storage::streamed());
}
template <class L>
ONEPASS_FUNCTION void stream(void* row, dtype type, int64 column, half_lane<L> value) {
  storage::write(static_cast<char*>(row) + column * size_of(type), type, value, storage::streamed());
}
template <class T>
ONEPASS_FUNCTION void stream_lane(vec<T> value, T* at) {
  storage::streamed()(value.raw, hn::ScalableTag<T>(), at);
}
template <class L>
ONEPASS_FUNCTION bool can_stream(const void* row, dtype type) {
  constexpr uintptr_t kRegister = HWY_MAX_BYTES;
  const uintptr_t bytes = static_cast<uintptr_t>(L::kLanes) * static_cast<uintptr_t>(size_of(type));
  return bytes >= 16 && reinterpret_cast<uintptr_t>(row) % (bytes < kRegister ? bytes : kRegister) == 0;
}

namespace storage {
// Of values up to the largest that a code has, the nearest, ties to even; NaN is NaN, and of int8 0.
template <class D>
ONEPASS_FUNCTION hn::Vec<hn::Rebind<uint8_t, D>> to_codes(D d, vector<D> value, dtype type) {
  const hn::Rebind<uint32_t, D> du;
  const auto is_number = hn::RebindMask(du, hn::Eq(value, value));
  const auto narrow = [](auto codes) ONEPASS_LAMBDA {
    return hn::DemoteTo(hn::Rebind<uint8_t, D>(), hn::BitCast(hn::Rebind<int32_t, D>(), codes));
  };
  if (type == dtype::i8) {  // the adder rounds, and leaves the integer in the low bits
    const auto sum = hn::BitCast(du, hn::Add(value, hn::Set(d, 12582912.0f)));
    return narrow(hn::IfThenElseZero(is_number, hn::And(sum, hn::Set(du, 0xffu))));
  }
  const bool wide = type == dtype::f8e5m2;  // of exponents: two bits of mantissa, else three
  const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(du, value)), hn::Set(du, 0x80u));
  const auto magnitude = hn::Abs(value);
  const auto bits = hn::BitCast(du, magnitude);
  const auto half = hn::Set(d, wide ? 128.0f : 16384.0f);  // beside which a denormal code is the low bits
  const auto denormal = hn::Sub(hn::BitCast(du, hn::Add(magnitude, half)), hn::BitCast(du, half));
  const auto kept = [&](auto b) ONEPASS_LAMBDA { return wide ? hn::ShiftRight<21>(b) : hn::ShiftRight<20>(b); };
  const auto odd = hn::And(kept(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, wide ? 0xfffffu : 0x7ffffu)));
  const auto normal = hn::Sub(kept(rounded), hn::Set(du, wide ? 112u << 2 : 120u << 3));
  const auto is_small = hn::RebindMask(du, hn::Lt(magnitude, hn::Set(d, wide ? 0x1p-14f : 0x1p-6f)));
  const auto code = hn::Or(sign, hn::IfThenElse(is_small, denormal, normal));
  return narrow(hn::IfThenElse(is_number, code, hn::Set(du, 0x7fu)));
}
}  // namespace storage

template <class T>
ONEPASS_FUNCTION void store_codes(void* row, dtype type, int64 column, vec<T> value, int count) {
  const hn::ScalableTag<T> d;
  char* at = static_cast<char*>(row) + column;
  const auto put = [&](auto df, auto narrowed) ONEPASS_LAMBDA {
    const hn::Rebind<uint8_t, decltype(df)> d8;
    const auto codes = storage::to_codes(df, narrowed, type);
    if (HWY_LIKELY(count == vec<T>::kLanes)) return hn::StoreU(codes, d8, reinterpret_cast<uint8_t*>(at));
    HWY_ALIGN uint8_t some[vec<T>::kLanes];
    hn::StoreU(codes, d8, some);
    storage::copy_bytes(reinterpret_cast<const char*>(some), at, static_cast<size_t>(count));
  };
  if constexpr (sizeof(T) == 4) put(d, value.raw);
  else put(hn::Rebind<float, decltype(d)>(), storage::narrow(d, value.raw));
}

// Adds the first `count` elements to doubles, or puts them there.
template <class T>
ONEPASS_FUNCTION void add_to_doubles(vec<T> value, double* to, int count, bool put) {
  using L = vec<T>;
  HWY_ALIGN double wide[L::kLanes];
  store(wide, dtype::f64, 0, value);
  if (put) {
    for (int i = 0; i < count; ++i) to[i] = wide[i];
  } else {
    for (int i = 0; i < count; ++i) to[i] += wide[i];
  }
}

// The value as `store` then `load` would give it back.
template <class T>
ONEPASS_FUNCTION vec<T> rounded(vec<T> value, dtype type) {
  const hn::ScalableTag<T> d;
  if (type == dtype::f64 || (sizeof(T) == 4 && type == dtype::f32)) return value;
  if constexpr (sizeof(T) == 4) {
    const hn::Rebind<uint32_t, decltype(d)> du;
    if (type == dtype::f16) return vec<T>(storage::from_f16(d, storage::to_f16(d, value.raw)));
    return vec<T>(hn::BitCast(d, hn::And(storage::round_to_bf16(d, value.raw), hn::Set(du, 0xffff0000u))));
  } else {
    const hn::Rebind<float, decltype(d)> df;
    if (type == dtype::f32) return vec<T>(hn::PromoteTo(d, storage::narrow(d, value.raw)));
    const auto odd = storage::narrow_to_odd(d, value.raw);
    const auto numbers = type == dtype::bf16 ? storage::from_bf16(df, storage::to_bf16(df, odd))
                                             : storage::from_f16(df, storage::to_f16(df, odd));
    return vec<T>(hn::PromoteTo(d, numbers));
  }
}

ONEPASS_END
#endif
