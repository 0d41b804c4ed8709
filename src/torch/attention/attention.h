// One call of a line with `scores` and `values`: what `scores` begins, and its product with the values.
#pragma once

#include "src/torch/linear/linear.h"

namespace onepass::binding {

// The result, the kept values, and where they are asked for the statistics of the row word.
std::vector<Tensor> forward_with_attention(const forward_call&);

// The tensors of spec::plan_gradients(...).outputs. What `values` takes is made again, but where it was kept.
std::vector<Tensor> backward_with_attention(const backward_call&, const linear_saved&);

}  // namespace onepass::binding
