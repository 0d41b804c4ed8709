// Loads, stores and roundings of every storage type: all 16-bit patterns, every tie, ends of memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/lane/storage_test.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <hwy/cache_control.h>

#include "onepass/lane/cpu.h"
#include "tests/lane/targets.h"

ONEPASS_BEGIN

// `count` numbers the way a kernel goes along a row: whole registers, then what is left.
template <class T>
void read_row(const void* row, dtype type, int64 count, T* to) {
  using L = vec<T>;
  int64 c = 0;
  for (; c + lanes<L>() <= count; c += lanes<L>()) store_lane(load<L>(row, type, c), to + c);
  if (c == count) return;
  T last[lanes<L>()];
  store_lane(load_partial<L>(row, type, c, static_cast<int>(count - c)), last);
  for (int64 i = 0; i < lanes<L>(); ++i) {
    if (c + i < count) to[c + i] = last[i];
    else if (last[i] != T(0)) to[0] = T(-12345);  // lanes past the end are to be zero
  }
}
template <class T>
void write_row(const T* from, dtype type, int64 count, bool past_caches, void* row) {
  using L = vec<T>;
  int64 c = 0;
  for (; c + lanes<L>() <= count; c += lanes<L>()) {
    if (past_caches && can_stream<L>(row, type)) stream(row, type, c, load_lane<L>(from + c));
    else store(row, type, c, load_lane<L>(from + c));
  }
  if (c == count) return;
  T last[lanes<L>()] = {};
  for (int64 i = c; i < count; ++i) last[i - c] = from[i];
  store_partial(row, type, c, load_lane<L>(last), static_cast<int>(count - c));
  if (past_caches) hwy::FlushStream();
}
// count is a multiple of every target's lanes.
template <class T>
void round_row(const T* from, dtype type, int64 count, T* to) {
  using L = vec<T>;
  for (int64 c = 0; c < count; c += lanes<L>()) store_lane(rounded(load_lane<L>(from + c), type), to + c);
}
template <class T>
void broadcast_row(const void* row, dtype type, T* to) {
  store_lane(broadcast<vec<T>>(row, type), to);
}

void read_f32(const void* row, dtype type, int64 count, float* to) { read_row(row, type, count, to); }
void read_f64(const void* row, dtype type, int64 count, double* to) { read_row(row, type, count, to); }
void write_f32(const float* from, dtype type, int64 count, bool past_caches, void* row) {
  write_row(from, type, count, past_caches, row);
}
void write_f64(const double* from, dtype type, int64 count, bool past_caches, void* row) {
  write_row(from, type, count, past_caches, row);
}
void round_f32(const float* from, dtype type, int64 count, float* to) { round_row(from, type, count, to); }
void round_f64(const double* from, dtype type, int64 count, double* to) { round_row(from, type, count, to); }
void broadcast_f32(const void* row, dtype type, float* to) { broadcast_row(row, type, to); }
void broadcast_f64(const void* row, dtype type, double* to) { broadcast_row(row, type, to); }

ONEPASS_END

