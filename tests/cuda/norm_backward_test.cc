// Backward of a norm and a `linear` of few features: blocks share all of x, and its kernels compile.
#include "src/cuda/linear/norm_backward.h"

#include <gtest/gtest.h>

#include "tests/cuda/nvrtc_fixture.h"

namespace onepass::cuda {
namespace {

TEST(NarrowLinear, BlocksShareAllOfX) {
  const device_facts chip = facts_of("sm_90a");
  for (const int64 depth : {8, 256, 264, 1024, 4096, 8192}) {
    for (const int64 rows : {1, 64, 65, 5000, 1 << 20}) {
      const narrow_plan p = plan_narrow(rows, depth, chip);
      EXPECT_GE(p.stride, depth);
      EXPECT_LT(p.stride - depth, 256);
      EXPECT_GE(p.tiles * 64, rows);
      EXPECT_GE(p.teams, 1);
      EXPECT_LE(p.teams * p.slices, chip.sm_count) << "they wait for each other";
      EXPECT_LE(p.teams, p.tiles);
    }
  }
  EXPECT_EQ(plan_narrow(64, 256 * (chip.sm_count + 1), chip).teams, 0) << "too long for the chip";
}

using NarrowLinearNvrtc = Nvrtc;

TEST_F(NarrowLinearNvrtc, Compiles) {
  for (const dtype type : {dtype::bf16, dtype::f16}) {
    for (const bool centres : {false, true}) {
      narrow_call call{};
      call.type = type, call.centres = centres;
      expect_compiles_well(source(call), "sm_90a");
    }
    for (const dtype operand : {dtype::none, dtype::f32, dtype::bf16, dtype::f64}) {
      narrow_gradients_call call{};
      call.type = type, call.scale_type = call.bias_type = call.result_bias_type = operand;
      expect_compiles_well(source(call), "sm_90a");
    }
  }
}

}  // namespace
}  // namespace onepass::cuda
