// Lines with `values`: the line that makes the weights, what backward reads, and where gradients come from.
#include "src/plan/attention.h"

#include <gtest/gtest.h>

namespace onepass::spec {
namespace {

attention split(const char* text) { return attention(parse(text)); }

std::vector<operand_facts> facts(const char* text) {
  return std::vector<operand_facts>(static_cast<std::size_t>(parse(text).operands), operand_facts{dtype::bf16, false});
}

constexpr const char* kLine = "scores | mul(0.1) | mask | softmax | dropout(0.1) | values";

TEST(Attention, TheWeightsAreALineOfTheirOwn) {
  const attention of = split(kLine);
  EXPECT_EQ(of.scores.text, "scores | mul(0.1) | mask | softmax | dropout(0.1)");
  EXPECT_TRUE(of.scores.scores());
  EXPECT_EQ(of.scores.operands, 2);
  EXPECT_EQ(of.values, 2);
  EXPECT_FALSE(of.keeps_weights);
}

TEST(Attention, KeptWeightsAreNoWordOfTheirLine) {
  const attention of = split("scores | keep | softmax | keep | values");
  EXPECT_TRUE(of.keeps_weights);
  EXPECT_EQ(of.scores.text, "scores | keep | softmax");
  EXPECT_EQ(backward_reads(of).kept_behind, 1);
}

TEST(Attention, BackwardReadsInputsResultAndStatistics) {
  const reads of = backward_reads(parse(kLine));
  EXPECT_TRUE(of.x && of.result && of.statistics);
  EXPECT_EQ(of.operands, std::vector<bool>(3, true));
  EXPECT_FALSE(backward_reads(parse("scores | silu | values")).statistics);
}

TEST(Attention, GradientsAreThoseOfTheWeightsThenTheValues) {
  const attention_gradients all = plan_gradients(split(kLine), dtype::bf16, facts(kLine), 0b1111);
  EXPECT_EQ(all.all.inputs, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(all.all.outputs.back().input, 3);
  EXPECT_EQ(all.wants_scores, 0b111U);
  EXPECT_FALSE(all.gives_weights);
  const attention_gradients values = plan_gradients(split(kLine), dtype::bf16, facts(kLine), 0b1000);
  EXPECT_EQ(values.all.inputs, (std::vector<int>{kUnwanted, kUnwanted, kUnwanted, 0}));
  EXPECT_EQ(values.wants_scores, 0U);
}

TEST(Attention, WhatIsAddedToTheWeightsHasTheirGradient) {
  const char* text = "scores | softmax | add | values";
  const attention_gradients plan = plan_gradients(split(text), dtype::bf16, facts(text), 0b1111);
  EXPECT_TRUE(plan.gives_weights);
  EXPECT_EQ(plan.all.inputs, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(plan.all.outputs[2].input, 2);
}

}  // namespace
}  // namespace onepass::spec
