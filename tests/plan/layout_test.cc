// Shapes and strides as rows.
#include "src/plan/layout.h"

#include <gtest/gtest.h>

#include <random>

namespace onepass::spec {
namespace {

struct tensor {
  std::vector<std::int64_t> sizes, strides;
  view out{};
  strided as() { return {this, dtype::f32, static_cast<int>(sizes.size()), sizes.data(), strides.data(), &out}; }
};

fit fill(const tensor& x, std::vector<tensor*> tensors, bool flatten, arguments& a, std::vector<bool>& copies) {
  std::vector<strided> list;
  for (tensor* t : tensors) list.push_back(t->as());
  return lay_out({static_cast<int>(x.sizes.size()), x.sizes.data()}, list, flatten, a, copies);
}

TEST(Layout, ContiguousTensorsAreRowsOfOneStride) {
  tensor x{{4, 5, 6}, {30, 6, 1}}, y = x;
  arguments a{};
  std::vector<bool> copies;
  ASSERT_EQ(fill(x, {&x, &y}, false, a, copies), fit::rows);
  EXPECT_EQ(a.rows, 20);
  EXPECT_EQ(a.columns, 6);
  EXPECT_EQ(a.matrix_rows, 5);
  EXPECT_EQ(a.size[kMaxDims - 1], 20);
  EXPECT_EQ(x.out.stride[kMaxDims - 1], 6);
}

TEST(Layout, FlattensWhereNoWordLooksAtItsColumn) {
  tensor x{{4, 5, 6}, {30, 6, 1}}, number{{}, {}};
  arguments a{};
  std::vector<bool> copies;
  ASSERT_EQ(fill(x, {&x, &number}, true, a, copies), fit::rows);
  EXPECT_EQ(a.rows, 1);
  EXPECT_EQ(a.columns, 120);
  EXPECT_EQ(number.out.column_stride, 0);
}

TEST(Layout, BroadcastKeepsItsOwnStrides) {
  tensor x{{2, 3, 4, 8}, {96, 32, 8, 1}}, mask{{2, 1, 1, 8}, {8, 8, 8, 1}};
  arguments a{};
  std::vector<bool> copies;
  ASSERT_EQ(fill(x, {&x, &mask}, false, a, copies), fit::rows);
  EXPECT_EQ(a.size[kMaxDims - 2], 2);
  EXPECT_EQ(a.size[kMaxDims - 1], 12);
  EXPECT_EQ(mask.out.stride[kMaxDims - 2], 8);
  EXPECT_EQ(mask.out.stride[kMaxDims - 1], 0);
}

TEST(Layout, ExpandedGradientIsOneNumberARow) {
  tensor x{{4, 6}, {6, 1}}, g{{4, 6}, {0, 0}};
  arguments a{};
  std::vector<bool> copies;
  ASSERT_EQ(fill(x, {&x, &g}, false, a, copies), fit::rows);
  EXPECT_EQ(g.out.column_stride, 0);
}

TEST(Layout, ScalesOfGroupsHaveRowsOfTheirOwn) {
  tensor x{{4, 96}, {96, 1}}, apart{{4, 96}, {200, 1}}, scales{{4, 6}, {6, 1}};
  for (const bool flatten : {false, true}) {
    for (tensor* of : {&x, &apart}) {
      arguments a{};
      std::vector<bool> copies;
      std::vector<strided> all{of->as(), scales.as()};
      all[1].shared_by = 16;
      ASSERT_EQ(lay_out({2, x.sizes.data()}, all, flatten, a, copies), fit::rows);
      const bool is_flat = flatten && of == &x;
      EXPECT_EQ(a.rows, is_flat ? 1 : 4);
      EXPECT_EQ(a.columns, is_flat ? 384 : 96);
      EXPECT_EQ(scales.out.column_stride, 16);
      EXPECT_EQ(scales.out.stride[kMaxDims - 1], is_flat ? 24 : 6);
    }
  }
}

TEST(Layout, ATransposedRowNeedsACopy) {
  tensor x{{4, 6}, {1, 4}}, y{{4, 6}, {6, 1}};
  arguments a{};
  std::vector<bool> copies;
  ASSERT_EQ(fill(x, {&x, &y}, false, a, copies), fit::copies);
  EXPECT_EQ(copies, (std::vector<bool>{true, false}));
}

TEST(Layout, MoreDimensionsThanKernelsTakeNeedCopies) {
  tensor y{{2, 2, 2, 2, 2, 2, 3}, {96, 48, 24, 12, 6, 3, 1}}, x{{2, 2, 2, 2, 2, 2, 3}, {4096, 1024, 256, 64, 16, 4, 1}};
  arguments a{};
  std::vector<bool> copies;
  ASSERT_EQ(fill(y, {&x, &y}, false, a, copies), fit::copies);
  EXPECT_EQ(copies, (std::vector<bool>{true, false}));
}

TEST(Layout, BroadcastRules) {
  const std::int64_t sizes[] = {2, 3, 4};
  const shape x{3, sizes};
  tensor fits{{3, 1}, {1, 1}}, wrong{{2, 4}, {4, 1}}, deeper{{1, 2, 3, 4}, {24, 12, 4, 1}};
  EXPECT_TRUE(broadcasts(fits.as(), x));
  EXPECT_FALSE(broadcasts(wrong.as(), x));
  EXPECT_FALSE(broadcasts(deeper.as(), x));
}

// Every row is in the group that the operand's row, in its own order, is for.
TEST(RowGroups, AreRowsOfTheOperand) {
  const std::int64_t sizes[] = {2, 3, 1, 4, 8};
  const shape x{5, sizes};
  for (const std::uint64_t has : {0b1000, 0b0100, 0b0001, 0b1100, 0b0101, 0b1001}) {
    const row_groups of = groups_of(x, has);
    EXPECT_EQ(of.count * of.rows, x.rows());
    const std::vector<std::int64_t> own = sizes_of_groups(x, has);
    std::vector<int> seen(24);
    for (std::int64_t g = 0; g < of.count; ++g) {
      for (std::int64_t w = 0; w < of.rows; ++w) {
        const std::int64_t row =
            ((g / of.kept * of.outer + w / of.inner) * of.kept + g % of.kept) * of.inner + w % of.inner;
        ++seen.at(static_cast<std::size_t>(row));
        std::int64_t in_operand = 0, stride = 1, rest = row;
        for (std::size_t d = 4; d-- > 0; rest /= sizes[d])
          in_operand += own[d] > 1 ? rest % sizes[d] * stride : 0, stride *= own[d];
        EXPECT_EQ(in_operand, g);
      }
    }
    EXPECT_EQ(seen, std::vector<int>(24, 1));
  }
}

TEST(Divisor, GivesQuotients) {
  constexpr std::uint32_t kMost = (1u << 31) - 1;
  std::mt19937 random(1);
  std::vector<std::uint32_t> numbers = {0, 1, 2, 3, kMost - 1, kMost};
  for (int shift = 2; shift < 31; ++shift)
    for (const std::uint32_t n : {(1u << shift) - 1, 1u << shift, (1u << shift) + 1}) numbers.push_back(n);
  for (int i = 0; i < 1000; ++i) numbers.push_back(random() >> (1 + i % 30));
  for (const std::uint32_t by : numbers) {
    if (by == 0) continue;
    const divisor of = divisor::of(by);
    for (const std::uint32_t n : numbers) {
      ASSERT_EQ(of.quotient_of(n), n / by) << n << " / " << by;
      const std::uint64_t multiple = static_cast<std::uint64_t>(n / by) * by;
      if (multiple > 0) ASSERT_EQ(of.quotient_of(static_cast<std::uint32_t>(multiple - 1)), multiple / by - 1);
    }
  }
}

}  // namespace
}  // namespace onepass::spec
