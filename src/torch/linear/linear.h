// One call of a line with `linear` (those with `scores`: scores.h, and `values`: attention.h): what stands before it,
// the matrix product, what stands behind it.
#pragma once

#include "src/torch/call/call.h"

namespace onepass::binding {

void check_weight(const prepared_line&, const Tensor& x, const Tensor& weight);  // its shape, dtype and device

// The result, the kept values, and where they are asked for and backward reads them, what `linear` gives and the
// statistics of the row word. forward_call's save_statistics asks for both.
std::vector<Tensor> forward_with_linear(const forward_call&);

struct linear_saved {
  dtype x;
  const std::optional<Tensor>& product;         // what `linear` gives
  const std::optional<Tensor>& resumed_behind;  // instead of that, a kept value behind it
};
// The tensors of spec::plan_gradients(...).outputs. What `linear` reads is made again.
std::vector<Tensor> backward_with_linear(const backward_call&, const linear_saved&);

// Through what stands behind the contraction: the tensors of plan.behind.outputs. statistics: of a row word there. A
// runner has the gradient of what the contraction gives; gives_shared: but stores it, where it is an operand's too.
std::vector<Tensor> backward_behind(const backward_call&, const linear_saved&, const spec::contraction_gradients& plan,
                                    const std::optional<Tensor>& statistics, const backward_runner& = {},
                                    bool gives_shared = false);

// What the operators do: with `linear`, `scores`, or `scores` and `values`.
std::vector<Tensor> forward_of_contraction(const forward_call&);
std::vector<Tensor> backward_of_contraction(const backward_call&, const linear_saved&);

}  // namespace onepass::binding
