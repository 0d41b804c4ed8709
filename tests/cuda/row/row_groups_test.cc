// Backward where operands repeat along leading dimensions: how groups of rows are shared out, and that kernels compile.
#include <gtest/gtest.h>

#include "src/cuda/runtime/source.h"
#include "tests/cuda/imagined_call.h"
#include "tests/cuda/nvrtc_fixture.h"

namespace onepass::cuda {
namespace {

// x is [..., columns], and the first operand has the leading dimensions `has`.
call grouped_call(const char* text, dtype x, std::vector<std::int64_t> sizes, std::uint64_t has) {
  const spec::shape shape{static_cast<int>(sizes.size()), sizes.data()};
  call c = call_of(spec::parse(text), true, x, x, shape.rows(), shape.columns());
  c.a.groups = spec::groups_of(shape, has);
  c.a.groups.operands = c.r.wants_column & (~c.r.wants_column + 1);
  c.r.has_groups = true;
  return c;
}

constexpr std::int64_t kColumns[] = {40, 1000, 3072, 16384, 40000};

TEST(RowGroups, AreSharedOut) {
  for (const char* text : {"layer_norm | scale | bias", "bias | gelu"}) {
    for (const char* arch : {"sm_80", "sm_90a"}) {
      for (const std::int64_t columns : kColumns) {
        for (const std::int64_t count : {1, 2, 16, 133, 1000, 100000}) {
          for (const std::int64_t rows : {2, 3, 64, 1000, 100000}) {
            const call c = grouped_call(text, dtype::bf16, {count, rows, columns}, count > 1 ? 2 : 0);
            ASSERT_EQ(c.a.groups.count, count);
            const plan p = choose(c.r, c.a, facts_of(arch)).back();
            const bool in_tiles = !c.r.rowwise || p.with.of == part::tiles;
            const int64 blocks = !in_tiles ? p.grid_x / static_cast<unsigned>(p.with.cluster) : p.grid_y;
            const int64 of_group = p.group_blocks, rows_a_step = int64{p.with.down} * std::max(p.with.unroll, 1);
            EXPECT_EQ(p.parts, blocks);
            EXPECT_EQ(p.with.groups_a_block > 0, of_group == 1);
            EXPECT_EQ(p.with.apart, 0);
            EXPECT_EQ(p.with.ahead, 0);
            EXPECT_LE(of_group, ceil_div(rows, rows_a_step));
            EXPECT_LE(blocks, count * of_group);
            if (of_group > 1) {
              EXPECT_EQ(blocks, count * of_group);
            }
          }
        }
      }
    }
  }
}

class NvrtcRowGroups : public Nvrtc, public testing::WithParamInterface<const char*> {};
TEST_P(NvrtcRowGroups, Compile) {
  const char* const arch = GetParam();
  for (const char* text : {"layer_norm | scale | bias", "bias | gelu"}) {
    for (const std::int64_t columns :
         {std::int64_t{40}, std::int64_t{3072}, std::int64_t{40000}, std::int64_t{600000}}) {
      for (const std::uint64_t has : {2, 1}) {
        const call c = grouped_call(text, dtype::bf16, {16, 1024, columns}, has);
        for (const plan& p : choose(c.r, c.a, facts_of(arch))) expect_compiles_well(source(c.r, p.with), arch);
      }
    }
  }
  expect_compiles_well(column_sum_source(dtype::f32, kFewSums, true), arch);
}
INSTANTIATE_TEST_SUITE_P(Chips, NvrtcRowGroups, testing::Values("sm_80", "sm_90a"),
                         [](const auto& of) { return std::string(of.param); });

}  // namespace
}  // namespace onepass::cuda
