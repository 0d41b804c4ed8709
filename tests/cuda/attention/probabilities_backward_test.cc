// Backward of lines with `scores` and softmax in one kernel: it compiles, and fits the chip.
#include "src/cuda/attention/probabilities_backward.h"

#include <gtest/gtest.h>

#include "src/choose/choose.h"
#include "src/cuda/row/configuration.h"
#include "tests/cuda/config_names.h"
#include "tests/cuda/nvrtc_fixture.h"

namespace onepass::cuda {
namespace {

struct sizes {
  int64 query_heads, rows, head_dim, keys;
};

probabilities_backward_call imagined(sizes of, dtype type) {
  const auto rows_of = [&](int64 query_heads, int64 rows, int64 head_dim) {
    const int64 matrix = rows * head_dim;
    return batched_rows{
        nullptr, 2, 3, query_heads, rows, head_dim, 3 * query_heads * matrix, query_heads * matrix, matrix, head_dim};
  };
  return {.type = type,
          .factor = 0.125f,
          .queries = rows_of(of.query_heads, of.rows, of.head_dim),
          .keys = rows_of(1, of.keys, of.head_dim),
          .probabilities = rows_of(of.query_heads, of.rows, of.keys),
          .grad_probabilities = rows_of(of.query_heads, of.rows, of.keys)};
}

TEST(ProbabilitiesBackward, ClustersShareAllKeysAndFitTheChip) {
  const device_facts chip = facts_of("sm_90a");
  for (const int64 head_dim : {8, 64, 72, 128}) {
    for (const int64 keys : {8, 128, 136, 1000, 2048}) {
      ASSERT_EQ(why_not_probabilities_backward({6, 1, 100, head_dim, keys}, dtype::bf16, chip), "")
          << head_dim << " " << keys;
      const probabilities_backward_plan p =
          plan_probabilities_backward(imagined({1, 1000, head_dim, keys}, dtype::bf16));
      EXPECT_LE(static_cast<int>(p.shared_bytes) + 1024, chip.shared_per_block) << head_dim << " " << keys;
      EXPECT_GE(p.cluster * p.tile, keys);
      EXPECT_TRUE(p.cluster == 1 || (p.cluster / 2) * p.tile < keys) << "half the cluster has no keys";
    }
  }
}

TEST(ProbabilitiesBackward, RowTilesAreSharedEvenlyUnlessEachClusterHasItsBatches) {
  const auto shared = [](int64 batches, int64 rows, int room) {
    return schedule_row_tiles({batches, 1, rows, 64, 2048}, room);
  };
  EXPECT_EQ(shared(64, 2048, 15).count, 15);
  EXPECT_EQ(shared(64, 2048, 15).partial_elements, 2 * 15 * 2048 * 64);
  EXPECT_EQ(shared(60, 2048, 15).count, 15);
  EXPECT_EQ(shared(60, 2048, 15).partial_elements, 0);
  EXPECT_EQ(shared(15, 2048, 15).partial_elements, 0);
  EXPECT_EQ(shared(1, 2048, 15).count, 15) << "a batch is shared by all";
  EXPECT_EQ(shared(3, 64, 15).count, 3) << "a row tile cannot be shared";
  EXPECT_EQ(shared(14, 128, 15).count, 14) << "adding up takes longer than a row tile";
}

TEST(ProbabilitiesBackward, SaysWhyNot) {
  const device_facts chip = facts_of("sm_90a");
  const auto why_not = [&](int64 head_dim, int64 keys, dtype type, const device_facts& on) {
    return why_not_probabilities_backward({64, 1, 1000, head_dim, keys}, type, on);
  };
  EXPECT_NE(why_not(64, 1000, dtype::f32, chip).find("bfloat16"), std::string::npos);
  EXPECT_NE(why_not(64, 1001, dtype::bf16, chip).find("multiples of 8"), std::string::npos);
  EXPECT_NE(why_not(136, 1000, dtype::bf16, chip).find("at most 128"), std::string::npos);
  EXPECT_NE(why_not(64, 4104, dtype::bf16, chip).find("cluster"), std::string::npos);
  EXPECT_NE(why_not(64, 1000, dtype::bf16, facts_of("sm_80")).find("9.0"), std::string::npos);
}

// Measured: docs/measured-facts.md, "Rows that a cluster holds".
TEST(ProbabilitiesBackward, LeaveToProductsWhatThoseDoFaster) {
  device_facts h200 = facts_of("sm_90a"), h100 = h200;
  h100.bytes_per_second = 2.9e12;
  const auto serves = [](probabilities_sizes of, const device_facts& on) {
    const spec::contraction line(spec::parse("scores | mul(0.125) | softmax"));
    const choice::sizes sizes{.rows = of.batches * of.query_heads * of.rows,
                              .depth = of.head_dim,
                              .columns = of.keys,
                              .type = dtype::bf16,
                              .matrices = of.batches,
                              .group = of.query_heads};
    const choice::call call{.of = line, .sizes = sizes, .backward = true};
    return choice::choose(call, &on).chosen().by == choice::implementation::cluster;
  };
  EXPECT_TRUE(serves({64, 1, 2048, 64, 2048}, h200));
  EXPECT_TRUE(serves({256, 1, 512, 64, 512}, h200));
  EXPECT_TRUE(serves({15, 1, 2048, 64, 2048}, h200));
  EXPECT_TRUE(serves({16, 1, 2048, 64, 2048}, h200));
  EXPECT_TRUE(serves({1, 1, 128, 64, 512}, h200));
  EXPECT_TRUE(serves({16, 4, 2048, 64, 2048}, h200));
  EXPECT_TRUE(serves({12, 1, 512, 64, 512}, h200));
  EXPECT_TRUE(serves({16384, 1, 128, 64, 128}, h100));
  EXPECT_TRUE(serves({16384, 1, 64, 64, 64}, h100));
  EXPECT_TRUE(serves({16384, 1, 128, 128, 128}, h100));
  EXPECT_TRUE(serves({16384, 1, 128, 128, 128}, h200));
  EXPECT_FALSE(serves({16384, 1, 64, 128, 64}, h100)) << "most of what both move are queries and keys";
  EXPECT_FALSE(serves({16384, 1, 64, 64, 64}, h200)) << "as above, and its memory serves three kernels better";
  EXPECT_TRUE(serves({64, 1, 4096, 64, 64}, h200));
  EXPECT_TRUE(serves({64, 1, 1024, 128, 1024}, h100));
  EXPECT_TRUE(serves({256, 1, 512, 128, 512}, h100));
  EXPECT_TRUE(serves({64, 1, 1024, 128, 1024}, h200));
  EXPECT_TRUE(serves({1024, 1, 512, 128, 512}, h200));
  EXPECT_TRUE(serves({64, 1, 2048, 128, 2048}, h100));
  EXPECT_TRUE(serves({16, 1, 2048, 128, 2048}, h100));
  EXPECT_FALSE(serves({64, 1, 2048, 128, 2048}, h200)) << "seven clusters of 16 blocks";
}

TEST(ProbabilitiesBackward, TheSourceDefinesWhatKernelReads) {
  const probabilities_backward_call call = imagined({2, 64, 64, 2048}, dtype::bf16);
  const std::string text = source(call, plan_probabilities_backward(call));
  for (const std::string& name : config_names(kProbabilitiesBackward))
    EXPECT_NE(text.find(name), std::string::npos) << name;
}

using ProbabilitiesBackwardNvrtc = Nvrtc;

TEST_F(ProbabilitiesBackwardNvrtc, Compile) {
  const auto compile = [](sizes of, dtype type) {
    const probabilities_backward_call call = imagined(of, type);
    expect_compiles_well(source(call, plan_probabilities_backward(call)), "sm_90a");
  };
  compile({1, 2048, 64, 2048}, dtype::bf16);
  compile({4, 100, 128, 2048}, dtype::bf16);
  compile({1, 100, 128, 200}, dtype::f16);
  compile({1, 100, 32, 200}, dtype::f16);
  compile({1, 100, 64, 128}, dtype::bf16);
  compile({1, 100, 128, 128}, dtype::f16);
  for (const dtype type : {dtype::bf16, dtype::f16}) expect_compiles_well(reduce_dk_source(type), "sm_90a");
}

}  // namespace
}  // namespace onepass::cuda
