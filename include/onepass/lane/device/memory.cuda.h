// A CUDA lane in memory: storage types, loads and stores that suit its alignment, copies to shared memory, and the
// order of one kernel behind another. No CUDA header is needed: conversions are single PTX instructions.
#pragma once

#include "onepass/lane/cuda.h"

ONEPASS_BEGIN

template <dtype D>
struct stored;
#define ONEPASS_STORED(name, torch_name, scalar_type, storage) \
  template <>                                                  \
  struct stored<dtype::name> {                                 \
    using type = storage;                                      \
  };
ONEPASS_DTYPES(ONEPASS_STORED)
#undef ONEPASS_STORED

template <dtype D, class T>
ONEPASS_FUNCTION T from_storage(typename stored<D>::type s) {
  if constexpr (D == dtype::bf16) {
    return static_cast<T>(__uint_as_float(static_cast<uint32>(s) << 16));
  } else if constexpr (D == dtype::f16) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(s));
    return static_cast<T>(x);
  } else if constexpr (D == dtype::boolean) {
    if constexpr (sizeof(T) == 4) return __uint_as_float(s);  // not zero where it is true: all that masks ask
    else return s ? T(1) : T(0);
  } else {
    return static_cast<T>(s);
  }
}

// A code of at most the largest number that has one: the nearest, ties to even; NaN is NaN, and of int8 0.
template <dtype D>
ONEPASS_FUNCTION uint32 code_of(float x) {
  if constexpr (D == dtype::i8) {  // the adder rounds, and leaves the integer in the low bits
    return x == x ? __float_as_uint(x + 12582912.0f) & 0xff : 0;
  } else {
    constexpr bool kWide = D == dtype::f8e5m2;  // of exponents: two bits of mantissa, else three
    constexpr int kDropped = kWide ? 21 : 20;
    constexpr float kHalf = kWide ? 128.0f : 16384.0f;  // beside which a denormal code is the low bits
    const float magnitude = fabsf(x);
    const uint32 bits = __float_as_uint(magnitude), sign = __float_as_uint(x) >> 24 & 0x80;
    const uint32 odd = bits >> kDropped & 1;
    const uint32 normal = (bits + odd + ((1u << (kDropped - 1)) - 1) >> kDropped) - (kWide ? 112u << 2 : 120u << 3);
    const uint32 denormal = __float_as_uint(magnitude + kHalf) - __float_as_uint(kHalf);
    const uint32 code = magnitude < (kWide ? 0x1p-14f : 0x1p-6f) ? denormal : normal;
    return x == x ? code | sign : 0x7f;
  }
}

// Two codes; where saturates(D) of any numbers.
template <dtype D>
ONEPASS_FUNCTION uint32 pair_of_codes(float low, float high) {
  if constexpr (saturates(D)) {
    uint16 both;
    if constexpr (D == dtype::f8e4m3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
  }
  return code_of<D>(low) | code_of<D>(high) << 8;
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
  } else if constexpr (is_code(D)) {
    return static_cast<typename stored<D>::type>(pair_of_codes<D>(static_cast<float>(x), 0.0f));
  } else {
    return static_cast<typename stored<D>::type>(x);
  }
}

// Two 16-bit elements in one instruction.
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

// From global memory that this thread alone writes, when it is done with what it loads: loads may pass stores.
ONEPASS_FUNCTION void load_own_word(uint4& to, uint64 at) {
  asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w) : "l"(at));
}
ONEPASS_FUNCTION void load_own_word(uint2& to, uint64 at) {
  asm("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(to.x), "=r"(to.y) : "l"(at));
}
ONEPASS_FUNCTION void load_own_word(uint32& to, uint64 at) { asm("ld.global.u32 %0, [%1];" : "=r"(to) : "l"(at)); }
ONEPASS_FUNCTION void load_own_word(uint16& to, uint64 at) { asm("ld.global.u16 %0, [%1];" : "=h"(to) : "l"(at)); }

// 16 bytes from shared memory, `shift` bytes (whole numbers of Size bytes) behind aligned ones.
template <int Size>
ONEPASS_FUNCTION void read_shifted(const void* aligned, int shift, uint32* bytes) {
  const auto* words = static_cast<const uint32*>(aligned) + shift / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) bytes[i] = Size < 4 ? __funnelshift_r(words[i], words[i + 1], (shift & 2) * 8) : words[i];
}

