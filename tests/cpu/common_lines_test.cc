// The closed table: each of its lines that this build has (ONEPASS_LINES) is compiled ahead of time, whatever its
// numbers are.
#include "src/cpu/row/common_lines.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "src/cpu/row/run.h"
#include "src/plan/plan.h"
#include "src/line/words.h"

namespace onepass::cpu {
namespace {

std::uint64_t masks_of(const spec::line& line) {
  std::uint64_t masks = 0;
  for (const spec::word& w : line.words) {
    if (w.about->kind == word_kind::mask && w.operand >= 0) masks |= std::uint64_t{1} << w.operand;
  }
  return masks;
}

const std::vector<std::string>& built_lines() { return ONEPASS_HAS_ALL_LINES ? common_lines() : frequent_lines(); }

TEST(CommonLines, AreAllAheadOfTime) {
  for (const std::string& text : built_lines()) {
    spec::line line;
    ASSERT_NO_THROW(line = spec::parse(text)) << text;
    for (const std::uint64_t boolean : {std::uint64_t{0}, masks_of(line)}) {
      EXPECT_TRUE(ahead_of_time(line, boolean)) << spec::structure(line, boolean);
      const std::shared_ptr<const cpu_kernels> held = kernels_for(line, boolean, dtype::f32);
      const cpu_kernels& kernels = *held;
      for (const cpu_kernel_pair& pair : {kernels.f32, kernels.f64, kernels.all_f32, kernels.all_bf16})
        EXPECT_TRUE(pair.forward && pair.backward) << text;
    }
  }
}

TEST(CommonLines, AreThereOnce) {
  std::set<std::string> structures;
  for (const std::string& text : common_lines()) {
    EXPECT_TRUE(structures.insert(spec::structure(spec::parse(text), 0)).second) << text;
  }
}

TEST(CommonLines, NumbersAndSpacesAreNoPartOfTheKernel) {
  for (const char* text :
       {"dropout(0.37)|add", "layer_norm( 1e-12 ) | scale | bias | gelu", "mul(0.125) | mask | softmax | dropout(0.5)",
        "bias | dropout(0) | add | keep | rms_norm(1e-6) | scale"})
    EXPECT_TRUE(ahead_of_time(spec::parse(text), 0)) << text;
  for (const char* text : {"gate(elu(0.5))", "bias | leaky_relu(0.2)"})
    EXPECT_EQ(ahead_of_time(spec::parse(text), 0), ONEPASS_HAS_ALL_LINES) << text;
  const spec::line one = spec::parse("rms_norm(1e-6) | scale"), other = spec::parse("rms_norm | scale");
  EXPECT_EQ(kernels_for(one, 0, dtype::f32), kernels_for(other, 0, dtype::f32));
}

// But PyTorch's functions, which are no activations of models (word/functions.h).
TEST(CommonLines, HoldEveryActivationAloneBiasedAndAsAGate) {
  for (const descriptor* act : spec::activations()) {
    if (act->defined[0] != '\0') continue;
    const std::string name = act->name;
    for (const std::string& text : {name, "bias | " + name, "gate(" + name + ")"})
      EXPECT_EQ(std::count(common_lines().begin(), common_lines().end(), text), 1) << text;
  }
}

TEST(CommonLines, AnyOtherLineIsNot) {
  EXPECT_FALSE(ahead_of_time(spec::parse("tanh | tanh"), 0));
  EXPECT_FALSE(ahead_of_time(spec::parse("scale | layer_norm"), 0));
}

TEST(Source, HoldsTheLineBothWays) {
  const spec::line line = spec::parse("bias | keep | softmax | scale");
  const std::string text = source(line, 0, dtype::f32);
  EXPECT_NE(text.find(spec::type_text(line, 0, false)), std::string::npos) << text;
  EXPECT_NE(text.find(spec::type_text(line, 0, true)), std::string::npos) << text;
}

// A compiler takes a second or so for each pair of kernels.
TEST(Source, HoldsWhatXsDtypeTakesAlone) {
  const spec::line line = spec::parse("scale | layer_norm");
  for (const auto& [x, pairs] :
       {std::pair{dtype::f64, 1}, {dtype::f32, 2}, {dtype::bf16, 2}, {dtype::f16, 1}, {dtype::none, 4}}) {
    const std::string text = source(line, 0, x);
    int found = 0;
    for (const char* name : {"onepass_f32", "onepass_all_f32", "onepass_all_bf16", "onepass_f64"})
      found += text.find(std::string(name) + " =") != std::string::npos;
    EXPECT_EQ(found, pairs) << text;
  }
}

}  // namespace
}  // namespace onepass::cpu
