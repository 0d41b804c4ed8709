// Backward of lines with `scores` and `values` by warps: it compiles for every chip, and fits it.
#include "src/cuda/attention/backward_sm80.h"

#include <gtest/gtest.h>

#include "tests/cuda/config_names.h"
#include "tests/cuda/imagined_attention.h"
#include "tests/cuda/nvrtc_fixture.h"

namespace onepass::cuda {
namespace {

constexpr const char* kLine = "scores | mul(0.125) | mask | softmax";
constexpr gradients_of kBoth[] = {gradients_of::queries, gradients_of::keys};

// As the kernels of tiles take it.
warp_gradients_call with(const attention_call& of) {
  void* any = of.y;
  return {.behind = of.behind,
          .a_behind = of.a_behind,
          .causal = of.causal,
          .queries = any,
          .gradients = any,
          .result = any,
          .keys = of.keys,
          .values = of.values,
          .rows_of_batch = of.queries.rows,
          .statistics = static_cast<softmax_statistics*>(any),
          .to_queries = any,
          .to_keys = any,
          .to_values = any};
}

TEST(WarpGradients, BlocksShareAllRowsAndKeysAndFitTheChip) {
  for (const int64 depth : {8, 64, 72, 128}) {
    for (const int64 keys : {1, 64, 131, 1000}) {
      const imagined_attention of(kLine, {100, keys, depth, 128}, dtype::bf16);
      const attention_call call = of.call();
      ASSERT_TRUE(fits(with(call)));
      for (const gradients_of which : kBoth) {
        const warp_gradients_plan p = plan_warp_gradients(with(call), which);
        const int64 shared = which == gradients_of::keys ? keys : 100;
        EXPECT_GE(p.blocks_of_batch * 64, shared);
        EXPECT_LT((p.blocks_of_batch - 1) * 64, shared) << "a block without rows";
        EXPECT_EQ(p.grid, 6 * p.blocks_of_batch);
        for (const char* arch : {"sm_80", "sm_90a"})
          EXPECT_LE(static_cast<int>(p.shared_bytes), facts_of(arch).shared_per_block) << depth;
      }
    }
  }
}

TEST(WarpGradients, SaysWhyNot) {
  const auto why = [](const char* line, int64 depth, const char* arch) {
    return why_not_warp_gradients(spec::contraction(spec::parse(line)), depth, depth, dtype::bf16, facts_of(arch));
  };
  EXPECT_EQ(why(kLine, 128, "sm_80"), "");
  EXPECT_EQ(why(kLine, 64, "sm_120"), "");
  EXPECT_NE(why(kLine, 136, "sm_80").find("at most 128"), std::string::npos);
  EXPECT_NE(why(kLine, 128, "sm_120").find("shared memory"), std::string::npos);
  EXPECT_NE(why("scores | softmax | add", 64, "sm_80").find("multiply"), std::string::npos);
}

TEST(WarpGradients, TheSourceDefinesWhatKernelReads) {
  const imagined_attention of(kLine, {64, 77, 64, 64}, dtype::bf16);
  const attention_call call = of.call();
  for (const gradients_of which : kBoth)
    expect_defined({"kPieces", "kValuePieces", "kCausal", "kWantsRows", "kWantsKeys", "kWantsValues"},
                   source(with(call), which, plan_warp_gradients(with(call), which)));
}

using WarpGradientsNvrtc = Nvrtc;

TEST_F(WarpGradientsNvrtc, Compile) {
  const auto compiles = [](const char* arch, const char* line, attention_sizes of, dtype type) {
    const imagined_attention imagined(line, of, type);
    const attention_call call = imagined.call();
    for (const gradients_of which : kBoth)
      EXPECT_FALSE(nvrtc_compile(source(with(call), which, plan_warp_gradients(with(call), which)), arch).empty());
  };
  compiles("sm_80", kLine, {100, 77, 128, 128}, dtype::bf16);
  compiles("sm_90a", "scores | mul(0.1) | causal | softmax | dropout(0.1)", {100, 100, 64, 64}, dtype::f16);
  compiles("sm_120", kLine, {100, 77, 64, 72}, dtype::bf16);
}

}  // namespace
}  // namespace onepass::cuda
