// Philox against Random123's known answers, and the vectorised source against the scalar one.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/lane/random_test.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "onepass/lane/random.h"
#include "tests/lane/targets.h"

#ifndef ONEPASS_RANDOM_TEST_ONCE
#define ONEPASS_RANDOM_TEST_ONCE
namespace onepass::test {
// Where to draw from: numbers for columns [first, last) of `row`.
struct draw {
  int64 state[2];
  int ordinal;
  int64 row, columns, first, last;
};
}  // namespace onepass::test
#endif

ONEPASS_BEGIN

// How many numbers differ from the reference; `source` is kept over the draws, as a kernel keeps it over rows.
template <class T>
int64 differences_of(const test::draw* draws, int count) {
  using L = vec<T>;
  int64 wrong = 0;
  random_source source;
  for (int i = 0; i < count; ++i) {
    const test::draw& d = draws[i];
    if (i == 0 || d.columns != draws[i - 1].columns || d.ordinal != draws[i - 1].ordinal) {
      source.reset(d.state, d.ordinal, d.columns);
    }
    source.set_row(d.row);
    for (int64 c = d.first; c < d.last; c += lanes<L>()) {
      T numbers[lanes<L>()];
      store_lane(source.template next<L>(c), numbers);
      for (int64 j = 0; j < lanes<L>() && c + j < d.columns; ++j) {
        const uint32 expected = random_number(static_cast<uint64>(d.state[0]), static_cast<uint64>(d.state[1]),
                                              static_cast<uint32>(d.ordinal), d.row, c + j, d.columns);
        wrong += numbers[j] != static_cast<T>(expected);
      }
    }
  }
  return wrong;
}
int64 differences_f32(const test::draw* draws, int count) { return differences_of<float>(draws, count); }
int64 differences_f64(const test::draw* draws, int count) { return differences_of<double>(draws, count); }

ONEPASS_END

#if HWY_ONCE
#include <vector>

namespace onepass {
HWY_EXPORT(differences_f32);
HWY_EXPORT(differences_f64);

namespace test {
namespace {

using ONEPASS_TARGET::philox;
using ONEPASS_TARGET::philox_words;
using ONEPASS_TARGET::random_number;

constexpr bool equal(philox_words a, philox_words b) {
  return a.word[0] == b.word[0] && a.word[1] == b.word[1] && a.word[2] == b.word[2] && a.word[3] == b.word[3];
}

// Random123, kat_vectors: philox4x32 7.
static_assert(equal(philox({{0, 0, 0, 0}}, 0, 0), {{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}}));
static_assert(equal(philox({{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, 0xffffffff, 0xffffffff),
                    {{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}}));
static_assert(equal(philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0),
                    {{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}));

// Element 13 of row 2 with 20 columns: group 2 · 3 + 1, its element 5, which is the high half of word 2.
static_assert(random_number(0x0000000200000001, 0x0000000400000003, 5, 2, 13, 20) ==
              philox({{7, 0, 3, 4 ^ 5}}, 1, 2).word[2] >> 16);

class random_test : public on_target {
 protected:
  static void expect_reference(const std::vector<draw>& draws) {
    const int count = static_cast<int>(draws.size());
    EXPECT_EQ(HWY_DYNAMIC_DISPATCH(differences_f32)(draws.data(), count), 0);
    EXPECT_EQ(HWY_DYNAMIC_DISPATCH(differences_f64)(draws.data(), count), 0);
  }
};
ONEPASS_ON_EVERY_TARGET(random_test);

TEST_P(random_test, rows_of_any_length) {
  for (const int64 columns : {1, 7, 8, 9, 77, 511, 512, 513, 1000, 3001}) {
    std::vector<draw> draws;
    for (int64 row = 0; row < 12; ++row) draws.push_back({{1234567890123, 42}, 0, row, columns, 0, columns});
    expect_reference(draws);
  }
}

TEST_P(random_test, rows_and_columns_in_any_order) {
  std::vector<draw> draws;
  for (const int64 row : {5, 5, 4, 900, 0, 5, 6}) draws.push_back({{-1, 7}, 3, row, 333, row % 3 * 16, 333});
  for (int64 first = 0; first < 40; ++first) draws.push_back({{99, 1}, 0, first % 2, 1201, first * 30 + first, 1201});
  expect_reference(draws);
}

TEST_P(random_test, all_64_bits_count) {
  const int64 far = (int64{1} << 36) + 12345;  // groups above 2^32
  expect_reference({{{int64{1} << 40, int64{3} << 33 | 5}, 2, far, 40, 0, 40},
                    {{int64{1} << 40, int64{3} << 33 | 5}, 2, far + 1, 40, 0, 40},
                    {{-5, -6}, 31, (int64{1} << 35) - 1, 8, 0, 8}});
}

}  // namespace
}  // namespace test
}  // namespace onepass
#endif
