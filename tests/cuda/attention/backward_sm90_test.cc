// Backward of lines with `scores` and `values` in kernels of tiles: they compile, and fit the chip.
#include "src/cuda/attention/backward.h"

#include <gtest/gtest.h>

#include "tests/cuda/config_names.h"
#include "tests/cuda/imagined_attention.h"
#include "tests/cuda/nvrtc_fixture.h"

namespace onepass::cuda {
namespace {

constexpr const char* kLine = "scores | mul(0.125) | mask | softmax";
constexpr backward_kernel kBoth[] = {backward_kernel::queries, backward_kernel::keys};

TEST(AttentionBackwardSm90, BlocksShareAllRowsAndKeysAndFitTheChip) {
  const device_facts chip = facts_of("sm_90a");
  for (const char* line : {kLine, "scores | add | add | add | add | mask | softmax"}) {
    for (const int64 head_dim : {8, 64, 72, 128, 192, 256}) {
      for (const int64 value_head_dim : {8, 64, 128, 256}) {
        for (const int64 rows : {1, 128, 1000}) {
          const imagined_attention of(line, {rows, 1000, head_dim, value_head_dim}, dtype::bf16);
          const attention_call forward = of.call();
          const backward_sm90_call call = of.gradients(forward);
          ASSERT_TRUE(fits(call));
          for (const backward_kernel which : kBoth) {
            const tiles_plan p = plan_backward_sm90(call, which, chip);
            const int64 shared = which == backward_kernel::keys ? 1000 : rows, of_block = p.warpgroups * 64;
            EXPECT_LE(static_cast<int>(p.shared_bytes) + 1024, chip.shared_per_block)
                << head_dim << " " << value_head_dim;
            EXPECT_GE(p.blocks * of_block, shared);
            EXPECT_LT((p.blocks - 1) * of_block, shared) << "a block without rows";
            EXPECT_EQ(p.grid, 6 * p.blocks);
            EXPECT_GE(p.stages, head_dim + value_head_dim > 256 ? 1 : 3);
          }
        }
      }
    }
  }
}

TEST(AttentionBackwardSm90, SaysWhyNot) {
  EXPECT_EQ(why_not_backward_sm90(64, 256), "");
  EXPECT_NE(why_not_backward_sm90(264, 64).find("at most 256"), std::string::npos);
  EXPECT_NE(why_not_backward_sm90(64, 264).find("at most 256"), std::string::npos);
}

TEST(AttentionBackwardSm90, KeysAndValuesShareAKernelWhereRegistersHoldBothSums) {
  const auto wanted = [](int64 head_dim, int64 value_head_dim) {
    const imagined_attention of(kLine, {64, 64, head_dim, value_head_dim}, dtype::bf16);
    const attention_call forward = of.call();
    std::string what;
    for (const auto& [which, call] : backward_launches(of.gradients(forward))) {
      const char *keys = call.grad_keys.data ? "k" : "", *values = call.grad_values.data ? "v" : "";
      what += (which == backward_kernel::queries ? "q" : std::string(keys) + values) + " ";
    }
    return what;
  };
  EXPECT_EQ(wanted(128, 128), "q kv ");
  EXPECT_EQ(wanted(192, 64), "q kv ");
  EXPECT_EQ(wanted(192, 128), "q k v ");
  EXPECT_EQ(wanted(256, 256), "q k v ");
}

TEST(AttentionBackwardSm90, OfTensorsAreWrittenWhereCausalHidesToo) {
  const imagined_attention of("scores | add | causal | softmax", {1000, 1000, 64, 64}, dtype::bf16);
  const attention_call forward = of.call();
  const device_facts chip = facts_of("sm_90a");
  EXPECT_TRUE(plan_backward_sm90(of.gradients(forward), backward_kernel::queries, chip).causal);
  request wants = forward.behind;
  wants.wants_tensor = 1;
  const attention_call wanted{
      wants,           forward.a_behind, forward.causal, forward.prefetched, forward.leading_masks,
      forward.queries, forward.keys,     forward.values, forward.y};
  EXPECT_FALSE(plan_backward_sm90(of.gradients(wanted), backward_kernel::queries, chip).causal);
  EXPECT_TRUE(plan_backward_sm90(of.gradients(wanted), backward_kernel::keys, chip).causal);
}

TEST(AttentionBackwardSm90, TheirSourcesDefineWhatKernelReads) {
  const imagined_attention of(kLine, {64, 64, 64, 64}, dtype::bf16);
  const attention_call forward = of.call();
  const backward_sm90_call call = of.gradients(forward);
  for (const backward_kernel which : kBoth)
    expect_defined(config_names(kAttentionBackward),
                   source(call, which, plan_backward_sm90(call, which, facts_of("sm_90a"))));
}

using AttentionBackwardSm90Nvrtc = Nvrtc;

TEST_F(AttentionBackwardSm90Nvrtc, Compile) {
  const auto compile = [](const char* line, attention_sizes of, dtype type) {
    const imagined_attention imagined(line, of, type);
    const attention_call forward = imagined.call();
    const backward_sm90_call call = imagined.gradients(forward);
    const device_facts chip = facts_of("sm_90a");
    for (const auto& [which, part] : backward_launches(call))
      expect_compiles_well(source(part, which, plan_backward_sm90(part, which, chip)), chip.arch_name);
  };
  compile(kLine, {2048, 2048, 64, 64}, dtype::bf16);
  compile("scores | mul(0.1) | add | softmax", {2048, 2048, 128, 128}, dtype::bf16);
  compile("scores | mul(0.1) | causal | softmax | dropout(0.1)", {1000, 1000, 128, 128}, dtype::f16);
  compile("scores | mul(0.1) | mask | dropout(0.2) | softmax | dropout(0.1)", {2048, 2048, 64, 64}, dtype::bf16);
  compile("scores | mul(0.02) | tanh | mul(50) | mask | softmax", {2048, 2048, 256, 256}, dtype::bf16);
  compile("scores | mul(0.1) | causal | softmax", {1000, 1000, 192, 128}, dtype::f16);
  compile("scores | mul(0.1) | tanh | mul(30) | add | softmax | mul(2)", {100, 200, 32, 128}, dtype::bf16);
}

}  // namespace
}  // namespace onepass::cuda
