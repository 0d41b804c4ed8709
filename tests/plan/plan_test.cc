// What backward reads and writes, the type text, and the cost.
#include "src/plan/plan.h"

#include <gtest/gtest.h>

namespace onepass::spec {
namespace {

std::vector<operand_facts> all(const line& l, dtype type) {
  return std::vector<operand_facts>(static_cast<std::size_t>(l.operands), operand_facts{type, false});
}

TEST(Reads, ValueFreeLinesReadNothingButTheGradient) {
  const reads r = backward_reads(parse("bias | dropout(0.1) | add"));
  EXPECT_FALSE(r.x);
  EXPECT_EQ(r.operands, (std::vector<bool>{false, false}));
}

TEST(Reads, ActivationsReadXAndWhatStandsBefore) {
  const reads r = backward_reads(parse("bias | gelu | add"));
  EXPECT_TRUE(r.x);
  EXPECT_EQ(r.operands, (std::vector<bool>{true, false}));
}

TEST(Reads, ResidualNormsResumeFromTheKeptValue) {
  const reads r = backward_reads(parse("bias | dropout(0.1) | add | keep | rms_norm(1e-6) | scale"));
  EXPECT_EQ(r.kept, 0);
  EXPECT_FALSE(r.x);
  EXPECT_EQ(r.operands, (std::vector<bool>{false, false, true}));
}

TEST(Reads, NoResumeWhereAValueIsNeededBeforeTheKeep) {
  const reads r = backward_reads(parse("gelu | keep | rms_norm(1e-6)"));
  EXPECT_EQ(r.kept, -1);
  EXPECT_TRUE(r.x);
}

TEST(Reads, SoftmaxAtTheEndResumesFromTheResult) {
  const reads r = backward_reads(parse("mul(0.5) | mask | softmax"));
  EXPECT_TRUE(r.result);
  EXPECT_FALSE(r.x);
  EXPECT_FALSE(r.statistics);
  EXPECT_EQ(r.operands, (std::vector<bool>{true}));
}

TEST(Reads, SoftmaxReadsXWhereMoreIsToComeOrAValueIsNeeded) {
  for (const char* text : {"softmax | dropout(0.1)", "softmax | keep", "tanh | softmax"}) {
    const reads r = backward_reads(parse(text));
    EXPECT_FALSE(r.result) << text;
    EXPECT_TRUE(r.x) << text;
    EXPECT_TRUE(r.statistics) << text;
  }
}

TEST(Reads, AllThatMakesTheResultAgain) {
  const reads affine = backward_reads(parse("layer_norm | scale | bias"), true);
  EXPECT_TRUE(affine.x && affine.statistics);
  EXPECT_EQ(affine.operands, (std::vector<bool>{true, true}));
  const reads resumed = backward_reads(parse("bias | dropout(0.1) | add | keep | rms_norm(1e-6) | scale | bias"), true);
  EXPECT_EQ(resumed.kept, 0);
  EXPECT_FALSE(resumed.x);
  EXPECT_EQ(resumed.operands, (std::vector<bool>{false, false, true, true}));
  const reads free = backward_reads(parse("bias | add | keep"), true);
  EXPECT_TRUE(free.x);
  EXPECT_EQ(free.operands, (std::vector<bool>{true, true}));
}

TEST(Gradients, AddLastIsTheUpstreamGradientItself) {
  const line l = parse("bias | dropout(0.1) | add");
  const gradients g = plan_gradients(l, dtype::bf16, all(l, dtype::bf16), 7);
  EXPECT_EQ(g.inputs[2], kUpstream);
  ASSERT_EQ(g.outputs.size(), 2u);  // dx and the column sum
  EXPECT_EQ(g.wants_column, 1u);
  EXPECT_EQ(g.wants_tensor, 0u);
}

TEST(Gradients, XAndResidualShareOneTensorInAddNorm) {
  const line l = parse("add | keep | layer_norm | scale | bias");
  const gradients g = plan_gradients(l, dtype::f32, all(l, dtype::f32), 15);
  EXPECT_EQ(g.inputs[0], g.inputs[1]);
  EXPECT_EQ(g.outputs.size(), 3u);
}

TEST(Gradients, AnotherDtypeOrABroadcastIsWrittenApart) {
  const line l = parse("add | relu");
  EXPECT_EQ(plan_gradients(l, dtype::bf16, {{dtype::f32, false}}, 3).outputs.size(), 2u);
  EXPECT_EQ(plan_gradients(l, dtype::bf16, {{dtype::bf16, true}}, 3).outputs.size(), 2u);
  EXPECT_EQ(plan_gradients(l, dtype::bf16, {{dtype::bf16, false}}, 3).outputs.size(), 1u);
}

TEST(Gradients, OnlyTheWantedOnes) {
  const line l = parse("layer_norm | scale | bias");
  const gradients g = plan_gradients(l, dtype::f32, all(l, dtype::f32), 0b100);  // the bias of the affine
  EXPECT_FALSE(g.wants_dx);
  EXPECT_EQ(g.wants_column, 0u | 1u << 1);
  EXPECT_EQ(g.inputs[0], kUnwanted);
}

TEST(Gradients, BooleanMasksHaveNone) {
  const line l = parse("mask | softmax");
  EXPECT_EQ(plan_gradients(l, dtype::f32, {{dtype::boolean, false}}, 3).inputs[1], kUnwanted);
}

TEST(Gradients, GroupsAreThoseThatServeMostOperands) {
  const std::vector<std::int64_t> x{2, 3, 4, 8};
  const auto with = [&](const char* text, const std::vector<std::vector<std::int64_t>>& sizes) {
    const line of = parse(text);
    std::vector<std::int64_t> types;
    for (const auto& own : sizes) types.push_back(static_cast<std::int64_t>(dtype::f32) + repetition(own, x));
    return plan_gradients(of, dtype::f32, operand_facts_of(types.data(), types.size()), ~std::uint64_t{0});
  };
  const gradients nested = with("scale | bias | gelu | add", {{2, 1, 1, 8}, {2, 3, 1, 8}, {1, 1, 1, 8}});
  EXPECT_EQ(nested.wants_column, 0b111u);
  EXPECT_EQ(nested.grouped, 0b011u);
  EXPECT_EQ(nested.has, 0b110u);
  const gradients unlike = with("scale | bias | gelu | add", {{2, 1, 1, 8}, {1, 1, 4, 8}, {4, 8}});
  EXPECT_EQ(unlike.wants_tensor, 0b001u);
  EXPECT_EQ(unlike.grouped, 0b110u);
  EXPECT_EQ(with("gelu | add", {{2, 3, 4, 1}}).wants_tensor, 1u);  // a number a row is a sum over columns
  EXPECT_EQ(with("gelu | add", {{2, 1, 4, 1}}).has, 0b101u);
}

TEST(TypeText, ScaleWithANumberIsAnotherStruct) {
  EXPECT_NE(type_text(parse("scale"), 0, false).find("placed<word::scale, 0, -1, -1>"), std::string::npos);
  EXPECT_NE(type_text(parse("scale(1)"), 0, false).find("placed<word::scale_plus, 0, 0, -1>"), std::string::npos);
  EXPECT_NE(structure(parse("scale"), 0), structure(parse("scale(1)"), 0));
}

TEST(TypeText, NamesStagesOperandsNumbersAndTheResumePoint) {
  const line l = parse("bias | dropout(0.1) | add | keep | rms_norm | scale");
  EXPECT_EQ(type_text(l, 0, false),
            "line<chain<placed<word::bias, 0, -1, -1>, placed<word::dropout, -1, 0, 0>, placed<word::add, 1, -1, -1>, "
            "placed<word::keep, -1, -1, 0>>, word::rms_norm, 1, chain<placed<word::scale, 2, -1, -1>>>");
  EXPECT_NE(type_text(l, 0, true).find("word::resume, -1, -1, 0"), std::string::npos);
}

TEST(TypeText, ARowWordWhoseResultIsGivenIsResumed) {
  const line l = parse("mul(0.5) | softmax");
  EXPECT_EQ(type_text(l, 0, true),
            "line<chain<placed<word::mul, -1, 0, -1>>, word::resumed<word::softmax>, -1, chain<>>");
  EXPECT_EQ(type_text(l, 0, false).find("resumed"), std::string::npos);
}

TEST(TypeText, MasksAreToldApart) {
  const line l = parse("mul(0.5) | mask | softmax");
  EXPECT_NE(type_text(l, 1, false).find("mask_boolean"), std::string::npos);
  EXPECT_NE(type_text(l, 0, false).find("mask_additive"), std::string::npos);
  EXPECT_EQ(structure(l, 1), "mul|mask(bool)|softmax");
}

TEST(Cost, EveryTensorOnce) {
  const cost c = estimate(parse("add | keep | rms_norm | scale"), 1000, 100, 0, dtype::bf16);
  constexpr std::int64_t tensor = 1000 * 100 * 2, column = 200, statistics = 4000;
  EXPECT_EQ(c.forward.bytes, 4 * tensor + column + statistics);
  EXPECT_EQ(c.saved_bytes, tensor + column + statistics);
  EXPECT_EQ(c.backward.bytes, c.saved_bytes + 2 * tensor + tensor + column);  // dy, dh in; dx, dg out
}

}  // namespace
}  // namespace onepass::spec
