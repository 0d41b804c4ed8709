// The kernel of tiles for lines that begin with `scores`: it compiles, and fits the chip.
#include "src/cuda/attention/forward_sm90.h"

#include <gtest/gtest.h>

#include "tests/cuda/chosen.h"
#include "tests/cuda/config_names.h"
#include "tests/cuda/imagined_attention.h"
#include "tests/cuda/nvrtc_fixture.h"

namespace onepass::cuda {
namespace {

constexpr const char* kLine = "scores | mul(0.125) | mask | softmax";

TEST(AttentionSm90, BlocksShareAllRowsAndFitTheChip) {
  const device_facts chip = facts_of("sm_90a");
  for (const int64 head_dim : {8, 64, 72, 128, 256}) {
    for (const int64 value_head_dim : {0, 8, 64, 128, 200, 256}) {
      for (const int64 rows : {1, 128, 1000}) {
        const imagined_attention of(kLine, {rows, 1000, head_dim, value_head_dim}, dtype::bf16);
        ASSERT_TRUE(fits(of.call()));
        const tiles_plan p = plan_forward_sm90(of.call(), chip);
        const int64 of_block = block_rows_sm90(head_dim, value_head_dim);
        EXPECT_LE(static_cast<int>(p.shared_bytes) + 1024, chip.shared_per_block) << head_dim << " " << value_head_dim;
        EXPECT_EQ(p.warpgroups * 64, of_block);
        EXPECT_GE(p.blocks * of_block, rows);
        EXPECT_LT((p.blocks - 1) * of_block, rows) << "a block without rows";
        EXPECT_EQ(p.grid, 6 * p.blocks);
        EXPECT_GE(p.stages, 1);
      }
    }
  }
}

TEST(AttentionSm90, TensorsThatHaveNoRoomAreReadWhereTheyAreUsed) {
  const device_facts chip = facts_of("sm_90a");
  const char* line = "scores | add | add | add | add | mask | softmax";
  for (const int64 head_dim : {64, 128, 256}) {
    for (const int64 value_head_dim : {0, 64, 256}) {
      const imagined_attention of(line, {1000, 1000, head_dim, value_head_dim}, dtype::bf16);
      const tiles_plan p = plan_forward_sm90(of.call(), chip);
      EXPECT_LE(static_cast<int>(p.shared_bytes) + 1024, chip.shared_per_block) << head_dim << " " << value_head_dim;
      EXPECT_GE(p.stages, 1);
      EXPECT_NE(p.behind.streams, 0u);
    }
  }
}

TEST(AttentionSm90, SaysWhyNot) {
  const auto why = [](const char* line, attention_sizes of, dtype type = dtype::bf16, const char* arch = "sm_90a") {
    return why_not_forward_sm90(spec::contraction(spec::parse(line)).behind, of.head_dim, of.value_head_dim, of.keys,
                                type, facts_of(arch));
  };
  EXPECT_EQ(why(kLine, {1, 1000, 64, 64}), "");
  EXPECT_EQ(why(kLine, {1, 1000, 256, 0}, dtype::f16), "");
  EXPECT_NE(why(kLine, {1, 1004, 64, 64}).find("multiples of 8"), std::string::npos);
  EXPECT_NE(why(kLine, {1, 1000, 64, 264}).find("at most 256"), std::string::npos);
  EXPECT_NE(why(kLine, {1, 1000, 64, 64}, dtype::f32).find("bfloat16"), std::string::npos);
  EXPECT_NE(why(kLine, {1, 1000, 64, 64}, dtype::bf16, "sm_80").find("9.0"), std::string::npos);
  EXPECT_NE(why("scores | softmax | add", {1, 1000, 64, 64}).find("multiply"), std::string::npos);
  EXPECT_EQ(why("scores | softmax | add", {1, 1000, 64, 0}), "");
  EXPECT_NE(why("scores | silu", {1, 1000, 64, 64}).find("softmax"), std::string::npos);
  EXPECT_NE(why("scores | softmax | keep", {1, 1000, 64, 64}).find("kept"), std::string::npos);
}

TEST(AttentionSm90, WritesNoWeightsWhereItCan) {
  const spec::contraction line(spec::parse(kLine));
  choice::call call{.of = line, .sizes = {131072, 64, 2048, dtype::bf16, false, 64}, .value_depth = 64, .values = true};
  const auto all = chosen_on("sm_90a", call);
  EXPECT_EQ(all.chosen().by, choice::implementation::tiles);
  EXPECT_LT(all.of(spec::strategy::flash).bytes, all.of(spec::strategy::unfused).bytes);
  call.sizes.columns = 2047;
  EXPECT_EQ(chosen_on("sm_90a", call).chosen().by, choice::implementation::warps);
}

TEST(AttentionSm90, ItsSourceDefinesWhatKernelReads) {
  const imagined_attention of(kLine, {64, 64, 64, 64}, dtype::bf16);
  expect_defined(config_names(kAttention), source(of.call(), plan_forward_sm90(of.call(), facts_of("sm_90a"))));
}

using AttentionSm90Nvrtc = Nvrtc;

TEST_F(AttentionSm90Nvrtc, Compiles) {
  const auto compiles = [](const char* line, attention_sizes of, dtype type) {
    const imagined_attention call(line, of, type);
    const device_facts chip = facts_of("sm_90a");
    expect_compiles_well(source(call.call(), plan_forward_sm90(call.call(), chip)), chip.arch_name);
  };
  compiles(kLine, {2048, 2048, 64, 64}, dtype::bf16);
  compiles(kLine, {100, 72, 256, 0}, dtype::f16);
  compiles("scores | mul(0.1) | causal | softmax | dropout(0.1)", {1000, 1000, 128, 128}, dtype::f16);
  compiles("scores | mul(0.1) | tanh | mul(30) | add | softmax", {100, 200, 32, 256}, dtype::bf16);
}

}  // namespace
}  // namespace onepass::cuda
