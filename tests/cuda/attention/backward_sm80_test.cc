// Backward of lines with `scores` and `values` by warps: it compiles for every chip, and fits it.
#include "src/cuda/attention/backward.h"

#include <gtest/gtest.h>

#include "tests/cuda/config_names.h"
#include "tests/cuda/imagined_attention.h"
#include "tests/cuda/nvrtc_fixture.h"

namespace onepass::cuda {
namespace {

constexpr const char* kLine = "scores | mul(0.125) | mask | softmax";
constexpr backward_kernel kBoth[] = {backward_kernel::queries, backward_kernel::keys};

// As the kernels of tiles take it.
backward_sm80_call with(const attention_call& of) {
  void* any = of.y.data;
  return {.behind = of.behind,
          .a_behind = of.a_behind,
          .causal = of.causal,
          .queries = any,
          .grad_output = any,
          .output = of.y,
          .keys = of.keys,
          .values = of.values,
          .rows_of_batch = of.queries.rows,
          .statistics = static_cast<softmax_statistics*>(any),
          .grad_queries = matrices_of(of.queries),
          .grad_keys = matrices_of(of.keys),
          .grad_values = matrices_of(of.values)};
}

TEST(AttentionBackwardSm80, BlocksShareAllRowsAndKeysAndFitTheChip) {
  for (const int64 head_dim : {8, 64, 72, 128}) {
    for (const int64 keys : {1, 64, 131, 1000}) {
      const imagined_attention of(kLine, {100, keys, head_dim, 128}, dtype::bf16);
      const attention_call call = of.call();
      ASSERT_TRUE(fits(with(call)));
      for (const backward_kernel which : kBoth) {
        const backward_sm80_plan p = plan_backward_sm80(with(call), which);
        const int64 shared = which == backward_kernel::keys ? keys : 100;
        EXPECT_GE(p.blocks_of_batch * 64, shared);
        EXPECT_LT((p.blocks_of_batch - 1) * 64, shared) << "a block without rows";
        EXPECT_EQ(p.grid, 6 * p.blocks_of_batch);
        for (const char* arch : {"sm_80", "sm_90a"})
          EXPECT_LE(static_cast<int>(p.shared_bytes), facts_of(arch).shared_per_block) << head_dim;
      }
    }
  }
}

TEST(AttentionBackwardSm80, SaysWhyNot) {
  const auto why = [](const char* line, int64 head_dim, const char* arch) {
    return why_not_backward_sm80(spec::contraction(spec::parse(line)), head_dim, head_dim, dtype::bf16, facts_of(arch));
  };
  EXPECT_EQ(why(kLine, 128, "sm_80"), "");
  EXPECT_EQ(why(kLine, 64, "sm_120"), "");
  EXPECT_NE(why(kLine, 136, "sm_80").find("at most 128"), std::string::npos);
  EXPECT_NE(why(kLine, 128, "sm_120").find("shared memory"), std::string::npos);
  EXPECT_NE(why("scores | softmax | add", 64, "sm_80").find("multiply"), std::string::npos);
}

TEST(AttentionBackwardSm80, TheSourceDefinesWhatKernelReads) {
  const imagined_attention of(kLine, {64, 77, 64, 64}, dtype::bf16);
  const attention_call call = of.call();
  for (const backward_kernel which : kBoth)
    expect_defined({"kChunks", "kValueChunks", "kCausal", "kWantsQueries", "kWantsKeys", "kWantsValues"},
                   source(with(call), which, plan_backward_sm80(with(call), which)));
}

using AttentionBackwardSm80Nvrtc = Nvrtc;

TEST_F(AttentionBackwardSm80Nvrtc, Compile) {
  const auto compiles = [](const char* arch, const char* line, attention_sizes of, dtype type) {
    const imagined_attention imagined(line, of, type);
    const attention_call call = imagined.call();
    for (const backward_kernel which : kBoth)
      EXPECT_FALSE(nvrtc_compile(source(with(call), which, plan_backward_sm80(with(call), which)), arch).empty());
  };
  compiles("sm_80", kLine, {100, 77, 128, 128}, dtype::bf16);
  compiles("sm_90a", "scores | mul(0.1) | causal | softmax | dropout(0.1)", {100, 100, 64, 64}, dtype::f16);
  compiles("sm_120", kLine, {100, 77, 64, 72}, dtype::bf16);
}

}  // namespace
}  // namespace onepass::cuda
