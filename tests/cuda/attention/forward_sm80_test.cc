// The kernel for lines with `scores`: it compiles for every chip, and fits it.
#include "src/cuda/attention/forward_sm80.h"

#include <gtest/gtest.h>

#include "tests/cuda/chosen.h"
#include "tests/cuda/config_names.h"
#include "tests/cuda/imagined_linear.h"
#include "tests/cuda/nvrtc_fixture.h"

namespace onepass::cuda {
namespace {

constexpr const char* kLine = "scores | mul(0.125) | mask | softmax";

TEST(Scores, BlocksShareAllRows) {
  const spec::contraction line(spec::parse(kLine));
  for (const char* arch : {"sm_80", "sm_90a", "sm_120"}) {
    const device_facts chip = facts_of(arch);
    for (const int64 depth : {8, 32, 64, 72, 128, 256}) {
      ASSERT_EQ(why_not_scores(line, depth, dtype::bf16, chip), "");
      for (const int64 columns : {1, 64, 1000, 100000}) {
        for (const int64 rows : {1, 100, 2048}) {
          const imagined_linear of(kLine, rows * 6, depth, columns, dtype::bf16, false);
          ASSERT_TRUE(fits(of.scores()));
          const scores_plan p = plan_scores(of.scores(), chip);
          const int64 rows_of_block = p.threads / 4 * p.rows_of_thread;
          EXPECT_LE(p.blocks_per_sm * static_cast<int>(p.shared_bytes), chip.shared_per_block);
          EXPECT_EQ(p.tile % 32, 0);
          EXPECT_EQ(p.behind.vector_size, 8);
          EXPECT_GE(p.before.held_vectors * 32, depth);
          EXPECT_GE(p.blocks_of_batch * rows_of_block, rows);
          EXPECT_LT((p.blocks_of_batch - 1) * rows_of_block, rows) << "a block without rows";
          EXPECT_EQ(p.grid, 6 * p.blocks_of_batch);
        }
      }
    }
  }
}

TEST(Scores, SaysWhyNot) {
  const auto why = [&](const char* line, choice::sizes c, const char* arch = "sm_90a") {
    const spec::contraction of(spec::parse(line));
    return chosen_on(arch, {.of = of, .sizes = c}).of(spec::strategy::resident).why_not;
  };
  EXPECT_EQ(why(kLine, {2048, 64, 2048, dtype::bf16, false}), "");
  EXPECT_EQ(why(kLine, {2048, 64, 256, dtype::f16, false}, "sm_80"), "");
  EXPECT_NE(why(kLine, {2048, 264, 256, dtype::bf16, false}).find("at most 256 numbers"), std::string::npos);
  EXPECT_NE(why(kLine, {2048, 64, 64, dtype::f32, false}).find("bfloat16"), std::string::npos);
  EXPECT_NE(why(kLine, {2048, 60, 64, dtype::bf16, false}).find("multiples of 8"), std::string::npos);
  EXPECT_NE(why("scores | gelu", {2048, 64, 64, dtype::bf16, false}).find("softmax"), std::string::npos);
}

TEST(Scores, BatchesOfFewRowsLeaveStripsEmpty) {
  const spec::contraction line(spec::parse(kLine));
  const auto taken = [&](int64 batches, int64 rows) {
    const choice::sizes of{batches * rows, 64, 128, dtype::bf16, false, batches};
    return chosen_on("sm_90a", {.of = line, .sizes = of}).chosen().how;
  };
  EXPECT_EQ(taken(65536, 8), spec::strategy::unfused);
  EXPECT_EQ(taken(64, 2048), spec::strategy::resident);
}

TEST(Scores, ItsSourceDefinesWhatKernelReads) {
  const imagined_linear of(kLine, 60, 64, 64, dtype::bf16, false);
  std::set<std::string> names = config_names(kWarpAttention);
  for (const char* of_values : {"kValuePieces", "kCausal"}) EXPECT_EQ(names.erase(of_values), 1u);
  expect_defined(names, source(of.scores(), plan_scores(of.scores(), facts_of("sm_80"))));
}

// With values of so many numbers, without memory.
warp_attention_call with_values(const imagined_linear& of, int64 value_depth) {
  const scores_call call = of.scores();
  const int64 batch = call.a_behind.columns * value_depth;
  return {call, call.matrix, value_depth, 3 * batch, batch, value_depth, call.a_behind.y.data, false};
}

TEST(WarpAttention, FitsEveryChip) {
  const spec::contraction line(spec::parse(kLine));
  for (const char* arch : {"sm_80", "sm_89", "sm_90a", "sm_120"}) {
    const device_facts chip = facts_of(arch);
    for (const int64 depth : {8, 64, 72, 256}) {
      for (const int64 value_depth : {8, 64, 128, 256}) {
        ASSERT_EQ(why_not_warp_attention(line, depth, value_depth, dtype::f16, chip), "");
        const imagined_linear of(kLine, 600, depth, 1001, dtype::f16, false);
        const scores_plan p = plan_warp_attention(with_values(of, value_depth), chip);
        EXPECT_LE(p.blocks_per_sm * static_cast<int>(p.shared_bytes), chip.shared_per_block) << arch << depth;
        EXPECT_GE(p.tile, 32);
        EXPECT_EQ(p.tile % 32, 0);
      }
    }
  }
}

TEST(WarpAttention, SaysWhyNot) {
  const auto why = [](const char* line, int64 value_depth) {
    return why_not_warp_attention(spec::contraction(spec::parse(line)), 64, value_depth, dtype::bf16,
                                  facts_of("sm_80"));
  };
  EXPECT_EQ(why(kLine, 64), "");
  EXPECT_NE(why(kLine, 60).find("multiples of 8"), std::string::npos);
  EXPECT_NE(why(kLine, 264).find("at most 256"), std::string::npos);
  EXPECT_NE(why("scores | softmax | add", 64).find("multiply"), std::string::npos);
}

TEST(WarpAttention, ItsSourceDefinesWhatKernelReads) {
  const imagined_linear of(kLine, 60, 64, 64, dtype::bf16, false);
  const warp_attention_call call = with_values(of, 64);
  expect_defined(config_names(kWarpAttention), source(call, plan_warp_attention(call, facts_of("sm_80"))));
}

using ScoresNvrtc = Nvrtc;

TEST_F(ScoresNvrtc, CompilesForEveryChip) {
  const auto compiles = [](const char* arch, const char* line, int64 depth, int64 columns, dtype type) {
    const device_facts chip = facts_of(arch);
    ASSERT_EQ(why_not_scores(spec::contraction(spec::parse(line)), depth, type, chip), "");
    const imagined_linear of(line, 6 * 2048, depth, columns, type, false);
    EXPECT_FALSE(nvrtc_compile(source(of.scores(), plan_scores(of.scores(), chip)), chip.arch_name).empty());
  };
  compiles("sm_90a", kLine, 64, 2048, dtype::bf16);
  compiles("sm_90a", kLine, 256, 20, dtype::f16);
  compiles("sm_90a", "scores | mul(0.1) | causal | softmax | dropout(0.1)", 128, 1000, dtype::f16);
  compiles("sm_80", "scores | add | keep | softmax | scale", 40, 200, dtype::bf16);
  compiles("sm_100a", "scores | softmax", 64, 512, dtype::bf16);
  compiles("sm_120", "scores | mul(2) | mask | softmax", 96, 64, dtype::f16);
}

TEST_F(ScoresNvrtc, CompilesWithValuesForEveryChip) {
  const auto compiles = [](const char* arch, const char* line, int64 depth, int64 value_depth, dtype type) {
    const imagined_linear of(line, 600, depth, 77, type, false);
    const device_facts chip = facts_of(arch);
    const warp_attention_call call = with_values(of, value_depth);
    EXPECT_FALSE(nvrtc_compile(source(call, plan_warp_attention(call, chip)), chip.arch_name).empty());
  };
  compiles("sm_80", kLine, 64, 64, dtype::bf16);
  compiles("sm_90a", "scores | mul(0.1) | causal | softmax | dropout(0.1)", 128, 128, dtype::f16);
  compiles("sm_120", kLine, 256, 256, dtype::bf16);
}

}  // namespace
}  // namespace onepass::cuda
