// The parser: what it accepts, and what its messages say.
#include "src/line/line.h"

#include <gtest/gtest.h>

#include <cmath>

namespace onepass::spec {
namespace {

std::string message(const char* text) {
  try {
    parse(text);
  } catch (const line_error& e) {
    return e.what();
  }
  return "(no error)";
}

TEST(Line, ReadsWordsNumbersAndOperands) {
  const line l = parse("  bias|dropout( 0.1 ) |add | keep| rms_norm(1_0e-7)|scale ");
  ASSERT_EQ(l.words.size(), 6u);
  EXPECT_STREQ(l.words[1].about->name, "dropout");
  EXPECT_EQ(l.parameters, (std::vector<double>{0.1, 10e-7}));
  EXPECT_EQ(l.operands, 3);
  EXPECT_EQ(l.words[2].operand, 1);
  EXPECT_EQ(l.first_row(), 4);
  EXPECT_EQ(l.keeps, 1);
  EXPECT_EQ(l.dropouts, 1);
}

TEST(Line, ReadsGates) {
  const line l = parse("gate(silu) | gate( elu( 0.5 ) )");
  EXPECT_STREQ(l.words[0].activation->name, "silu");
  EXPECT_STREQ(l.words[1].activation->name, "elu");
  EXPECT_EQ(l.words[1].parameter_slot, 0);
  EXPECT_EQ(l.parameters[0], 0.5);
}

TEST(Line, ReadsRotations) {
  const line whole = parse("rms_norm(1e-6) | scale | rope"), first = parse("rope( 64 ) | silu"),
             neighbours = parse("rope(interleaved)"), both = parse("rope(64,interleaved) | keep");
  EXPECT_EQ(whole.rotary()->operand, 1);
  EXPECT_EQ(whole.operands, 3);
  EXPECT_EQ(whole.turned(128), 128);
  EXPECT_EQ(first.turned(128), 64);
  EXPECT_EQ(neighbours.turned(128), 128);
  EXPECT_EQ(both.turned(128), 64);
  EXPECT_STREQ(both.rotary()->about->option, "interleaved");
  EXPECT_STREQ(first.rotary()->about->option, "");
  EXPECT_EQ(parse("scale").rotary(), nullptr);
}

TEST(Line, ReadsGroupsOfCodes) {
  const line groups = parse("add | keep | rms_norm | quantize( int8 , 64 )"), row = parse("quantize(fp8)");
  EXPECT_EQ(groups.group(), 64);
  EXPECT_EQ(groups.row_words.size(), 1u);
  EXPECT_EQ(groups.keeps, 2);
  EXPECT_EQ(groups.result(2).shape, result_shape::scale);
  EXPECT_EQ(groups.result(2).group, 64);
  EXPECT_EQ(row.group(), 0);
  EXPECT_EQ(differentiable_part(groups).keeps, 1);
  EXPECT_NE(message("quantize(fp8, 48)").find("takes a power of two from 16 to 256 columns, got '48'"),
            std::string::npos);
  EXPECT_NE(message("quantize(fp8, 512)").find("got '512'"), std::string::npos);
}

TEST(Line, DefaultsComeFromTheDescriptors) {
  EXPECT_EQ(parse("layer_norm").parameters[0], 1e-5);
  EXPECT_TRUE(std::isnan(parse("rms_norm").parameters[0]));
  EXPECT_EQ(parse("elu").parameters[0], 1.0);
}

TEST(Line, DropoutGoesAwayInEvaluation) {
  EXPECT_EQ(without_dropout(parse("bias|dropout(0.5) | add")), "bias | add");
  EXPECT_EQ(without_dropout(parse("dropout(0.5)")), "");
}

TEST(Line, AnOldNameOfAStrategyBecomesThePresentOne) {
  const line l = parse(" gate(silu)|linear( dots )| dropout(0.5) |gelu");
  EXPECT_EQ(l.text, " gate(silu)|linear( small_n )| dropout(0.5) |gelu");
  EXPECT_EQ(l.how, strategy::small_n);
  EXPECT_EQ(l.old_strategy, "dots");
  EXPECT_EQ(without_dropout(l), "gate(silu) | linear( small_n ) | gelu");
  EXPECT_EQ(parse("scores(streamed) | softmax | values").how, strategy::flash);
  EXPECT_EQ(parse("scores(resident) | softmax").text, "scores(two_pass) | softmax");
  EXPECT_EQ(parse("linear(small_k)").old_strategy, "");
}

TEST(Line, CapitalsAreNoPartOfASuggestion) {
  for (const auto& [wrong, right] : {std::pair("GELU", "gelu"), {"SiLU", "silu"}, {"RMSNorm", "rms_norm"}})
    EXPECT_NE(message(wrong).find("did you mean '" + std::string(right) + "'"), std::string::npos) << message(wrong);
}

TEST(Line, UnknownWordIsQuotedWithCaretsAndASuggestion) {
  EXPECT_EQ(message("bias | gelo | add"),
            "unknown word 'gelo'; did you mean 'gelu'?\n"
            "  bias | gelo | add\n"
            "         ^^^^");
}

std::string relus(int count) {
  std::string text = "relu";
  for (int i = 1; i < count; ++i) text += " | relu";
  return text;
}

TEST(Line, HasAMostOfWords) {
  EXPECT_EQ(parse(relus(kMaxWords)).words.size(), std::size_t{kMaxWords});
  for (const int count : {kMaxWords + 1, 10000})
    EXPECT_NE(message(relus(count).c_str()).find("a line has at most 32 words\n  relu"), std::string::npos);
}

TEST(Line, OfALongTextTheFaultIsQuoted) {
  const std::string text = relus(20) + " | gelo" + std::string(100000, ' '), said = message(text.c_str());
  EXPECT_LT(said.size(), 1500u);
  const auto quoted = said.find("gelo ", said.find('\n')), carets = said.find("^^^^");
  ASSERT_NE(quoted, std::string::npos);
  EXPECT_EQ(quoted - said.find('\n') - 1, carets - said.rfind('\n') - 1);
}

struct bad_line {
  const char *text, *says;
};

void PrintTo(const bad_line& bad, std::ostream* to) { *to << bad.text; }

class BadLine : public testing::TestWithParam<bad_line> {};

TEST_P(BadLine, IsRefused) {
  EXPECT_NE(message(GetParam().text).find(GetParam().says), std::string::npos) << message(GetParam().text);
}

INSTANTIATE_TEST_SUITE_P(
    Messages, BadLine,
    testing::Values(bad_line{"", "empty line"}, bad_line{"bias |", "end of the line"},
                    bad_line{"bias scale", "expected '|'"}, bad_line{"| bias", "expected a word"},
                    bad_line{"mul", "needs a number"}, bad_line{"mul(x)", "takes a number (c), got 'x'"},
                    bad_line{"mul(0x10)", "takes a number"}, bad_line{"mul(1", "expected ')'"},
                    bad_line{"relu(1)", "takes no number"}, bad_line{"gate", "needs an activation"},
                    bad_line{"gate(bias)", "unknown activation 'bias'"}, bad_line{"dropout(1.5)", "between 0 and 1"},
                    bad_line{"dropout(nan)", "between 0 and 1"}, bad_line{"mul(nan)", "takes a number (c), got 'nan'"},
                    bad_line{"rms_norm(nan)", "takes a number (eps), got 'nan'"},
                    bad_line{"cross_entropy(1.5)", "label_smoothing has to be between 0 and 1"},
                    bad_line{"cross_entropy(0, 0, 0.5)", "takes an integer as ignore_index"},
                    bad_line{"logprob(0.5)", "takes an integer as ignore_index"},
                    bad_line{"kl_div(1.5)", "a beta between 0 and 1, got 1.5"},
                    bad_line{"kl_div(0, 0)", "a temperature above 0, got 0"},
                    bad_line{"softmax | kl_div", "'kl_div' behind 'softmax': a row word with a row beside its own"},
                    bad_line{"kl_div | sum", "'sum' behind 'kl_div': a row word with a row beside its own"},
                    bad_line{"keep | kl_div", "has no others in its line, no 'keep' and no contraction"},
                    bad_line{"linear | kl_div", "no contraction"}, bad_line{"kl_div | relu", "which ends a line"},
                    bad_line{"rope | kl_div", "there is no kernel for both"},
                    bad_line{"scores | softmax | layer_norm", "a second row word"},
                    bad_line{"linear | linear", "a second contraction, 'linear'"},
                    bad_line{"scores | linear", "a second contraction, 'linear'"},
                    bad_line{"bias | scores", "'scores' must be the first word"},
                    bad_line{"scores(tiled)", "expected one of auto, unfused, two_pass, flash, panels"},
                    bad_line{"scores(two_pass) | softmax | values", "auto, unfused, flash, panels"},
                    bad_line{"softmax | values", "'values' without 'scores'"},
                    bad_line{"scores | values | relu", "'relu' behind 'values'"},
                    bad_line{"scores | values(unfused)", "'values' takes no number"},
                    bad_line{"linear | bias | softmax", "'softmax' behind 'linear'"},
                    bad_line{"rope | gelu | rope", "a second 'rope'"}, bad_line{"rope(7)", "an even number"},
                    bad_line{"rope(halves)", "knows the option 'interleaved', got 'halves'"},
                    bad_line{"rope | linear", "'linear' in one line with 'rope'"},
                    bad_line{"keep|keep|keep|keep|keep", "at most 4 keeps"}));

}  // namespace
}  // namespace onepass::spec
