#include "src/cpu/gemm/panel_product.h"

#include <gtest/gtest.h>

#include <bit>
#include <vector>

namespace onepass::cpu {
namespace {

// Small whole numbers, exact in every type; row_stride and column_stride in numbers.
class numbers {
 public:
  numbers(dtype type, int64 rows, int64 columns, bool transposed, int64 padding = 0)
      : bytes_(static_cast<std::size_t>((rows + padding) * (columns + padding) * 8), '\x77') {
    const int64 stride = (transposed ? rows : columns) + padding;
    is = {bytes_.data(), type, rows, columns, transposed ? 1 : stride, transposed ? stride : 1};
  }
  void fill(int seed) {
    for (int64 r = 0; r < is.rows; ++r)
      for (int64 c = 0; c < is.columns; ++c) set(r, c, static_cast<double>((seed + r * 31 + c * 7) % 13 - 6));
  }
  double at(int64 r, int64 c) const {
    const int64 i = r * is.row_stride + c * is.column_stride;
    if (is.type == dtype::f64) return static_cast<const double*>(is.data)[i];
    if (is.type == dtype::f32) return static_cast<const float*>(is.data)[i];
    return std::bit_cast<float>(static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(is.data)[i]) << 16);
  }
  void set(int64 r, int64 c, double value) {
    const int64 i = r * is.row_stride + c * is.column_stride;
    if (is.type == dtype::f64) static_cast<double*>(is.data)[i] = value;
    else if (is.type == dtype::f32) static_cast<float*>(is.data)[i] = static_cast<float>(value);
    else
      static_cast<std::uint16_t*>(is.data)[i] =
          static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16);
  }
  matrix is{};

 private:
  std::vector<char> bytes_;
};

struct sizes {
  int64 rows, terms, columns;
};

class PanelProduct : public testing::TestWithParam<sizes> {};

void check(sizes s, dtype type, dtype of_result, bool left_transposed, bool right_transposed, bool part) {
  numbers a(type, s.rows, s.terms, left_transposed, 3), b(type, s.terms, s.columns, right_transposed, 3),
      result(of_result, s.rows, s.columns, false, 2);
  a.fill(1), b.fill(5), result.fill(3);
  right_factor factor;
  factor.take(b.is);
  matrix to = result.is, left = a.is;
  if (part) to.columns = (s.columns + 1) / 2, left.columns = s.terms / 2 / 2 * 2;
  for (const bool add : {false, true}) {
    result.fill(3);
    factor.multiply(to, left, add);
    for (int64 r = 0; r < s.rows; ++r) {
      for (int64 c = 0; c < s.columns; ++c) {
        const double before = static_cast<double>((3 + r * 31 + c * 7) % 13 - 6);
        double sum = add ? before : 0;
        for (int64 k = 0; k < left.columns; ++k) sum += a.at(r, k) * b.at(k, c);
        if (c >= to.columns) sum = before;
        ASSERT_NEAR(result.at(r, c), sum, of_result == dtype::bf16 ? std::abs(sum) / 256 : 0) << r << ", " << c;
      }
    }
  }
}

TEST_P(PanelProduct, IsTheProduct) {
  for (const dtype type : {dtype::f32, dtype::f64, dtype::bf16}) {
    if (!has_panel_product(type)) continue;
    for (int which = 0; which < 8; ++which) {
      check(GetParam(), type, type, which & 1, which & 2, which & 4);
      if (type == dtype::bf16) check(GetParam(), type, dtype::f32, which & 1, which & 2, which & 4);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Sizes, PanelProduct,
                         testing::Values(sizes{1, 1, 1}, sizes{12, 64, 32}, sizes{37, 19, 53}, sizes{5, 2, 65},
                                         sizes{64, 33, 16}, sizes{31, 128, 64}, sizes{13, 3, 31}, sizes{17, 601, 70}),
                         [](const auto& info) {
                           return std::to_string(info.param.rows) + "x" + std::to_string(info.param.terms) + "x" +
                                  std::to_string(info.param.columns);
                         });

TEST(PanelProduct, TakesAFactorInParts) {
  numbers a(dtype::f32, 9, 40, false), b(dtype::f32, 40, 300, true), whole(dtype::f32, 9, 300, false),
      parts(dtype::f32, 9, 300, false);
  a.fill(1), b.fill(2);
  right_factor first, second;
  first.take(b.is);
  first.multiply(whole.is, a.is, false);
  std::vector<char> memory;
  const int64 tiles = second.make_room(b.is, [&](int64 bytes) {
    memory.resize(static_cast<std::size_t>(bytes));
    return memory.data();
  });
  for (int64 tile = tiles; tile-- > 0;) second.take_tiles(b.is, tile, tile + 1);
  second.multiply(parts.is, a.is, false);
  for (int64 r = 0; r < 9; ++r)
    for (int64 c = 0; c < 300; ++c) EXPECT_EQ(parts.at(r, c), whole.at(r, c));
}

TEST(PanelProduct, RoundsRowsOfFloats) {
  if (!has_panel_product(dtype::bf16)) GTEST_SKIP() << "no bfloat16 products here";
  numbers floats(dtype::f32, 3, 21, false), result(dtype::bf16, 3, 21, false, 4);
  floats.fill(0);
  round_to_bf16(floats.is, result.is);
  for (int64 r = 0; r < 3; ++r)
    for (int64 c = 0; c < 21; ++c) EXPECT_EQ(result.at(r, c), floats.at(r, c));
}

}  // namespace
}  // namespace onepass::cpu
