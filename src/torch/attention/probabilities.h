// One call of a line that begins with `scores`: batched products of queries with keys, and what stands behind them.
#pragma once

#include "src/choose/choose.h"
#include "src/torch/linear/linear.h"

namespace onepass::binding {

// What a way is chosen by: of a line that begins with `scores`, without `values`, called with x and keys.
choice::call choice_of_scores(const prepared_line&, const Tensor& x, const Tensor& keys);

void check_keys(const prepared_line&, const Tensor& x, const Tensor& keys);

// The result, the kept values, and where they are asked for the statistics of the row word.
std::vector<Tensor> forward_with_scores(const forward_call&);

// The tensors of spec::plan_gradients(...).outputs. Products that the words behind read are made again.
std::vector<Tensor> backward_with_scores(const backward_call&, const linear_saved&);

}  // namespace onepass::binding
