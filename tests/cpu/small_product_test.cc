#include "src/cpu/gemm/small_product.h"

#include <gtest/gtest.h>

#include <vector>

namespace onepass::cpu {
namespace {

struct size {
  int64 rows, terms, columns;
};

template <class T>
matrix rows_of(std::vector<T>& numbers, int64 rows, int64 columns) {
  return {numbers.data(), sizeof(T) == 8 ? dtype::f64 : dtype::f32, rows, columns, columns, 1};
}
template <class T>
matrix columns_of(std::vector<T>& numbers, int64 rows, int64 columns) {
  return {numbers.data(), sizeof(T) == 8 ? dtype::f64 : dtype::f32, rows, columns, 1, rows};
}
double at(const matrix& m, int64 r, int64 c) {
  const int64 i = r * m.row_stride + c * m.column_stride;
  return m.type == dtype::f64 ? static_cast<double*>(m.data)[i] : static_cast<float*>(m.data)[i];
}

class SmallProduct : public testing::TestWithParam<size> {};

// Small whole numbers: every sum is exact.
template <class T>
void check(size s, bool transposed, bool with_bias) {
  std::vector<T> a(static_cast<std::size_t>(s.rows * s.terms)), b(static_cast<std::size_t>(s.terms * s.columns)),
      bias(static_cast<std::size_t>(s.columns)), result(static_cast<std::size_t>(s.rows * s.columns) + 1, T(-77));
  int next = 0;
  for (std::vector<T>* all : {&a, &b, &bias})
    for (T& number : *all) number = static_cast<T>(next++ * 7 % 13 - 6);
  const matrix left = transposed ? columns_of(a, s.rows, s.terms) : rows_of(a, s.rows, s.terms);
  const matrix right = transposed ? columns_of(b, s.terms, s.columns) : rows_of(b, s.terms, s.columns);
  const matrix row = rows_of(bias, 1, s.columns), to = rows_of(result, s.rows, s.columns);
  small_product(to, left, right, with_bias ? &row : nullptr);
  for (int64 r = 0; r < s.rows; ++r) {
    for (int64 c = 0; c < s.columns; ++c) {
      double sum = with_bias ? at(row, 0, c) : 0;
      for (int64 k = 0; k < s.terms; ++k) sum += at(left, r, k) * at(right, k, c);
      ASSERT_EQ(at(to, r, c), sum) << r << ", " << c;
    }
  }
  EXPECT_EQ(result.back(), T(-77));
}

TEST_P(SmallProduct, IsTheProduct) {
  for (const bool transposed : {false, true}) {
    for (const bool with_bias : {false, true}) {
      check<float>(GetParam(), transposed, with_bias);
      check<double>(GetParam(), transposed, with_bias);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Sizes, SmallProduct,
                         testing::Values(size{1, 1, 1}, size{16, 8, 16}, size{3, 5, 17}, size{9, 33, 7},
                                         size{2, 3, 150}, size{150, 3, 2}));

TEST(RepeatRow, FillsASmallResult) {
  std::vector<float> row{1, 2, 3}, result(6), large(1 << 14);
  const matrix from = rows_of(row, 1, 3);
  EXPECT_TRUE(repeat_row(from, rows_of(result, 2, 3)));
  EXPECT_EQ(result, (std::vector<float>{1, 2, 3, 1, 2, 3}));
  EXPECT_FALSE(repeat_row(rows_of(large, 1, 1 << 13), rows_of(large, 2, 1 << 13)));
  EXPECT_FALSE(repeat_row({row.data(), dtype::f32, 1, 2, 0, 2}, rows_of(result, 3, 2)));
}

TEST(SmallProduct, NothingToAddUpIsNotSmall) {
  std::vector<float> numbers(64);
  EXPECT_TRUE(is_small_product(rows_of(numbers, 8, 8), rows_of(numbers, 8, 8)));
  EXPECT_FALSE(is_small_product(rows_of(numbers, 8, 0), rows_of(numbers, 0, 8)));
  EXPECT_FALSE(is_small_product(rows_of(numbers, 0, 8), rows_of(numbers, 8, 8)));
}

}  // namespace
}  // namespace onepass::cpu
