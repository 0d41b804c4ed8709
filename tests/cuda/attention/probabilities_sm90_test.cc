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

TEST(ProbabilitiesSm90, ClustersHoldAllRowsAndFitTheChip) {
  const device_facts chip = facts_of("sm_90a");
  for (const char* line : {kLine, kEasy, "scores | add | add | add | add | softmax"}) {
    for (const int64 head_dim : {8, 64, 128}) {
      for (const int64 keys : {8, 128, 136, 1000, 2048, 4096, 8192}) {
        for (const int64 rows : {1, 64, 1000, 5000}) {
          const imagined_attention of(line, {rows, keys, head_dim, 0}, dtype::bf16);
          const attention_call call = of.call();
          if (!why_not_probabilities_sm90(call.behind, head_dim, keys, false, chip).empty()) continue;
          const tiles_plan p = plan_probabilities_sm90(call, chip);
          const int64 held = int64{p.cluster} * p.warpgroups * p.tile, row_tiles = (rows + 63) / 64,
                      each = (row_tiles + p.blocks - 1) / p.blocks;
          EXPECT_LE((static_cast<int>(p.shared_bytes) + 2048) * p.blocks_per_sm, chip.shared_per_block + 1024)
              << line << " " << head_dim << " " << keys;
          EXPECT_LE(p.cluster, chip.cluster);
          EXPECT_GE(held, keys);
          EXPECT_LT(held / 2, std::max<int64>(keys, p.tile)) << "half of a cluster without keys";
          EXPECT_LT((p.blocks - 1) * each, row_tiles) << "a cluster without row_tiles";
          EXPECT_EQ(p.grid, 6 * p.blocks * p.cluster);
          EXPECT_GE(p.stages, 2);
        }
      }
    }
  }
}

TEST(ProbabilitiesSm90, LinesWithoutTensorsHoldMoreInAWarpgroup) {
  const device_facts chip = facts_of("sm_90a");
  const auto tile = [&](const char* line) {
    const imagined_attention of(line, {2048, 2048, 64, 0}, dtype::bf16);
    return plan_probabilities_sm90(of.call(), chip).tile;
  };
  EXPECT_EQ(tile(kEasy), 256);
  EXPECT_EQ(tile(kLine), 128);
  EXPECT_EQ(tile("scores | mul(0.125) | softmax | dropout(0.1)"), 128);
  EXPECT_EQ(tile(kPadded), 128);
  imagined_attention padded(kPadded, {2048, 2048, 64, 0}, dtype::bf16);
  padded.pad();
  EXPECT_EQ(plan_probabilities_sm90(padded.call(), chip).tile, 256)
      << "it leaves out keys, and nothing stands beside scores";
  EXPECT_EQ(why_not_probabilities_sm90(padded.call().behind, 128, 2048, false, chip, count_key_masks(padded.call())),
            "");
  imagined_attention deep(kPadded, {2048, 2048, 128, 0}, dtype::bf16);
  deep.pad();
  EXPECT_EQ(plan_probabilities_sm90(deep.call(), chip).blocks_per_sm, 2);
  imagined_attention long_rows(kPadded, {2048, 8192, 64, 0}, dtype::bf16);
  long_rows.pad();
  EXPECT_EQ(plan_probabilities_sm90(long_rows.call(), chip).cluster, 16);
  EXPECT_EQ(count_key_masks(long_rows.call()), 0);
}

TEST(ProbabilitiesSm90, SaysWhyNot) {
  const device_facts chip = facts_of("sm_90a");
  const auto why = [&](const char* line, int64 head_dim, int64 keys, bool causal) {
    return why_not_probabilities_sm90(request(spec::contraction(spec::parse(line)).behind, false), head_dim, keys,
                                      causal, chip);
  };
  EXPECT_EQ(why(kEasy, 64, 4096, false), "");
  EXPECT_EQ(why(kEasy, 128, 2048, false), "");
  EXPECT_NE(why(kEasy, 128, 2056, false).find("room"), std::string::npos);
  EXPECT_EQ(why(kLine, 64, 8192, false), "");
  EXPECT_NE(why(kLine, 72, 1000, false).find("head_dim"), std::string::npos);
  EXPECT_NE(why(kEasy, 136, 1000, false).find("head_dim"), std::string::npos);
  EXPECT_NE(why(kEasy, 64, 4104, false).find("room"), std::string::npos);
  EXPECT_NE(why(kLine, 64, 8200, false).find("room"), std::string::npos);
  EXPECT_NE(why(kLine, 64, 1000, true).find("skip masked tiles"), std::string::npos);
}

TEST(ProbabilitiesSm90, TakeLongerWithTensors) {
  const device_facts chip = facts_of("sm_90a");
  const auto seconds = [&](const char* line, int64 tensors) {
    return seconds_of_probabilities_sm90(request(spec::contraction(spec::parse(line)).behind, false), 64, 2048, 64,
                                         2048, tensors, chip);
  };
  EXPECT_GT(seconds(kLine, 1), seconds(kEasy, 0));
}

TEST(ProbabilitiesSm90, ItsSourceDefinesWhatKernelReads) {
  const imagined_attention of(kLine, {64, 64, 64, 0}, dtype::bf16);
  expect_defined(config_names(kProbabilities),
                 probabilities_sm90_source(of.call(), plan_probabilities_sm90(of.call(), facts_of("sm_90a"))));
}

using ProbabilitiesSm90Nvrtc = Nvrtc;

TEST_F(ProbabilitiesSm90Nvrtc, Compiles) {
  const auto compiles = [](const char* line, attention_sizes of, dtype type) {
    imagined_attention call(line, of, type);
    if (line == kPadded) call.pad();
    const device_facts chip = facts_of("sm_90a");
    expect_compiles_well(probabilities_sm90_source(call.call(), plan_probabilities_sm90(call.call(), chip)),
                         chip.arch_name);
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
