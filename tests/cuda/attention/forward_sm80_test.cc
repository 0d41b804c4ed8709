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

TEST(ProbabilitiesSm80, BlocksShareAllRows) {
  const spec::contraction line(spec::parse(kLine));
  for (const char* arch : {"sm_80", "sm_90a", "sm_120"}) {
    const device_facts chip = facts_of(arch);
    for (const int64 head_dim : {8, 32, 64, 72, 128, 256}) {
      ASSERT_EQ(why_not_probabilities_sm80(line, head_dim, dtype::bf16, chip), "");
      for (const int64 columns : {1, 64, 1000, 100000}) {
        for (const int64 rows : {1, 100, 2048}) {
          const imagined_linear of(kLine, rows * 6, head_dim, columns, dtype::bf16, false);
          ASSERT_TRUE(fits(of.scores()));
          const forward_sm80_plan p = plan_probabilities_sm80(of.scores(), chip);
          const int64 block_rows_sm80 = p.threads / 4 * p.rows_of_thread;
          EXPECT_LE(p.blocks_per_sm * static_cast<int>(p.shared_bytes), chip.shared_per_block);
          EXPECT_EQ(p.tile % 32, 0);
          EXPECT_EQ(p.behind.vector_size, 8);
          EXPECT_GE(p.before.held_vectors * 32, head_dim);
          EXPECT_GE(p.blocks_of_batch * block_rows_sm80, rows);
          EXPECT_LT((p.blocks_of_batch - 1) * block_rows_sm80, rows) << "a block without rows";
          EXPECT_EQ(p.grid, 6 * p.blocks_of_batch);
        }
      }
    }
  }
}

TEST(ProbabilitiesSm80, SaysWhyNot) {
  const auto why = [&](const char* line, choice::sizes c, const char* arch = "sm_90a") {
    const spec::contraction of(spec::parse(line));
    return chosen_on(arch, {.of = of, .sizes = c}).of(spec::strategy::two_pass).why_not;
  };
  EXPECT_EQ(why(kLine, {2048, 64, 2048, dtype::bf16, false}), "");
  EXPECT_EQ(why(kLine, {2048, 64, 256, dtype::f16, false}, "sm_80"), "");
  EXPECT_NE(why(kLine, {2048, 264, 256, dtype::bf16, false}).find("a head_dim of at most 256"), std::string::npos);
  EXPECT_NE(why(kLine, {2048, 64, 64, dtype::f32, false}).find("bfloat16"), std::string::npos);
  EXPECT_NE(why(kLine, {2048, 60, 64, dtype::bf16, false}).find("multiple of 8"), std::string::npos);
  EXPECT_NE(why("scores | gelu", {2048, 64, 64, dtype::bf16, false}).find("softmax"), std::string::npos);
}

TEST(ProbabilitiesSm80, BatchesOfFewRowsLeaveRowsEmpty) {
  const spec::contraction line(spec::parse(kLine));
  const auto taken = [&](int64 batches, int64 rows) {
    const choice::sizes of{batches * rows, 64, 128, dtype::bf16, false, batches};
    return chosen_on("sm_90a", {.of = line, .sizes = of}).chosen().how;
  };
  EXPECT_EQ(taken(65536, 8), spec::strategy::unfused);
  EXPECT_EQ(taken(64, 2048), spec::strategy::two_pass);
}

TEST(ProbabilitiesSm80, ItsSourceDefinesWhatKernelReads) {
  const imagined_linear of(kLine, 60, 64, 64, dtype::bf16, false);
  std::set<std::string> names = config_names(kWarpAttention);
  for (const char* of_values : {"kValueChunks", "kCausal"}) EXPECT_EQ(names.erase(of_values), 1u);
  expect_defined(names, source(of.scores(), plan_probabilities_sm80(of.scores(), facts_of("sm_80"))));
}

// With values of so many numbers, without memory.
attention_sm80_call with_values(const imagined_linear& of, int64 value_head_dim) {
  const probabilities_sm80_call call = of.scores();
  const int64 batch = call.a_behind.columns * value_head_dim;
  return {call, call.matrix, value_head_dim, 3 * batch, batch, value_head_dim, {call.a_behind.y.data, 0, 0, 0, 0},
          false};
}

