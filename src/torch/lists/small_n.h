// A line with `linear` of few features (few_features.h) for several tensors: those that are alike share a launch.
#pragma once

#include <string>
#include <vector>

#include "src/torch/lists/group.h"

namespace onepass::binding {

// Why several tensors of such rows are not one call, on a device ("cpu", "cuda:0") or a chip; empty where they are.
std::string why_not_grouped(const prepared_line&, std::int64_t columns, std::int64_t features, dtype,
                            const std::string& chip);

// The result, the kept values, and where they are asked for and backward reads them, what `linear` gives and the
// statistics.
std::vector<Tensor> forward_with_features(const group_forward&);

struct group_linear_saved {
  dtype x;
  const std::vector<Tensor>& products;        // what `linear` gives
  const std::vector<Tensor>& resumed_behind;  // instead of that, a kept value behind it
};
std::vector<std::vector<Tensor>> backward_with_features(const group_backward&, const group_linear_saved&);

}  // namespace onepass::binding