// V elements as they lie in memory, moved in accesses of at most E elements and 16 bytes. E divides the row and its
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
    uint32 pairs[V * size_of(D) < 4 ? 1 : V * size_of(D) / 4];  // of 16-bit elements; any four bytes
  };

  // From global memory that no one writes while the kernel runs: loads may pass stores.
  static ONEPASS_FUNCTION buffer load(const void* at, int count) {
    return load(at, count, [](const word* from) { return __ldg(from); });
  }
  // From memory that threads write.
  static ONEPASS_FUNCTION buffer load_written(const void* at, int count) {
    return load(at, count, [](const word* from) { return *from; });
  }
  static ONEPASS_FUNCTION buffer load_own(const void* at, int count) {
    return load(at, count, [](const word* from) {
      word loaded;
      load_own_word(loaded, __cvta_generic_to_global(from));
      return loaded;
    });
  }
  // As load, but behind the first `count` elements there may be anything. Where accesses would be small and many, they
  // come in the whole aligned 16 bytes that hold them.
  static ONEPASS_FUNCTION buffer load_windows(const void* at, int count) {
    if constexpr (kBytes == 16 || V * kSize % 16 != 0) {
      return load(at, count);
    } else {
      const int shift = shift_of(at), end = shift + count * kSize;
      const auto* from = reinterpret_cast<const uint4*>(static_cast<const char*>(at) - shift);
      uint32 piece[4 * (kWindows + 1)];
#pragma unroll
      for (int i = 0; i <= kWindows; ++i) {
        const uint4 whole = (i == 0 ? count > 0 : end > 16 * i) ? __ldg(from + i) : uint4{};
        piece[4 * i] = whole.x, piece[4 * i + 1] = whole.y, piece[4 * i + 2] = whole.z, piece[4 * i + 3] = whole.w;
      }
      shift_windows(piece, shift);
      buffer b;
#pragma unroll
      for (int i = 0; i < 4 * kWindows; ++i) b.pairs[i] = piece[i];
      return b;
    }
  }
  template <class T>
  static ONEPASS_FUNCTION pack<T, V> numbers_of(buffer b) {
    pack<T, V> result;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if constexpr (D == dtype::boolean && sizeof(T) == 4 && V % 4 == 0)  // as from_storage, but in one instruction
        result.v[i] = __uint_as_float(b.pairs[i / 4] & 0xffu << i % 4 * 8);
      else if constexpr (D == dtype::bf16 && sizeof(T) == 4 && V % 2 == 0)
        result.v[i] = __uint_as_float(i % 2 == 0 ? b.pairs[i / 2] << 16 : b.pairs[i / 2] & 0xffff0000u);
      else result.v[i] = from_storage<D, T>(b.numbers[i]);
    }
    return result;
  }

  // Into shared memory: a lane, or, where one access has less of it, the whole aligned 16 bytes that it begins in.
  // The data are there after wait_for_copy_groups, for the thread that asked. `left`: how many elements are from the
  // lane's first to the row's end, which may be before it.
  static ONEPASS_FUNCTION void copy(void* to, const void* at, int left) {
    static_assert(V * kSize == 16 || kWhole, "copies are of tensors as wide as x");
    const int shift = kWhole ? 0 : shift_of(at);
    if (!kWhole && left * kSize + shift <= 0) return;
    const auto target = static_cast<uint32>(__cvta_generic_to_shared(to));
    const char* from = static_cast<const char*>(at) - shift;
    // What was read from the place before is read before.
    if constexpr (V * kSize == 16)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(from), "n"(kBytes) : "memory");
  }
  // A lane, its windows one behind the other in shared memory; `at`: its address in global memory, modulo 16. Behind
  // the row's end there may be anything.
  static ONEPASS_FUNCTION buffer load_copied(const void* windows, uint32 at) {
    if constexpr (kWhole) {
      return load_written(windows, V);
    } else {
      buffer b;
      read_shifted<kSize>(windows, static_cast<int>(at & (16 - kBytes)), b.pairs);
      return b;
    }
  }

  template <class T>
  static ONEPASS_FUNCTION buffer buffer_of(pack<T, V> value) {
    buffer b;
    if constexpr (size_of(D) == 2 && sizeof(T) == 4 && V % 2 == 0) {
#pragma unroll
      for (int i = 0; i < V / 2; ++i) b.pairs[i] = pair_to_storage<D>(value.v[2 * i], value.v[2 * i + 1]);
    } else if constexpr (is_code(D) && V % 4 == 0) {
      const auto pair = [&](int i) {
        return pair_of_codes<D>(static_cast<float>(value.v[i]), static_cast<float>(value.v[i + 1]));
      };
#pragma unroll
      for (int i = 0; i < V / 4; ++i) b.pairs[i] = pair(4 * i) | pair(4 * i + 2) << 16;
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) b.numbers[i] = to_storage<D>(value.v[i]);
    }
    return b;
  }
  // A lane of 16 bytes.
  static ONEPASS_FUNCTION uint4 whole(buffer b) {
    static_assert(V * kSize == 16);
    return {b.pairs[0], b.pairs[1], b.pairs[2], b.pairs[3]};
  }
  template <class T>
  static ONEPASS_FUNCTION void store(void* at, pack<T, V> value, int count) {
    const buffer b = buffer_of(value);
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      if (i * kNumbers < count) static_cast<word*>(at)[i] = b.words[i];
    }
  }

 private:
  static constexpr int kSize = size_of(D), kWindows = V * kSize / 16;
  static constexpr bool kWhole = kBytes == V * kSize;  // an access is a lane
  // Moves what is `shift` bytes behind the pieces' start there.
  static ONEPASS_FUNCTION void shift_windows(uint32 (&piece)[4 * (kWindows + 1)], int shift) {
#pragma unroll
    for (int i = 0; i < 4 * kWindows + 2; ++i) piece[i] = (shift & 8) != 0 ? piece[i + 2] : piece[i];
#pragma unroll
    for (int i = 0; i < 4 * kWindows + 1; ++i) piece[i] = (shift & 4) != 0 ? piece[i + 1] : piece[i];
    if constexpr (kSize == 2) {
#pragma unroll
      for (int i = 0; i < 4 * kWindows; ++i) piece[i] = __funnelshift_r(piece[i], piece[i + 1], (shift & 2) * 8);
    }
  }
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