#if HWY_ONCE
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace onepass {
HWY_EXPORT(read_f32);
HWY_EXPORT(read_f64);
HWY_EXPORT(write_f32);
HWY_EXPORT(write_f64);
HWY_EXPORT(round_f32);
HWY_EXPORT(round_f64);
HWY_EXPORT(broadcast_f32);
HWY_EXPORT(broadcast_f64);

namespace test {
namespace {

constexpr int kMostLanes = 16;
constexpr dtype kNumbers[] = {dtype::f32, dtype::f64, dtype::bf16, dtype::f16};

void read(const void* row, dtype type, int64 count, float* to) { HWY_DYNAMIC_DISPATCH(read_f32)(row, type, count, to); }
void read(const void* row, dtype type, int64 count, double* to) {
  HWY_DYNAMIC_DISPATCH(read_f64)(row, type, count, to);
}
void write(const float* from, dtype type, int64 count, void* row, bool past_caches = false) {
  HWY_DYNAMIC_DISPATCH(write_f32)(from, type, count, past_caches, row);
}
void write(const double* from, dtype type, int64 count, void* row, bool past_caches = false) {
  HWY_DYNAMIC_DISPATCH(write_f64)(from, type, count, past_caches, row);
}
void round(const float* from, dtype type, int64 count, float* to) {
  HWY_DYNAMIC_DISPATCH(round_f32)(from, type, count, to);
}
void round(const double* from, dtype type, int64 count, double* to) {
  HWY_DYNAMIC_DISPATCH(round_f64)(from, type, count, to);
}
void spread(const void* row, dtype type, float* to) { HWY_DYNAMIC_DISPATCH(broadcast_f32)(row, type, to); }
void spread(const void* row, dtype type, double* to) { HWY_DYNAMIC_DISPATCH(broadcast_f64)(row, type, to); }

// A binary format by its definition: significant bits and smallest exponent of a normal number.
struct format {
  dtype type;
  int precision, smallest_exponent;
  double largest;
};
constexpr format kFormats[] = {{dtype::bf16, 8, -126, 0x1.fep127}, {dtype::f16, 11, -14, 65504.0}};

double decode(const format& f, uint16_t bits) {
  const int mantissa_bits = f.precision - 1;
  const int exponent = (bits & 0x7fff) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << (15 - mantissa_bits)) - 1) {
    return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  const int scale = f.smallest_exponent - mantissa_bits;
  if (exponent == 0) return sign * std::ldexp(mantissa, scale);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), scale + exponent - 1);
}

// To nearest, ties to even, by the definition.
double reference(const format& f, double x) {
  if (!std::isfinite(x)) return x;
  const int exponent = x == 0 ? f.smallest_exponent : std::max(std::ilogb(x), f.smallest_exponent);
  const double unit = std::ldexp(1.0, exponent - f.precision + 1);
  const double result = std::nearbyint(x / unit) * unit;
  if (std::fabs(result) > f.largest) return std::copysign(std::numeric_limits<double>::infinity(), x);
  return std::copysign(result, x);
}

bool same(double a, double b) { return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b); }

// Every number of the format, every tie between two, the numbers of type T beside each tie, and random ones.
template <class T>
std::vector<T> hard_to_round(const format& f) {
  std::vector<T> numbers;
  for (int bits = 0; bits < 0x10000; ++bits) {
    const double a = decode(f, static_cast<uint16_t>(bits));
    numbers.push_back(static_cast<T>(a));
    if (!std::isfinite(a)) continue;
    const double b = decode(f, static_cast<uint16_t>(bits + 1));
    const double last_step = std::fabs(a - decode(f, static_cast<uint16_t>(bits - 1)));
    const double above = std::isfinite(b) ? b : std::copysign(std::fabs(a) + last_step, a);  // where infinity begins
    const T tie = static_cast<T>(a / 2 + above / 2);
    for (const T to : {-std::numeric_limits<T>::infinity(), std::numeric_limits<T>::infinity()}) {
      numbers.push_back(std::nextafter(tie, to));
    }
    numbers.push_back(tie);
  }
  std::mt19937_64 random(1);
  for (int i = 0; i < 1 << 20; ++i) {
    const uint64_t bits = random();
    T number;
    std::memcpy(&number, &bits, sizeof(T));
    numbers.push_back(number);
  }
  numbers.resize(numbers.size() / kMostLanes * kMostLanes);
  return numbers;
}

template <class T>
void expect_rounding(const format& f) {
  const std::vector<T> numbers = hard_to_round<T>(f);
  const int64 count = static_cast<int64>(numbers.size());
  std::vector<uint16_t> stored(numbers.size());
  std::vector<T> back(numbers.size()), rounded(numbers.size());
  write(numbers.data(), f.type, count, stored.data());
  read(stored.data(), f.type, count, back.data());
  round(numbers.data(), f.type, count, rounded.data());
  int64 wrong = 0;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const double expected = reference(f, static_cast<double>(numbers[i]));
    const bool right = same(decode(f, stored[i]), expected) && same(static_cast<double>(back[i]), expected) &&
                       same(static_cast<double>(rounded[i]), expected);
    if (!right && wrong++ < 5) {
      ADD_FAILURE() << numbers[i] << " stored as " << decode(f, stored[i]) << ", read as " << back[i] << ", rounded to "
                    << rounded[i] << ", expected " << expected;
    }
  }
  EXPECT_EQ(wrong, 0);
}

