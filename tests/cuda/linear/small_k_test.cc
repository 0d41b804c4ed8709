// The kernel for lines with `linear` of short rows: it compiles for every chip, and fits it.
#include "src/cuda/linear/small_k.h"

#include <gtest/gtest.h>

#include "tests/cuda/chosen.h"
#include "tests/cuda/config_names.h"
#include "tests/cuda/imagined_linear.h"
#include "tests/cuda/nvrtc_fixture.h"

namespace onepass::cuda {
namespace {

TEST(SmallKLinear, TheMatrixFitsInSharedMemory) {
  for (const char* arch : {"sm_80", "sm_90a"}) {
    const device_facts chip = facts_of(arch);
    for (const int64 depth : {8, 64, 72, 128, 200, 256}) {
      for (const int64 columns : {8, 40, 64, 352, 512}) {
        if (!why_not_small_k(depth, columns, chip).empty()) continue;
        for (const int64 rows : {1, 8192, 100000}) {
          const imagined_linear of("layer_norm | scale | linear | bias", rows, depth, columns, dtype::bf16, false);
          ASSERT_TRUE(fits(of.by_warps()));
          const small_k_plan p = plan_small_k(of.by_warps(), chip);
          EXPECT_LE(p.shared_bytes, static_cast<unsigned>(chip.shared_per_block));
          EXPECT_EQ(p.pitch % 128, 64);
          EXPECT_GE(p.pitch, p.before.held_vectors * 64);
          EXPECT_GE(p.before.held_vectors * 32, depth);
          EXPECT_LE(p.grid, static_cast<unsigned>(chip.sm_count));
        }
      }
    }
  }
}

TEST(SmallKLinear, SaysWhyNot) {
  const spec::contraction line(spec::parse("rms_norm | linear"));
  const auto why = [&](choice::sizes c, const char* arch = "sm_90a") {
    return chosen_on(arch, {.of = line, .sizes = c}).of(spec::strategy::small_k).why_not;
  };
  EXPECT_EQ(why({65536, 256, 64, dtype::bf16, false}), "");
  EXPECT_EQ(why({65536, 128, 128, dtype::f16, false}, "sm_80"), "");
  EXPECT_NE(why({65536, 264, 64, dtype::bf16, false}).find("at most 256 elements"), std::string::npos);
  EXPECT_NE(why({65536, 256, 512, dtype::bf16, false}).find("shared memory"), std::string::npos);
  EXPECT_NE(why({65536, 64, 64, dtype::f32, false}).find("bfloat16"), std::string::npos);
  EXPECT_NE(why({65536, 60, 64, dtype::bf16, false}).find("multiples of 8"), std::string::npos);
}

TEST(SmallKLinear, ItsSourceDefinesWhatKernelReads) {
  const imagined_linear of("layer_norm | scale | linear", 4, 64, 64, dtype::bf16, false);
  expect_defined(config_names(kSmallK), source(of.by_warps(), plan_small_k(of.by_warps(), facts_of("sm_80"))));
}

using SmallKLinearNvrtc = Nvrtc;

TEST_F(SmallKLinearNvrtc, CompilesForEveryChip) {
  const auto compiles = [](const char* arch, const char* line, int64 depth, int64 columns, dtype type, bool saves) {
    const device_facts chip = facts_of(arch);
    ASSERT_EQ(why_not_small_k(depth, columns, chip), "");
    const imagined_linear of(line, 65536, depth, columns, type, saves);
    EXPECT_FALSE(nvrtc_compile(source(of.by_warps(), plan_small_k(of.by_warps(), chip)), chip.arch_name).empty());
  };
  compiles("sm_90a", "linear", 256, 64, dtype::bf16, false);
  compiles("sm_90a", "add | keep | rms_norm | scale | linear | bias | silu", 128, 256, dtype::bf16, true);
  compiles("sm_80", "softmax | dropout(0.1) | linear | bias | keep | gelu", 200, 40, dtype::f16, true);
  compiles("sm_100a", "layer_norm | scale | bias | linear | bias", 256, 64, dtype::bf16, false);
  compiles("sm_120", "gate(silu) | linear", 64, 64, dtype::f16, false);
}

}  // namespace
}  // namespace onepass::cuda
