#include "src/cpu/simd.h"

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <stdexcept>
#include <string>

namespace onepass::cpu {
namespace {

// A CPU with no target that is ever compiled: only the portable one would run there.
TEST(Simd, WhatIsNotCompiledForACpuSaysSo) {
  EXPECT_NO_THROW(require_simd());
  hwy::SetSupportedTargetsForTest(HWY_SSSE3);
  try {
    require_simd();
    EXPECT_TRUE(std::string(simd_target()) == "SCALAR" || std::string(simd_target()) == "EMU128") << simd_target();
  } catch (const std::runtime_error& e) {
    EXPECT_NE(std::string(e.what()).find("cmake -DONEPASS_SIMD=all"), std::string::npos) << e.what();
  }
  hwy::SetSupportedTargetsForTest(0);
  EXPECT_NO_THROW(require_simd());
}

}  // namespace
}  // namespace onepass::cpu
