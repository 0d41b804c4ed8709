// One call of a line that begins with `scores`, without `values`, forward and backward.
#pragma once

#include "src/choose/choose.h"
#include "src/torch/linear/linear.h"

namespace onepass::binding {

// The call that a way is chosen for.
choice::call choice_of_scores(const prepared_line&, const Tensor& x, const Tensor& keys);

void check_keys(const prepared_line&, const Tensor& x, const Tensor& keys);

// Gives the probabilities, the kept values, and softmax's statistics where they are asked for.
std::vector<Tensor> forward_with_scores(const forward_call&);

// Gives the tensors of spec::plan_gradients(...).outputs. Scores are recomputed where the words behind read them.
std::vector<Tensor> backward_with_scores(const backward_call&, const linear_saved&);

}  // namespace onepass::binding