// `bytes` bytes that end where readable memory ends.
class guarded {
 public:
  explicit guarded(size_t bytes) : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    map_ = static_cast<char*>(mmap(nullptr, 2 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (map_ == MAP_FAILED || mprotect(map_ + page_, page_, PROT_NONE) != 0) std::abort();
    data_ = map_ + page_ - bytes;
  }
  ~guarded() { munmap(map_, 2 * page_); }
  guarded(const guarded&) = delete;
  guarded& operator=(const guarded&) = delete;
  char* data() const { return data_; }

 private:
  size_t page_;
  char *map_, *data_;
};

template <class T>
void expect_exact_ends(dtype type) {
  for (int64 count = 1; count <= 3 * kMostLanes; ++count) {
    const size_t size = static_cast<size_t>(size_of(type));
    const guarded memory(static_cast<size_t>(count) * size);
    std::vector<T> numbers(static_cast<size_t>(count)), back(numbers.size());
    for (int64 i = 0; i < count; ++i) numbers[static_cast<size_t>(i)] = static_cast<T>(i + 1);
    std::memset(memory.data() - 64, 0x5a, 64);
    write(numbers.data(), type, count, memory.data());
    for (int i = 1; i <= 64; ++i) ASSERT_EQ(memory.data()[-i], 0x5a);
    read(memory.data(), type, count, back.data());
    ASSERT_EQ(back, numbers) << "count " << count;
    // The same with memory behind: what follows must stay as it was.
    std::vector<char> row(static_cast<size_t>(count) * size + 64, 0x5a);
    write(numbers.data(), type, count, row.data());
    for (int i = 0; i < 64; ++i) ASSERT_EQ(row[static_cast<size_t>(count) * size + static_cast<size_t>(i)], 0x5a);
  }
}

class storage_test : public on_target {};
ONEPASS_ON_EVERY_TARGET(storage_test);

TEST_P(storage_test, reads_every_16_bit_pattern) {
  std::vector<uint16_t> patterns(0x10000);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  std::vector<float> f32(patterns.size());
  std::vector<double> f64(patterns.size());
  for (const format& f : kFormats) {
    read(patterns.data(), f.type, 0x10000, f32.data());
    read(patterns.data(), f.type, 0x10000, f64.data());
    int wrong = 0;
    for (size_t i = 0; i < patterns.size(); ++i) {
      const double expected = decode(f, patterns[i]);
      wrong += !same(static_cast<double>(f32[i]), expected) || !same(f64[i], expected);
      if (i % 97 == 0) {
        float one[kMostLanes];
        spread(&patterns[i], f.type, one);
        wrong += !same(static_cast<double>(one[0]), expected);
      }
    }
    EXPECT_EQ(wrong, 0);
  }
}

TEST_P(storage_test, rounds_f32_to_16_bits_once) {
  for (const format& f : kFormats) expect_rounding<float>(f);
}

TEST_P(storage_test, rounds_f64_to_16_bits_once) {
  for (const format& f : kFormats) expect_rounding<double>(f);
}

TEST_P(storage_test, f32_and_f64) {
  std::mt19937_64 random(2);
  constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
  std::vector<double> numbers = {0.0,  -0.0,  1e300, -1e300,  3.4028235677973366e38, 3.4028235677973362e38, kInf, -kInf,
                                 kNan, 1e-45, 7e-46, 7.1e-46, 1.0 + 0x1p-24,         1.0 + 0x3p-24};
  for (int i = 0; i < 1 << 18; ++i) {  // exponents that f32 holds and some around them
    numbers.push_back(std::ldexp(static_cast<double>(random() | 1) * 0x1p-64, static_cast<int>(random() % 300) - 150));
  }
  numbers.resize(numbers.size() / kMostLanes * kMostLanes);
  const int64 count = static_cast<int64>(numbers.size());
  std::vector<float> stored(numbers.size()), narrow(numbers.size());
  std::vector<double> rounded(numbers.size()), wide(numbers.size());
  write(numbers.data(), dtype::f32, count, stored.data());
  round(numbers.data(), dtype::f32, count, rounded.data());
  read(numbers.data(), dtype::f64, count, narrow.data());
  write(stored.data(), dtype::f64, count, wide.data());
  for (size_t i = 0; i < numbers.size(); ++i) {
    const double expected = static_cast<double>(static_cast<float>(numbers[i]));
    ASSERT_TRUE(same(static_cast<double>(stored[i]), expected)) << numbers[i] << ": " << stored[i];
    ASSERT_TRUE(same(rounded[i], expected) && same(static_cast<double>(narrow[i]), expected)) << numbers[i];
    ASSERT_TRUE(same(wide[i], expected)) << numbers[i];
  }
}

TEST_P(storage_test, booleans_are_0_and_1) {
  const unsigned char row[] = {0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1};
  for (const int64 count : {19, 3}) {
    std::vector<float> f32(19);
    std::vector<double> f64(19);
    read(row, dtype::boolean, count, f32.data());
    read(row, dtype::boolean, count, f64.data());
    for (int64 i = 0; i < count; ++i) {
      EXPECT_EQ(f32[static_cast<size_t>(i)], row[i]);
      EXPECT_EQ(f64[static_cast<size_t>(i)], row[i]);
    }
  }
  float one[kMostLanes];
  spread(row + 1, dtype::boolean, one);
  EXPECT_EQ(one[0], 1.0f);
}

TEST_P(storage_test, touches_nothing_past_the_end) {
  for (const dtype type : kNumbers) {
    expect_exact_ends<float>(type);
    expect_exact_ends<double>(type);
  }
  const guarded memory(5);
  float numbers[5];
  read(memory.data(), dtype::boolean, 5, numbers);
}

TEST_P(storage_test, streams_what_it_stores) {
  std::vector<float> numbers(256);
  std::vector<double> wide(256);
  for (size_t i = 0; i < numbers.size(); ++i) wide[i] = numbers[i] = static_cast<float>(i) - 99.5f;
  alignas(64) static char stored[256 * 8 + 2], streamed[256 * 8 + 2];
  for (const dtype type : kNumbers) {
    for (const int misaligned : {0, 2}) {
      const size_t bytes = 256 * static_cast<size_t>(size_of(type));
      write(numbers.data(), type, 256, stored + misaligned);
      write(numbers.data(), type, 256, streamed + misaligned, true);
      EXPECT_EQ(std::memcmp(stored + misaligned, streamed + misaligned, bytes), 0);
      std::memset(streamed, 0, sizeof streamed);
      write(wide.data(), type, 256, streamed + misaligned, true);
      EXPECT_EQ(std::memcmp(stored + misaligned, streamed + misaligned, bytes), 0);
    }
  }
}

TEST_P(storage_test, broadcasts_the_first_number) {
  const double f64 = 1.0 / 3;
  const float f32 = 1.0f / 3;
  float as_f32[kMostLanes];
  double as_f64[kMostLanes];
  spread(&f64, dtype::f64, as_f64);
  EXPECT_EQ(as_f64[0], f64);
  spread(&f64, dtype::f64, as_f32);
  EXPECT_EQ(as_f32[0], f32);
  spread(&f32, dtype::f32, as_f64);
  EXPECT_EQ(as_f64[0], static_cast<double>(f32));
  spread(&f32, dtype::f32, as_f32);
  EXPECT_EQ(as_f32[0], f32);
}

}  // namespace
}  // namespace test
}  // namespace onepass
#endif
