// Several tensors in one launch: who shares one, how blocks are shared out, and that it compiles for every chip.
#include "src/cuda/row/group.h"

#include <gtest/gtest.h>

#include <numeric>

#include "src/cuda/runtime/packed_arguments.h"
#include "src/cuda/runtime/source.h"
#include "tests/cuda/config_names.h"
#include "tests/cuda/imagined_call.h"
#include "tests/cuda/nvrtc_fixture.h"

namespace onepass::cuda {
namespace {

constexpr int64 kAnyNumber = 1 << 20;

int64 sum_of(const std::vector<unsigned>& blocks) { return std::accumulate(blocks.begin(), blocks.end(), int64{0}); }

TEST(Share, GivesEachStepABlockWhereThereAreEnough) {
  EXPECT_EQ(share({3, 1, 5}, 9, kAnyNumber), (std::vector<unsigned>{3, 1, 5}));
  EXPECT_EQ(share({3, 1, 5}, 264, kAnyNumber), (std::vector<unsigned>{3, 1, 5}));
  EXPECT_EQ(share({3, 1, 5}, 7, kAnyNumber), (std::vector<unsigned>{3, 1, 5})) << "rounded up for each";
}

TEST(Share, FillsTheMachineAndNoMore) {
  for (const std::vector<int64>& steps :
       {std::vector<int64>(16, 256), std::vector<int64>{100000, 1, 1, 1}, std::vector<int64>(300, 7),
        std::vector<int64>{1 << 20, 1 << 10, 1 << 18, 3}, std::vector<int64>(40, 1000)}) {
    const int64 blocks = 264, members = static_cast<int64>(steps.size());
    const std::vector<unsigned> shares = share(steps, blocks, kAnyNumber);
    EXPECT_LE(sum_of(shares), std::max(blocks, members));
    int64 most = 0;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      EXPECT_GE(shares[i], 1u);
      EXPECT_LE(shares[i], steps[i]);
      most = std::max(most, ceil_div(steps[i], shares[i]));
    }
    const int64 all = std::accumulate(steps.begin(), steps.end(), int64{0});
    const int64 ideal = ceil_div(all, std::max<int64>(blocks - members, 1));
    EXPECT_LE(most, std::max<int64>(ideal + ideal / 16, 7)) << "a block has much more to do than it need";
  }
}

TEST(Share, StaysWithinTheGrid) {
  const std::vector<unsigned> shares = share({65530, 65530}, 65535, 65535);
  EXPECT_LE(sum_of(shares), 65535);
}

TEST(Group, LikeKeysShareALaunch) {
  using groups = std::vector<std::vector<int>>;
  EXPECT_EQ(alike({"a", "b", "a", "a"}, 8), (groups{{0, 2, 3}, {1}}));
  EXPECT_EQ(alike({"a", "a", "a"}, 2), (groups{{0, 1}, {2}}));
  EXPECT_EQ(room_for_members(3, 61), 4);
  EXPECT_EQ(room_for_members(40, 61), 61);
}

TEST(Group, TensorsAreAlikeWhateverTheirRows) {
  const spec::line line = spec::parse("layer_norm | scale | bias");
  const auto key = [&](int64 rows, memory at) {
    const call c = call_of(line, true, dtype::f32, dtype::f32, rows, 256, at);
    return key_of(describe(c.r, c.a));
  };
  EXPECT_EQ(key(1000, {}), key(7, {}));
  EXPECT_EQ(key(1 << 24, {}), key(7, {}));
  EXPECT_EQ(key(1, {}), key(7, {}));
  EXPECT_NE(key(1000, {}), key(1000, {.offset = 1}));
  EXPECT_NE(key(1000, {}), key(1000, {.gap = 4}));
}

TEST(Group, ATensorOfOneRowIsAsTheLongest) {
  const spec::line line = spec::parse("bias | add | keep | rms_norm | scale");
  call one = call_of(line, false, dtype::f32, dtype::f32, 1, 256),
       many = call_of(line, false, dtype::f32, dtype::f32, 7, 256);
  for (const bool added_to_all : {false, true}) {  // one row of the operand, and for x no steps: dimensions of 1
    std::fill_n(many.a.operand[1].stride, kMaxDims, 0), std::fill_n(one.a.x.stride, kMaxDims, 0);
    if (!added_to_all) many.a.operand[1].stride[kMaxDims - 1] = 256;
    lay_out_single_rows({&one.a, &many.a});
    EXPECT_EQ(key_of(describe(one.r, one.a)), key_of(describe(many.r, many.a)));
  }
}

TEST(Group, ManyTensorsFitALaunch) {
  const call c = call_of(spec::parse("layer_norm | scale | bias"), true, dtype::f32, dtype::f32, 64, 256);
  std::string packed;
  append_packed(packed, c.r, c.a);
  EXPECT_GE(facts_of("sm_90a").parameter_bytes / static_cast<int>(packed.size()), 40);
}

// A plan for so many tensors.
plan plan_of(const call& c, int64 members, const device_facts& chip) {
  configuration described = describe(c.r, c.a);
  described.members = members;
  return choose(c.r, c.a, chip, described).front();
}

TEST(Group, ItsSourceSaysWhoHasTheBlock) {
  const auto text = [&](const char* line, bool backward) {
    const call c = call_of(spec::parse(line), backward, dtype::f32, dtype::f32, 64, 1000);
    return source(c.r, plan_of(c, 8, facts_of("sm_90a")).with);
  };
  EXPECT_NE(text("rms_norm", false).find("members<8> a"), std::string::npos);
  EXPECT_NE(text("rms_norm", false).find("(a.at(blockIdx.x / config::kCluster))"), std::string::npos);
  EXPECT_NE(text("bias | gelu", false).find("(a.at(blockIdx.y))"), std::string::npos);
  // Backward of endings has no sums over a row, and so tiles.
  EXPECT_NE(text("bias | logsumexp | entropy", true).find("(a.at(blockIdx.y))"), std::string::npos);
  expect_defined(config_names(plain_headers()), text("bias | gelu", true));
}

TEST(Group, OnePartIsNoGradient) {
  const call c = call_of(spec::parse("bias | gelu"), true, dtype::f32, dtype::f32, 1, 1000);
  EXPECT_NE(choose(c.r, c.a, facts_of("sm_90a")).front().with.one_part, 0);
  EXPECT_EQ(plan_of(c, 2, facts_of("sm_90a")).with.one_part, 0);
}

using GroupNvrtc = Nvrtc;

TEST_F(GroupNvrtc, CompilesForEveryChip) {
  for (const char* arch : {"sm_80", "sm_90a"}) {
    const device_facts chip = facts_of(arch);
    for (const char* text : kLines) {
      for (const bool backward : {false, true}) {
        const call c = call_of(spec::parse(text), backward, dtype::f32, dtype::f32, 16384, 1024);
        expect_compiles_well(source(c.r, plan_of(c, 16, chip).with), chip.arch_name);
      }
    }
  }
}

TEST_F(GroupNvrtc, CompilesForEveryLayout) {
  const device_facts chip = facts_of("sm_90a");
  for (const int64 columns : {7, 1001, 65536}) {
    for (const bool backward : {false, true}) {
      const call c = call_of(spec::parse("add | dropout(0.1) | rms_norm | scale"), backward, dtype::bf16, dtype::f32,
                             5000, columns, {.offset = 1, .gap = 1});
      expect_compiles_well(source(c.r, plan_of(c, 4, chip).with), chip.arch_name);
    }
  }
}

TEST_F(GroupNvrtc, CompilesForAsManyAsFit) {
  const device_facts chip = facts_of("sm_90a");
  const call c = call_of(spec::parse("gelu"), false, dtype::f32, dtype::f32, 1, 4096);
  std::string packed;
  append_packed(packed, c.r, c.a);
  const plan p = plan_of(c, chip.parameter_bytes / static_cast<int64>(packed.size()), chip);
  EXPECT_NE(p.with.flat, 0);
  expect_compiles_well(source(c.r, p.with), chip.arch_name);
}

}  // namespace
}  // namespace onepass::cuda
