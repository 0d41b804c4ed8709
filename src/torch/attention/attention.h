// One call of a line with `scores` and `values`, forward and backward.
#pragma once

#include "src/torch/linear/linear.h"

namespace onepass::binding {

// Gives the output, the kept values, and softmax's statistics where they are asked for.
std::vector<Tensor> forward_with_attention(const forward_call&);

// Gives the tensors of spec::plan_gradients(...).outputs. Probabilities are recomputed, unless they were kept.
std::vector<Tensor> backward_with_attention(const backward_call&, const linear_saved&);

}  // namespace onepass::binding
