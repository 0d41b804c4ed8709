// src/cpu/attention.h for tensors: their memory, and which calls take panels.
#pragma once

#include "src/plan/attention.h"
#include "src/torch/linear/linear.h"

namespace onepass::binding {

// Of a line's part that begins with `scores` and ends before `values`: its result, the kept values, the statistics
// where they are asked for. With values their product comes first, and the weights, if they are kept, behind the kept
// values. Where they are chosen (src/choose/choose.h).
struct values_of_scores {
  const Tensor& values;
  bool keeps_weights;
};
std::vector<Tensor> forward_in_panels(const forward_call&, const std::optional<values_of_scores>&);

// As backward_with_scores. None where panels bring nothing.
std::optional<std::vector<Tensor>> backward_in_panels(const backward_call&, const linear_saved&,
                                                      const spec::contraction_gradients&);

// The same with values; call.gradients[0] and call.operands.back() are theirs. weights: where they were kept.
std::optional<std::vector<Tensor>> backward_in_panels(const backward_call&, dtype of_x,
                                                      const spec::attention_gradients&,
                                                      const std::optional<Tensor>& weights);

}  // namespace onepass::binding
