// The kernel whose clusters hold rows of scores: it compiles, and fits the chip.
#include "src/cuda/attention/probabilities_sm90.h"

#include <gtest/gtest.h>

#include "src/plan/contraction.h"
#include "tests/cuda/config_names.h"
#include "tests/cuda/imagined_attention.h"
#include "tests/cuda/nvrtc_fixture.h"

namespace onepass::cuda {
namespace {

constexpr const char *kLine = "scores | mul(0.125) | add | softmax", *kEasy = "scores | mul(0.125) | softmax",
                     *kPadded = "scores | mul(0.125) | mask | softmax";

TEST(HeldScores, ClustersHoldAllRowsAndFitTheChip) {
  const device_facts chip = facts_of("sm_90a");
  for (const char* line : {kLine, kEasy, "scores | add | add | add | add | softmax"}) {
    for (const int64 depth : {8, 64, 128}) {
      for (const int64 keys : {8, 128, 136, 1000, 2048, 4096, 8192}) {
        for (const int64 rows : {1, 64, 1000, 5000}) {
          const imagined_attention of(line, {rows, keys, depth, 0}, dtype::bf16);
          const attention_call call = of.call();
          if (!why_not_held(call.behind, depth, keys, false, chip).empty()) continue;
          const tiles_plan p = plan_held_scores(call, chip);
          const int64 held = int64{p.cluster} * p.groups * p.tile, strips = (rows + 63) / 64,
                      each = (strips + p.blocks - 1) / p.blocks;
          EXPECT_LE((static_cast<int>(p.shared_bytes) + 2048) * p.blocks_per_sm, chip.shared_per_block + 1024)
              << line << " " << depth << " " << keys;
          EXPECT_LE(p.cluster, chip.cluster);
          EXPECT_GE(held, keys);
          EXPECT_LT(held / 2, std::max<int64>(keys, p.tile)) << "half of a cluster without keys";
          EXPECT_LT((p.blocks - 1) * each, strips) << "a cluster without strips";
          EXPECT_EQ(p.grid, 6 * p.blocks * p.cluster);
          EXPECT_GE(p.stages, 2);
        }
      }
    }
  }
}

TEST(HeldScores, LinesWithoutTensorsHoldMoreInAWarpgroup) {
  const device_facts chip = facts_of("sm_90a");
  const auto tile = [&](const char* line) {
    const imagined_attention of(line, {2048, 2048, 64, 0}, dtype::bf16);
    return plan_held_scores(of.call(), chip).tile;
  };
  EXPECT_EQ(tile(kEasy), 256);
  EXPECT_EQ(tile(kLine), 128);
  EXPECT_EQ(tile("scores | mul(0.125) | softmax | dropout(0.1)"), 128);
  EXPECT_EQ(tile(kPadded), 128);
  imagined_attention padded(kPadded, {2048, 2048, 64, 0}, dtype::bf16);
  padded.pad();
  EXPECT_EQ(plan_held_scores(padded.call(), chip).tile, 256) << "it leaves out keys, and nothing stands beside scores";
  EXPECT_EQ(why_not_held(padded.call().behind, 128, 2048, false, chip, count_key_masks(padded.call())), "");
  imagined_attention deep(kPadded, {2048, 2048, 128, 0}, dtype::bf16);
  deep.pad();
  EXPECT_EQ(plan_held_scores(deep.call(), chip).blocks_per_sm, 2);
  imagined_attention long_rows(kPadded, {2048, 8192, 64, 0}, dtype::bf16);
  long_rows.pad();
  EXPECT_EQ(plan_held_scores(long_rows.call(), chip).cluster, 16);
  EXPECT_EQ(count_key_masks(long_rows.call()), 0);
}

TEST(HeldScores, SaysWhyNot) {
  const device_facts chip = facts_of("sm_90a");
  const auto why = [&](const char* line, int64 depth, int64 keys, bool causal) {
    return why_not_held(request(spec::contraction(spec::parse(line)).behind, false), depth, keys, causal, chip);
  };
  EXPECT_EQ(why(kEasy, 64, 4096, false), "");
  EXPECT_EQ(why(kEasy, 128, 2048, false), "");
  EXPECT_NE(why(kEasy, 128, 2056, false).find("room"), std::string::npos);
  EXPECT_EQ(why(kLine, 64, 8192, false), "");
  EXPECT_NE(why(kLine, 72, 1000, false).find("numbers"), std::string::npos);
  EXPECT_NE(why(kEasy, 136, 1000, false).find("numbers"), std::string::npos);
  EXPECT_NE(why(kEasy, 64, 4104, false).find("room"), std::string::npos);
  EXPECT_NE(why(kLine, 64, 8200, false).find("room"), std::string::npos);
  EXPECT_NE(why(kLine, 64, 1000, true).find("left out"), std::string::npos);
}

TEST(HeldScores, TakeLongerWithTensors) {
  const device_facts chip = facts_of("sm_90a");
  const auto seconds = [&](const char* line, int64 tensors) {
    return seconds_of_held(request(spec::contraction(spec::parse(line)).behind, false), 64, 2048, 64, 2048, tensors,
                           chip);
  };
  EXPECT_GT(seconds(kLine, 1), seconds(kEasy, 0));
}

TEST(HeldScores, ItsSourceDefinesWhatKernelReads) {
  const imagined_attention of(kLine, {64, 64, 64, 0}, dtype::bf16);
  expect_defined(config_names(kProbabilities), held_source(of.call(), plan_held_scores(of.call(), facts_of("sm_90a"))));
}

using HeldScoresNvrtc = Nvrtc;

TEST_F(HeldScoresNvrtc, Compiles) {
  const auto compiles = [](const char* line, attention_sizes of, dtype type) {
    imagined_attention call(line, of, type);
    if (line == kPadded) call.pad();
    const device_facts chip = facts_of("sm_90a");
    expect_compiles_well(held_source(call.call(), plan_held_scores(call.call(), chip)), chip.arch_name);
  };
  compiles(kEasy, {2048, 2048, 64, 0}, dtype::bf16);
  compiles(kLine, {2048, 2048, 64, 0}, dtype::f16);
  compiles(kEasy, {100, 72, 128, 0}, dtype::bf16);
  compiles(kLine, {100, 8192, 64, 0}, dtype::bf16);
  compiles(kPadded, {2048, 2048, 64, 0}, dtype::bf16);
  compiles(kPadded, {100, 8192, 64, 0}, dtype::bf16);
  compiles(kPadded, {100, 1000, 128, 0}, dtype::f16);
  compiles("scores | mul(0.1) | tanh | mul(30) | mask | softmax | dropout(0.1)", {100, 1000, 32, 0}, dtype::bf16);
}

}  // namespace
}  // namespace onepass::cuda
