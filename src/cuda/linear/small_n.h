// A line with `linear` of few features in one kernel (onepass/kernel/linear/small_n.cuda.h): where it serves, and its
// launches.
#pragma once

#include <string>

#include "src/cuda/row/configuration.h"
#include "src/cuda/row/launch.h"

namespace onepass::cuda {

inline constexpr int64 kMostDotsColumns = 8192;  // of a row, where it is predicted

struct few_features_call {
  const request& before;  // its line ends with the features (spec::with_features)
  const arguments& a_before;
  const request& behind;
  const arguments& a_behind;
};
struct few_features_plan {
  plan rows;             // of `before`; column sums of both have rows.parts parts
  configuration behind;  // its threads are those of `rows`
};

// Empty where a block has room for the call's rows.
std::string why_not_few_features(const request& before, const arguments&, const device_facts&);
few_features_plan plan_few_features(const few_features_call&, const device_facts&);  // where that is empty
std::string source(const few_features_call&, const few_features_plan&);
void launch(const few_features_call&, const few_features_plan&, int device, void* stream);

}  // namespace onepass::cuda