TEST(AttentionSm80, FitsEveryChip) {
  const spec::contraction line(spec::parse(kLine));
  for (const char* arch : {"sm_80", "sm_89", "sm_90a", "sm_120"}) {
    const device_facts chip = facts_of(arch);
    for (const int64 head_dim : {8, 64, 72, 256}) {
      for (const int64 value_head_dim : {8, 64, 128, 256}) {
        ASSERT_EQ(why_not_attention_sm80(line, head_dim, value_head_dim, dtype::f16, chip), "");
        const imagined_linear of(kLine, 600, head_dim, 1001, dtype::f16, false);
        const forward_sm80_plan p = plan_attention_sm80(with_values(of, value_head_dim), chip);
        EXPECT_LE(p.blocks_per_sm * static_cast<int>(p.shared_bytes), chip.shared_per_block) << arch << head_dim;
        EXPECT_GE(p.tile, 32);
        EXPECT_EQ(p.tile % 32, 0);
      }
    }
  }
}

TEST(AttentionSm80, SaysWhyNot) {
  const auto why = [](const char* line, int64 value_head_dim) {
    return why_not_attention_sm80(spec::contraction(spec::parse(line)), 64, value_head_dim, dtype::bf16,
                                  facts_of("sm_80"));
  };
  EXPECT_EQ(why(kLine, 64), "");
  EXPECT_NE(why(kLine, 60).find("multiple of 8"), std::string::npos);
  EXPECT_NE(why(kLine, 264).find("at most 256"), std::string::npos);
  EXPECT_NE(why("scores | softmax | add", 64).find("multiply"), std::string::npos);
}

TEST(AttentionSm80, ItsSourceDefinesWhatKernelReads) {
  const imagined_linear of(kLine, 60, 64, 64, dtype::bf16, false);
  const attention_sm80_call call = with_values(of, 64);
  expect_defined(config_names(kWarpAttention), source(call, plan_attention_sm80(call, facts_of("sm_80"))));
}

using AttentionSm80Nvrtc = Nvrtc;

TEST_F(AttentionSm80Nvrtc, CompilesForEveryChip) {
  const auto compiles = [](const char* arch, const char* line, int64 head_dim, int64 columns, dtype type) {
    const device_facts chip = facts_of(arch);
    ASSERT_EQ(why_not_probabilities_sm80(spec::contraction(spec::parse(line)), head_dim, type, chip), "");
    const imagined_linear of(line, 6 * 2048, head_dim, columns, type, false);
    EXPECT_FALSE(
        nvrtc_compile(source(of.scores(), plan_probabilities_sm80(of.scores(), chip)), chip.arch_name).empty());
  };
  compiles("sm_90a", kLine, 64, 2048, dtype::bf16);
  compiles("sm_90a", kLine, 256, 20, dtype::f16);
  compiles("sm_90a", "scores | mul(0.1) | causal | softmax | dropout(0.1)", 128, 1000, dtype::f16);
  compiles("sm_80", "scores | add | keep | softmax | scale", 40, 200, dtype::bf16);
  compiles("sm_100a", "scores | softmax", 64, 512, dtype::bf16);
  compiles("sm_120", "scores | mul(2) | mask | softmax", 96, 64, dtype::f16);
}

TEST_F(AttentionSm80Nvrtc, CompilesWithValuesForEveryChip) {
  const auto compiles = [](const char* arch, const char* line, int64 head_dim, int64 value_head_dim, dtype type) {
    const imagined_linear of(line, 600, head_dim, 77, type, false);
    const device_facts chip = facts_of(arch);
    const attention_sm80_call call = with_values(of, value_head_dim);
    EXPECT_FALSE(nvrtc_compile(source(call, plan_attention_sm80(call, chip)), chip.arch_name).empty());
  };
  compiles("sm_80", kLine, 64, 64, dtype::bf16);
  compiles("sm_90a", "scores | mul(0.1) | causal | softmax | dropout(0.1)", 128, 128, dtype::f16);
  compiles("sm_120", kLine, 256, 256, dtype::bf16);
}

}  // namespace
}  // namespace onepass::cuda
