// usage: dispatch_test TARGET: tests of cpu_test once more, on a CPU that has nothing better than this SIMD target.
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cstring>

#include "src/cpu/simd.h"

namespace {

constexpr int kSkipped = 77;  // as tests/CMakeLists.txt says
const char* expected = "";

TEST(Dispatch, TakesTheBestThatTheCpuHas) {
  EXPECT_NO_THROW(onepass::cpu::require_simd());
  EXPECT_STREQ(onepass::cpu::simd_target(), expected);
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc == 2) expected = argv[1];
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    if (std::strcmp(hwy::TargetName(target), expected) != 0) continue;
    hwy::SetSupportedTargetsForTest(target);
    return RUN_ALL_TESTS();
  }
  std::printf("%s is not compiled, or this CPU does not have it\n", expected);
  return kSkipped;
}
