// What NVRTC is given: it holds the configuration, and all that kernels read of it.
#include "src/cuda/runtime/source.h"

#include <gtest/gtest.h>

#include "src/cuda/kernels.h"
#include "tests/cuda/config_names.h"
#include "tests/cuda/imagined_call.h"

namespace onepass::cuda {
namespace {

std::string text_of(const call& c) { return source(c.r, choose(c.r, c.a, facts_of("sm_90a")).front().with); }

TEST(Source, HoldsTheLineAndItsKernel) {
  for (const char* text : kLines) {
    const spec::line line = spec::parse(text);
    for (const bool backward : {false, true}) {
      const call c = call_of(line, backward, dtype::bf16, dtype::f32, 64, 1000);
      const std::string made = text_of(c);
      EXPECT_NE(made.find("using the_line = " + c.r.line + ";"), std::string::npos) << made;
      const std::string kernel = line.rowwise() ? "rowwise" : "elementwise";
      EXPECT_NE(made.find("#include \"onepass/kernel/row/" + kernel + ".cuda.h\""), std::string::npos) << made;
      EXPECT_NE(made.find(kernel + (backward ? "_backward" : "_forward") + "<config, the_line>(a)"), std::string::npos)
          << made;
      EXPECT_NE(made.find(" onepass_" + kernel + (backward ? "_backward(" : "_forward(")), std::string::npos) << made;
    }
  }
}

TEST(Source, HoldsEveryNumberOfTheConfiguration) {
  request r{};
  r.x = dtype::bf16, r.operand[1] = dtype::f32, r.wants_column = 5, r.wants_tensor = 2, r.wants_dx = true,
  r.wants_recompute = true, r.line = "line<chain<>>";
  configuration with{};
  with.vector_size = 8, with.access = 4, with.across = 96, with.down = 2, with.unroll = 3, with.held_vectors = 7;
  with.flat = 1, with.dims = 3, with.dense = 4, with.single_y = 1, with.ahead = 1, with.whole_vectors = 5,
  with.single_operand = 6, with.in_place = 1, with.one_factor = 1, with.single_kept_gradient = 9;
  const std::string made = source(r, with);
  for (const char* field : {"kX = dtype::bf16;",
                            "dtype::none, dtype::f32, dtype::none",
                            "kVectorSize = 8;",
                            "kAccess = 4;",
                            "kAcross = 96;",
                            "kDown = 2;",
                            "kUnroll = 3;",
                            "kHeldVectors = 7;",
                            "kFlat = true;",
                            "kDims = 3;",
                            "kDense = 4ull;",
                            "kSingleX = false;",
                            "kSingleY = true;",
                            "kSumsInRegisters = false;",
                            "kAhead = true;",
                            "kWholeVectors = 5;",
                            "kSavesStatistics = false;",
                            "kOnlyStatistics = false;",
                            "kInPlace = true;",
                            "kOneFactor = 1ull;",
                            "kWantsDx = true;",
                            "kWantsRecompute = true;",
                            "kSingleOperand = 6ull;",
                            "kSingleKeptGradient = 9ull;",
                            "kWantsColumn = 5ull;",
                            "kWantsTensor = 2ull;",
                            "arithmetic = float;",
                            "__launch_bounds__(192"}) {
    EXPECT_NE(made.find(field), std::string::npos) << field << " is not in\n" << made;
  }
  r.x = dtype::f64;
  EXPECT_NE(source(r, with).find("arithmetic = double;"), std::string::npos);
}

TEST(Source, DefinesWhatKernelsRead) {
  expect_defined(config_names(plain_headers()),
                 text_of(call_of(spec::parse("gelu"), false, dtype::f32, dtype::f32, 1, 8)));
}

TEST(KernelName, IsThatOfAFunction) {
  std::string headers_text;
  for (const auto& file : std::filesystem::recursive_directory_iterator(ONEPASS_SOURCE_DIR "/include/onepass/kernel")) {
    if (!file.is_regular_file()) continue;
    std::ifstream in(file.path());
    headers_text.append(std::istreambuf_iterator<char>(in), {});
  }
  for (const std::string function : kKernels) {
    EXPECT_EQ(kernel_name(function), "onepass_" + function);
    EXPECT_NE(headers_text.find("ONEPASS_FUNCTION void " + function + "(const "), std::string::npos) << function;
  }
  EXPECT_THROW(kernel_name("of_nothing"), std::logic_error);
}

TEST(Label, TellsChipDtypeDirectionAndLine) {
  const call c = call_of(spec::parse("bias | gelu"), true, dtype::f16, dtype::f16, 64, 512);
  const std::string made = label(c.r, choose(c.r, c.a, facts_of("sm_80")).front().with, "sm_80");
  for (const std::string& part : {std::string("sm_80"), std::string("f16"), std::string("backward"), c.r.line}) {
    EXPECT_NE(made.find(part), std::string::npos) << made;
  }
}

}  // namespace
}  // namespace onepass::cuda
