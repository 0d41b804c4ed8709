// `linear` with few out_features in one kernel (onepass/kernel/linear/small_n.cuda.h): when it serves, and its
// launches.
#pragma once

#include <string>

#include "src/cuda/row/configuration.h"
#include "src/cuda/row/launch.h"

namespace onepass::cuda {

inline constexpr int64 kMostSmallNColumns = 8192;  // in_features for which `auto` may take it

struct small_n_call {
  const request& before;  // its line ends with the features (spec::with_features)
  const arguments& a_before;
  const request& behind;
  const arguments& a_behind;
};
struct small_n_plan {
  plan rows;             // of `before`. The column sums of both lines have rows.parts parts
  configuration behind;  // with the threads of `rows`
};

// Empty where a block has room for a row.
std::string why_not_small_n(const request& before, const arguments&, const device_facts&);
small_n_plan plan_small_n(const small_n_call&, const device_facts&);  // where that is empty
std::string source(const small_n_call&, const small_n_plan&);
void launch(const small_n_call&, const small_n_plan&, int device, void* stream);

}  // namespace onepass::cuda
