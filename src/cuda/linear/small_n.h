// A line with `linear` of few features in one kernel (onepass/kernel/linear/small_n.cuda.h): where it serves, and its
// launches.
#pragma once

#include <string>
#include <vector>

#include "src/cuda/row/configuration.h"
#include "src/cuda/row/launch.h"

namespace onepass::cuda {

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
// For a line that ends with features, and rows of so many columns: in both directions, however they lie.
std::string why_not_few_features(const spec::line&, int64 columns, dtype, const device_facts&);
few_features_plan plan_few_features(const few_features_call&, const device_facts&);  // where that is empty
std::string source(const few_features_call&, const few_features_plan&);
void launch(const few_features_call&, const few_features_plan&, int device, void* stream);

// Several tensors, of which those that are alike share a launch (group.h).
struct few_features_member {
  arguments *before, *behind;
};
struct few_features_batch {
  std::vector<int> members;
  few_features_plan plan;
};
// None where a block has no room for a call's rows.
std::vector<few_features_batch> batches(const request& before, const request& behind,
                                        const std::vector<few_features_member>&, const device_facts&);
void launch(const request& before, const request& behind, const few_features_batch&,
            const std::vector<few_features_member>&, int device, void* stream);

}  // namespace onepass::cuda
