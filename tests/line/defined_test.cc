// Words of users: their place in the vocabulary, and the source of kernels that have them.
#include "src/line/defined.h"

#include <gtest/gtest.h>

#include <string>

#include "src/cpu/row/run.h"
#include "src/plan/plan.h"
#include "src/line/words.h"

namespace onepass::spec {
namespace {

defined_word half(const std::string& name, operand_kind operand, std::vector<std::string> parameters) {
  return {.name = name,
          .operand = operand,
          .operand_name = operand == operand_kind::none ? "" : "w",
          .parameters = std::move(parameters),
          .flops_forward = 3,
          .flops_backward = 5,
          .formula = "x / 2",
          .meaning = "half",
          .source = "template <class L> static L forward(L x) { return x / 2; }"};
}

TEST(defined, is_a_word_until_it_is_none) {
  const descriptor* about = define(half("halved", operand_kind::none, {"a", "b"}));
  EXPECT_EQ(find(words(), "halved"), about);
  EXPECT_EQ(find(activations(), "halved"), about);
  const line of = parse("bias | halved(1, -2.5e1) | mul(3) | gate(halved( 4 ,5))");
  EXPECT_EQ(of.parameters, (std::vector<double>{1, -25, 3, 4, 5}));
  EXPECT_EQ(of.words[1].parameter_slot, 0);
  EXPECT_EQ(of.words[3].parameter_slot, 3);
  EXPECT_EQ(undefine("halved"), about);
  EXPECT_EQ(undefine("halved"), nullptr);
  EXPECT_EQ(find(words(), "halved"), nullptr);
  EXPECT_THROW(parse("halved(1, 2)"), line_error);
  EXPECT_STREQ(about->name, "halved");  // who still has it may read it
}

TEST(defined, numbers_must_all_be_there) {
  define(half("halved", operand_kind::none, {"a", "b"}));
  for (const char* text : {"halved", "halved()", "halved(1)", "halved(1, 2, 3)", "halved(1, )", "halved(1 2)"})
    EXPECT_THROW(parse(text), line_error) << text;
  try {
    parse("halved(1)");
  } catch (const line_error& e) {
    EXPECT_NE(std::string(e.what()).find("'halved' takes 2 numbers (a, b)"), std::string::npos) << e.what();
  }
  undefine("halved");
}

TEST(defined, a_name_is_given_once) {
  EXPECT_THROW(define(half("gelu", operand_kind::none, {})), std::invalid_argument);
  define(half("halved", operand_kind::none, {}));
  EXPECT_THROW(define(half("halved", operand_kind::none, {})), std::invalid_argument);
  undefine("halved");
}

TEST(defined, an_operand_makes_it_affine) {
  define(half("halved", operand_kind::column, {}));
  const line of = parse("halved | bias");
  EXPECT_EQ(of.operands, 2);
  EXPECT_EQ(find(activations(), "halved"), nullptr);
  const reads read = backward_reads(of);
  EXPECT_TRUE(read.x);
  EXPECT_EQ(read.operands, (std::vector<bool>{true, false}));
  undefine("halved");
}

TEST(defined, a_row_word_saves_its_sums) {
  defined_word word = half("halved", operand_kind::none, {"a"});
  word.kind = defined_kind::row, word.sums = 2;
  const descriptor* about = define(word);
  EXPECT_EQ(about->kind, word_kind::row);
  EXPECT_EQ(find(activations(), "halved"), nullptr);
  const line of = parse("halved(2) | scale | halved(3)");
  EXPECT_EQ(of.row_words, (std::vector<int>{0, 2}));
  EXPECT_EQ(of.statistics(dtype::bf16), 4);
  EXPECT_TRUE(backward_reads(of).x && backward_reads(of).statistics);
  undefine("halved");
  word.kind = defined_kind::ending, word.sums = 1;
  EXPECT_EQ(define(word)->sums, 0);
  EXPECT_TRUE(parse("halved(2)").result(0).is_number());
  undefine("halved");
}

TEST(defined, another_source_is_another_type) {
  define(half("halved", operand_kind::none, {}));
  const line first = parse("halved");
  const std::string type = type_text(first, 0, false), structure_of = structure(first, 0);
  undefine("halved");
  defined_word other = half("halved", operand_kind::none, {});
  other.source += " ";
  define(std::move(other));
  EXPECT_NE(type_text(parse("halved"), 0, false), type);
  EXPECT_NE(structure(parse("halved"), 0), structure_of);
  EXPECT_EQ(type_text(first, 0, false), type);  // who still runs the first
  EXPECT_NE(cpu::source(first, 0, dtype::f32).find("struct halved_"), std::string::npos);
  undefine("halved");
}

TEST(defined, kernels_begin_with_the_words_they_have) {
  define(half("halved", operand_kind::none, {}));
  define(half("halved_again", operand_kind::none, {}));
  const std::string source = cpu::source(parse("halved | gate(halved)"), 0, dtype::f64);
  const auto at = source.find("#line 1 \"halved\"");
  ASSERT_NE(at, std::string::npos);
  EXPECT_LT(source.find("onepass/word/user.h"), at);
  EXPECT_LT(at, source.find("onepass_kernels"));
  EXPECT_EQ(source.find("#line 1 \"halved\"", at + 1), std::string::npos);  // once
  EXPECT_EQ(source.find("halved_again"), std::string::npos);
  EXPECT_EQ(cpu::source(parse("gelu"), 0, dtype::bf16).find("user"), std::string::npos);
  undefine("halved"), undefine("halved_again");
}

}  // namespace
}  // namespace onepass::spec
