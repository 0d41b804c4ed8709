#include "src/plan/contraction.h"

#include <gtest/gtest.h>

namespace onepass::spec {
namespace {

contraction split(const char* text) { return contraction(parse(text)); }

std::vector<operand_facts> facts(const char* text, dtype type = dtype::f32) {
  return std::vector<operand_facts>(static_cast<std::size_t>(parse(text).operands), operand_facts{type, false});
}

TEST(Contraction, IsTwoLines) {
  const contraction c = split("dropout(0.1) | add | layer_norm(1e-3) | scale | linear | bias | dropout(0.2) | keep");
  EXPECT_EQ(c.before.text, "dropout(0.1) | add | layer_norm(1e-3) | scale");
  EXPECT_EQ(c.behind.text, "bias | dropout(0.2) | keep");
  EXPECT_EQ(c.weight, 2);
  EXPECT_EQ(c.before.first_row(), 2);
  EXPECT_EQ(c.behind.first_row(), -1);
  EXPECT_EQ(c.behind.words[0].operand, 0);
  EXPECT_EQ(c.behind.first_operand, 3);
  EXPECT_EQ(c.behind.words[1].ordinal, 1) << "two dropouts of one call draw from two streams";
  EXPECT_EQ(c.behind.words[2].ordinal, 0) << "keeps are counted from 0 again";
  EXPECT_EQ(c.behind.parameters, std::vector<double>{0.2});
}

TEST(Contraction, KernelsOfCountedDropoutsAreTheirOwn) {
  EXPECT_NE(structure(split("dropout(0.1) | linear | dropout(0.1)").behind, 0), structure(parse("dropout(0.1)"), 0));
  EXPECT_EQ(structure(split("linear | dropout(0.1)").behind, 0), structure(parse("dropout(0.1)"), 0));
}

TEST(Contraction, BothSidesMayBeEmpty) {
  const contraction c = split("linear");
  EXPECT_TRUE(c.before.words.empty());
  EXPECT_TRUE(c.behind.words.empty());
  const reads r = backward_reads(c);
  EXPECT_TRUE(r.x);
  EXPECT_FALSE(r.product);
  EXPECT_EQ(r.operands, std::vector<bool>{true});
}

TEST(Contraction, StartsAgainAtTheKeep) {
  const contraction c = split("add | keep | rms_norm | scale | linear");
  EXPECT_EQ(c.recompute.text, "rms_norm | scale");
  const reads r = backward_reads(c);
  EXPECT_FALSE(r.x);
  EXPECT_EQ(r.kept, 0);
  EXPECT_TRUE(r.statistics);
  EXPECT_EQ(r.operands, (std::vector<bool>{false, true, true}));
}

TEST(Contraction, ScoresAreMadeAgain) {
  const contraction c = split("scores | mul(0.1) | mask | softmax");
  EXPECT_TRUE(c.scores);
  EXPECT_TRUE(c.before.words.empty());
  EXPECT_EQ(c.behind.first_row(), 2);
  reads r = backward_reads(c);
  EXPECT_TRUE(r.result_behind);
  EXPECT_TRUE(r.x_for_weight) << "queries only for the gradient of the keys";
  EXPECT_FALSE(r.statistics || r.product);
  r = backward_reads(split("scores | softmax | dropout(0.1)"));
  EXPECT_TRUE(r.x && r.statistics);
  EXPECT_FALSE(r.result_behind || r.product || r.x_for_weight);
}

TEST(Contraction, ReadsTheProductWhereAnActivationFollows) {
  EXPECT_TRUE(backward_reads(split("linear | bias | gelu")).product);
  EXPECT_FALSE(backward_reads(split("linear | bias")).product);
  EXPECT_FALSE(backward_reads(split("linear | bias | add")).product);
  const reads resumed = backward_reads(split("keep | linear | bias | keep | gelu"));
  EXPECT_FALSE(resumed.product);
  EXPECT_EQ(resumed.kept_behind, 1);
}

TEST(Contraction, WhatOnlyTheMatrixsGradientReads) {
  const reads bias = backward_reads(split("bias | linear"));
  EXPECT_TRUE(bias.x && bias.x_for_weight);
  EXPECT_EQ(bias.operands_for_weight, (std::vector<bool>{true, false}));
  const reads norm = backward_reads(split("layer_norm | scale | bias | linear"));
  EXPECT_TRUE(norm.x);
  EXPECT_FALSE(norm.x_for_weight);
  EXPECT_EQ(norm.operands_for_weight, (std::vector<bool>{false, true, false}));
  EXPECT_FALSE(backward_reads(split("softmax | linear")).x_for_weight) << "its result is made from x again";
}

TEST(Contraction, GradientsOfEveryOperand) {
  const char* text = "layer_norm | scale | bias | linear | bias | gelu";
  const contraction_gradients plan = plan_gradients(split(text), dtype::f32, facts(text), 0b11111);
  EXPECT_EQ(plan.all.inputs, (std::vector<int>{0, 1, 2, 3, 4}));
  ASSERT_EQ(plan.all.outputs.size(), 5U);
  EXPECT_EQ(plan.all.outputs[3].input, 3);
  EXPECT_FALSE(plan.all.outputs[3].column);
  EXPECT_TRUE(plan.all.outputs[4].column);
  EXPECT_EQ(plan.wants_behind, 0b11U);
  EXPECT_EQ(plan.wants_before, 0b111U);
}

TEST(Contraction, OnlyWhatIsWanted) {
  const char* text = "layer_norm | scale | linear | bias | gelu";
  const contraction_gradients bias = plan_gradients(split(text), dtype::f32, facts(text), 0b1000);
  EXPECT_FALSE(bias.wants_input || bias.wants_weight);
  EXPECT_EQ(bias.wants_behind, 0b10U);
  EXPECT_EQ(bias.all.inputs, (std::vector<int>{kUnwanted, kUnwanted, kUnwanted, 0}));
  const contraction_gradients weight = plan_gradients(split(text), dtype::f32, facts(text), 0b0100);
  EXPECT_TRUE(weight.wants_weight);
  EXPECT_FALSE(weight.wants_input);
  EXPECT_EQ(weight.wants_behind, 0b1U);
  EXPECT_EQ(weight.all.outputs.size(), 1U);
}

TEST(Contraction, AResidualBehindSharesTheUpstreamGradient) {
  const char* text = "linear | add";
  const contraction_gradients plan = plan_gradients(split(text), dtype::f32, facts(text), 0b111);
  EXPECT_EQ(plan.all.inputs, (std::vector<int>{0, 1, kUpstream}));
  EXPECT_TRUE(plan.gives_input);
}

TEST(Contraction, AResidualBeforeAnActivationSharesTheProductsGradient) {
  const char* text = "linear | add | gelu";
  const contraction_gradients plan = plan_gradients(split(text), dtype::f32, facts(text), 0b111);
  EXPECT_EQ(plan.all.inputs, (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(plan.kept_outputs, std::vector<int>{plan.behind.inputs[0]});
}

TEST(Contraction, ABiasBeforePassesTheGradientOn) {
  const char* text = "bias | linear";
  const contraction_gradients plan = plan_gradients(split(text), dtype::f32, facts(text), 0b111);
  EXPECT_TRUE(plan.gives_input);
  EXPECT_EQ(plan.all.inputs, (std::vector<int>{0, 1, 2}));
  EXPECT_TRUE(plan.all.outputs[1].column);
}

TEST(Contraction, FewFeaturesAreWords) {
  const line of = with_features(split("add | keep | tanh | linear | bias").before, 2);
  EXPECT_EQ(of.operands, 3);
  EXPECT_TRUE(of.by_rows());
  EXPECT_EQ(type_text(of, 0, false),
            "line<chain<placed<word::add, 0, -1, -1>, placed<word::keep, -1, -1, 0>, placed<word::tanh, -1, -1, -1>>, "
            "word::whole, -1, chain<placed<word::feature, 1, -1, 0>, placed<word::feature, 2, -1, 1>>>");
  EXPECT_NE(type_text(of, 0, true).find("word::resume"), std::string::npos);
  const reads read = backward_reads(of);
  EXPECT_FALSE(read.x);
  EXPECT_EQ(read.kept, 0);
  EXPECT_EQ(read.operands, (std::vector<bool>{false, true, true}));
  const gradients plan = plan_gradients(of, dtype::f32, {{dtype::f32}, {dtype::f32}, {dtype::f32}}, 0b1111);
  EXPECT_EQ(plan.inputs, (std::vector<int>{0, 0, 1, 2})) << "x and what is added share theirs";
  EXPECT_EQ(plan.wants_column, 0b110u);
}

TEST(Contraction, FewFeaturesBehindARowWord) {
  const line of = with_features(split("layer_norm | scale | linear").before, 1);
  EXPECT_EQ(
      type_text(of, 0, true),
      "line<chain<>, word::layer_norm, 0, chain<placed<word::scale, 0, -1, -1>, placed<word::feature, 1, -1, 0>>>");
  EXPECT_TRUE(backward_reads(of).x && backward_reads(of).statistics);
  EXPECT_EQ(why_not_small_n(split("layer_norm | scale | linear"), 8), "");
  EXPECT_NE(why_not_small_n(split("linear"), 9), "");
  EXPECT_NE(why_not_small_n(split("scale | bias | scale | bias | scale | linear"), 8), "") << "13 operands";
}

TEST(Contraction, LinesThatAreSoftmaxButForAFactor) {
  EXPECT_EQ(softmax_scale(parse("softmax")), 1.0);
  EXPECT_EQ(softmax_scale(parse("mul(0.5) | mask | causal | add | mul(-3) | softmax")), -1.5);
  for (const char* text : {"mul(0.5)", "rms_norm", "softmax | dropout(0.1)", "softmax | mul(2)", "keep | softmax",
                           "mul(0.5) | tanh | softmax", "bias | softmax"})
    EXPECT_EQ(softmax_scale(parse(text)), std::nullopt) << text;
}

TEST(Contraction, LeadingMasks) {
  using operands = std::vector<int>;
  EXPECT_EQ(leading_masks(parse("softmax")), operands());
  EXPECT_EQ(leading_masks(parse("mask | mul(0.5) | mask | softmax")), (operands{0, 1}));
  EXPECT_EQ(leading_masks(parse("mul(0.5) | add | mask | softmax")), operands()) << "what is added may be infinite";
  EXPECT_EQ(leading_masks(parse("mask | tanh | mask | softmax")), operands{0}) << "tanh(-inf) is -1";
  for (const char* text : {"mul(-2) | mask | softmax", "mul(0) | mask | softmax", "mul(1e-60) | mask | softmax"})
    EXPECT_EQ(leading_masks(parse(text)), operands()) << text;
}

TEST(Contraction, CausalLines) {
  for (const char* text :
       {"causal | softmax", "mul(0.1) | causal | softmax | dropout(0.1)", "causal | mask | add | softmax"})
    EXPECT_TRUE(is_causal(parse(text))) << text;
  for (const char* text : {"softmax", "causal | tanh | softmax", "causal | mul(-1) | softmax", "softmax | causal",
                           "causal", "causal | rms_norm"})
    EXPECT_FALSE(is_causal(parse(text))) << text;
  EXPECT_TRUE(has_softmax(parse("mul(0.1) | softmax | keep")));
  EXPECT_FALSE(has_softmax(parse("rms_norm")) || has_softmax(parse("mul(0.1)")));
  EXPECT_TRUE(is_one_bias(parse("bias")));
  EXPECT_FALSE(is_one_bias(parse("add")) || is_one_bias(parse("bias | bias")));
}

TEST(Contraction, WordsBehindSoftmax) {
  const line linear = parse("causal | softmax | mul(2) | dropout(0.1) | scale | keep");
  EXPECT_TRUE(is_linear(linear) && maps_zero_to_zero(linear));
  for (const char* text : {"softmax | relu", "softmax | gelu | mul(2)", "softmax | gate(tanh)", "softmax | softsign"}) {
    EXPECT_TRUE(maps_zero_to_zero(parse(text))) << text;
    EXPECT_FALSE(is_linear(parse(text))) << text;
  }
  for (const char* text : {"softmax | add", "softmax | bias", "softmax | gate(sigmoid)", "softmax | softplus"})
    EXPECT_FALSE(maps_zero_to_zero(parse(text)) || is_linear(parse(text))) << text;
  EXPECT_TRUE(maps_zero_to_zero(parse("bias | softmax"))) << "what stands before softmax does not count";
}

}  // namespace
}  // namespace onepass::spec
