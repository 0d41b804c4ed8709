// Runs a test once for each SIMD target that was compiled in and that this CPU has.
#pragma once

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cstdint>
#include <string>

namespace onepass::test {

class on_target : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::GetChosenTarget().Update(GetParam()); }
  void TearDown() override { hwy::GetChosenTarget().Update(hwy::SupportedTargets()); }
};

inline std::string target_name(const testing::TestParamInfo<int64_t>& info) { return hwy::TargetName(info.param); }

#define ONEPASS_ON_EVERY_TARGET(suite) \
  INSTANTIATE_TEST_SUITE_P(targets, suite, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()), target_name)

}  // namespace onepass::test
