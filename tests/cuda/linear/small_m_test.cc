// The kernel for lines with `linear` of few rows: it compiles for every chip, and fits it.
#include "src/cuda/linear/small_m.h"

#include <gtest/gtest.h>

#include "tests/cuda/chosen.h"
#include "tests/cuda/config_names.h"
#include "tests/cuda/imagined_linear.h"
#include "tests/cuda/nvrtc_fixture.h"

namespace onepass::cuda {
namespace {

TEST(SmallMLinear, RowsFitInSharedMemory) {
  const device_facts chip = facts_of("sm_90a");
  for (const int64 depth : {8, 64, 72, 4096, 5000, 14336}) {
    for (const int64 rows : {1, 8, 9, 16}) {
      if (!why_not_small_m(rows, depth, chip).empty()) continue;
      const imagined_linear of("layer_norm | scale | linear | bias", rows, depth, 4096, dtype::bf16, false);
      ASSERT_TRUE(fits(of.by_warps()));
      const small_m_plan p = plan_small_m(of.by_warps(), chip);
      EXPECT_LE(p.shared_bytes + static_cast<unsigned>(p.row_tiles) * 20480,
                static_cast<unsigned>(chip.shared_per_block));
      EXPECT_EQ(p.pitch % 128, 64);
      EXPECT_GE(p.pitch, 2 * depth);
      EXPECT_EQ(p.steps % p.ahead, 0);
      EXPECT_GE(p.steps * 1024, depth);
      EXPECT_LE(p.before.held_vectors, 8);
      EXPECT_GE(p.before.held_vectors * p.before.across * 8, depth);
    }
  }
}

TEST(SmallMLinear, SaysWhyNot) {
  const spec::contraction line(spec::parse("rms_norm | linear"));
  const auto why = [&](choice::sizes c, const char* arch = "sm_90a") {
    return chosen_on(arch, {.of = line, .sizes = c}).of(spec::strategy::small_m).why_not;
  };
  EXPECT_EQ(why({16, 4096, 64, dtype::bf16, false}), "");
  EXPECT_EQ(why({8, 4096, 64, dtype::bf16, false}, "sm_80"), "");
  EXPECT_NE(why({17, 64, 64, dtype::bf16, false}).find("at most 16 rows"), std::string::npos);
  EXPECT_NE(why({16, 8192, 64, dtype::bf16, false}).find("shared memory"), std::string::npos);
  EXPECT_NE(why({1, 64, 64, dtype::f32, false}).find("bfloat16"), std::string::npos);
  EXPECT_NE(why({1, 64, 63, dtype::f16, false}).find("multiples of 8"), std::string::npos);
}

TEST(SmallMLinear, ItsSourceDefinesWhatKernelReads) {
  const imagined_linear of("layer_norm | scale | linear", 4, 64, 64, dtype::bf16, false);
  expect_defined(config_names(kSmallM), source(of.by_warps(), plan_small_m(of.by_warps(), facts_of("sm_80"))));
}

using SmallMLinearNvrtc = Nvrtc;

TEST_F(SmallMLinearNvrtc, CompilesForEveryChip) {
  const auto compiles = [](const char* arch, const char* line, int64 rows, int64 depth, dtype type, bool saves) {
    const device_facts chip = facts_of(arch);
    ASSERT_EQ(why_not_small_m(rows, depth, chip), "");
    const imagined_linear of(line, rows, depth, 4096, type, saves);
    EXPECT_FALSE(nvrtc_compile(source(of.by_warps(), plan_small_m(of.by_warps(), chip)), chip.arch_name).empty());
  };
  compiles("sm_90a", "linear", 1, 14336, dtype::bf16, false);
  compiles("sm_90a", "add | keep | rms_norm | scale | linear | bias | silu", 16, 4096, dtype::bf16, true);
  compiles("sm_80", "softmax | dropout(0.1) | linear | bias | keep | gelu", 16, 1000, dtype::f16, true);
  compiles("sm_100a", "layer_norm | scale | bias | linear | bias", 3, 768, dtype::bf16, false);
  compiles("sm_120", "gate(silu) | linear", 3, 5000, dtype::f16, false);
}

}  // namespace
}  // namespace onepass::cuda