// Numbers behind the first `at` of a tensor whose dtype is known when the kernel runs.
template <int E, class T, int N>
ONEPASS_FUNCTION void store_as(dtype type, void* data, int64 at, pack<T, N> values, int count) {
  switch (type) {
    case dtype::f32: return memory<dtype::f32, N, E>::store(static_cast<float*>(data) + at, values, count);
    case dtype::f64: return memory<dtype::f64, N, E>::store(static_cast<double*>(data) + at, values, count);
    case dtype::bf16: return memory<dtype::bf16, N, E>::store(static_cast<uint16*>(data) + at, values, count);
    default: return memory<dtype::f16, N, E>::store(static_cast<uint16*>(data) + at, values, count);
  }
}

// V elements from `at` on of a tensor that begins at 16 bytes, all of them there; `at` is a multiple of V.
template <int V>
ONEPASS_FUNCTION pack<float, V> load_as(dtype type, const void* data, int64 at) {
  const auto of = [&](auto memory_of, const auto* numbers) {
    return decltype(memory_of)::template numbers_of<float>(decltype(memory_of)::load(numbers + at, V));
  };
  switch (type) {
    case dtype::f32: return of(memory<dtype::f32, V, V>(), static_cast<const float*>(data));
    case dtype::f64: return of(memory<dtype::f64, V, V>(), static_cast<const double*>(data));
    case dtype::bf16: return of(memory<dtype::bf16, V, V>(), static_cast<const uint16*>(data));
    default: return of(memory<dtype::f16, V, V>(), static_cast<const uint16*>(data));
  }
}

// A run of elements of Size bytes from shared memory, where it begins at 16 bytes, by all of `Threads` threads, of
// which this is number `thread`: whole aligned 16 bytes, Lanes a thread at most, and the few elements before and behind
// them one by one. Up to 4 bytes behind the run are read.
template <int Size, int Lanes, int Threads>
ONEPASS_FUNCTION void store_run(void* to, const void* from, int count, int thread) {
  using number = typename access<Size>::type;
  constexpr int V = 16 / Size;
  auto* target = static_cast<number*>(to);
  const auto* source = static_cast<const number*>(from);
  const int aligned = static_cast<int>(-reinterpret_cast<uint64>(to) & 15) / Size;
  const int head = aligned < count ? aligned : count, whole = (count - head) / V;
  auto* windows = reinterpret_cast<uint4*>(target + head) + thread;
#pragma unroll
  for (int k = 0; k < Lanes; ++k) {
    if (k * Threads + thread >= whole) continue;
    uint32 bytes[4];
    read_shifted<Size>(static_cast<const uint4*>(from) + (k * Threads + thread), head * Size, bytes);
    windows[k * Threads] = {bytes[0], bytes[1], bytes[2], bytes[3]};
  }
  const int tail = head + whole * V;
#pragma unroll
  for (int first = 0; first < 2 * V; first += Threads) {  // an end has fewer than V elements
    const int i = first + thread, at = i < V ? i : tail + i - V;
    if (at < (i < V ? head : count) && i < 2 * V) target[at] = source[at];
  }
}

// Into the L2 cache.
ONEPASS_FUNCTION void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// 16 bytes into shared memory, or as many zeros.
ONEPASS_FUNCTION void copy_or_clear(char* to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint32>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(present ? 16 : 0)
               : "memory");
}

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

ONEPASS_END
