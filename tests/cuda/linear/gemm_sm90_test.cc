// The kernel for lines with `linear`: its tiles fit the chip, it compiles, and it is taken where it was measured
// faster.
#include "src/cuda/linear/gemm_sm90.h"

#include <gtest/gtest.h>

#include <string_view>

#include "src/plan/plan.h"
#include "tests/cuda/chosen.h"
#include "tests/cuda/config_names.h"
#include "tests/cuda/imagined_linear.h"
#include "tests/cuda/nvrtc_fixture.h"

namespace onepass::cuda {
namespace {

TEST(Linear, TilesFitTheChip) {
  const device_facts chip = facts_of("sm_90a");
  for (const char* line : {"linear", "linear | bias | gelu", "layer_norm | scale | bias | linear | bias"}) {
    const bool defers = std::string_view(line).starts_with("layer_norm");
    for (const int64 columns : {8, 64, 72, 128, 136, 192, 200, 4096, 16384}) {
      for (const int64 rows : {1, 128, 129, 8192}) {
        const imagined_linear of(line, rows, 1024, columns, dtype::bf16, false, defers);
        ASSERT_TRUE(fits(of.call()));
        const linear_plan p = choose(of.call(), chip);
        EXPECT_LE(p.shared_bytes, static_cast<unsigned>(chip.shared_per_block) - 2048) << "room for mailboxes";
        EXPECT_GE(p.stages, 3);
        EXPECT_LE(p.grid, static_cast<unsigned>(chip.sm_count));
        EXPECT_EQ(p.grid % static_cast<unsigned>(p.tiles.cluster), 0u);
      }
    }
  }
}

TEST(Linear, RowsMustBeginAt16Bytes) {
  imagined_linear of("linear", 64, 64, 64, dtype::f16, false);
  linear_call call = of.call();
  EXPECT_TRUE(fits(call));
  call.input = static_cast<const char*>(call.input) + 2;
  EXPECT_FALSE(fits(call));
  linear_call other = of.call();
  other.matrix_stride = 68;
  EXPECT_FALSE(fits(other));
}

TEST(Linear, WholeTurnsDecideTheTile) {
  const device_facts chip = facts_of("sm_90a");
  const tile_plan square = plan_tiles(8192, 4096, false, 0, chip);
  EXPECT_EQ(square.tile.columns, 256);
  EXPECT_EQ(square.turns, 8);
  EXPECT_EQ(plan_tiles(8192, 16384, false, 16, chip).tile.columns, 192);  // 42 turns of 192, or 32 of 256
  EXPECT_EQ(plan_tiles(1, 40, false, 0, chip).tile.columns, 64);
}

TEST(Linear, ItsSourceDefinesWhatKernelsRead) {
  const imagined_linear of("layer_norm | scale | linear", 64, 64, 64, dtype::bf16, false, true);
  fold_call folds{};
  folds.type = dtype::bf16;
  expect_defined(config_names(kGemm), source(of.call(), choose(of.call(), facts_of("sm_90a"))) + source(folds));
}

TEST(Strategy, SaysWhyNot) {
  const spec::contraction line(spec::parse("linear | gelu"));
  const auto why = [&](choice::sizes c, const char* arch) {
    return chosen_on(arch, {.of = line, .sizes = c}).of(spec::strategy::tiled).why_not;
  };
  EXPECT_EQ(why({64, 64, 64, dtype::bf16, false}, "sm_90a"), "");
  EXPECT_NE(why({64, 64, 64, dtype::bf16, false}, "sm_80").find("9.0"), std::string::npos);
  EXPECT_NE(why({64, 64, 64, dtype::f32, false}, "sm_90a").find("bfloat16"), std::string::npos);
  EXPECT_NE(why({64, 60, 64, dtype::f16, false}, "sm_90a").find("multiples of 8"), std::string::npos);
  const spec::contraction normed(spec::parse("rms_norm | linear"));
  const auto ways = chosen_on("sm_90a", {.of = normed, .sizes = {64, 64, 64, dtype::f16, false}});
  EXPECT_NE(ways.of(spec::strategy::tiled).why_not.find("stand before 'linear'"), std::string::npos);
  EXPECT_EQ(ways.of(spec::strategy::deferred).why_not, "");
}

TEST(Strategy, AKernelForAllMovesLess) {
  const spec::contraction line(spec::parse("layer_norm | linear | bias | gelu"));
  const auto all = chosen_on("sm_90a", {.of = line, .sizes = {4096, 1024, 2048, dtype::bf16, true}});
  constexpr int64 kX = 4096 * 1024 * 2, kY = 4096 * 2048 * 2, kMatrix = 1024 * 2048 * 2;
  EXPECT_EQ(all.of(spec::strategy::unfused).bytes, kX + kMatrix + kY + 2 * kX + 2 * kY);
  // Statistics' pass, the folded matrix, the product.
  EXPECT_EQ(all.of(spec::strategy::deferred).bytes, 2 * kX + 3 * kMatrix + 2 * kY);
}

using LinearNvrtc = Nvrtc;

TEST_F(LinearNvrtc, CompilesALineOfEachKind) {
  const device_facts chip = facts_of("sm_90a");
  const auto compiles = [&](const char* line, int64 depth, int64 columns, dtype type, bool saves, bool defers = false) {
    const imagined_linear of(line, 1000, depth, columns, type, saves, defers);
    expect_compiles_well(source(of.call(), choose(of.call(), chip)), chip.arch_name);
  };
  compiles("linear", 512, 64, dtype::f16, false);
  compiles("linear | bias | gelu | dropout(0.1) | add | keep", 1000, 16384, dtype::bf16, true);
  compiles("linear | bias | keep | silu", 8192, 128, dtype::bf16, false);
  compiles("linear", 264, 200, dtype::f16, true);
  compiles("layer_norm | scale | bias | linear | bias | gelu", 1000, 4096, dtype::bf16, true, true);
  compiles("rms_norm | linear", 4096, 64, dtype::f16, false, true);
  compiles("rms_norm | scale | linear", 4096, 1024, dtype::f16, false, true);
  for (const dtype type : {dtype::f32, dtype::bf16, dtype::f16, dtype::f64}) {
    fold_call folds{};
    folds.type = dtype::bf16, folds.scale_type = folds.bias_type = type, folds.centres = true;
    EXPECT_FALSE(nvrtc_compile(source(folds), chip.arch_name).empty());
  }
}

}  // namespace
}  // namespace onepass::cuda
