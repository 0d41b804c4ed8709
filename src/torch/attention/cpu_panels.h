// src/cpu/attention.h for tensors: allocates results, and says which calls take panels.
#pragma once

#include "src/plan/attention.h"
#include "src/torch/linear/linear.h"

namespace onepass::binding {

// Forward of the part of a line from `scores` up to `values`, where panels are chosen (src/choose/choose.h). Gives the
// probabilities, the kept values, and the statistics where they are asked for. With values the output comes first, and
// the probabilities, if they are kept, after the kept values.
struct values_of_scores {
  const Tensor& values;
  bool keeps_probabilities;
};
std::vector<Tensor> forward_in_panels(const forward_call&, const std::optional<values_of_scores>&);

// As backward_with_scores. None where panels do not serve, or are no faster.
std::optional<std::vector<Tensor>> backward_in_panels(const backward_call&, const linear_saved&,
                                                      const spec::contraction_gradients&);

// The same with values: call.gradients[0] is grad_output, call.operands.back() the values. probabilities: where they
// were kept.
std::optional<std::vector<Tensor>> backward_in_panels(const backward_call&, dtype of_x,
                                                      const spec::attention_gradients&,
                                                      const std::optional<Tensor>& probabilities);

}  // namespace onepass::binding
