// One call of a line with `linear`: prologue, GEMM and epilogue. (`scores`: attention/probabilities.h; `values`:
// attention/attention.h.)
#pragma once

#include "src/torch/call/call.h"

namespace onepass::binding {

void check_weight(const prepared_line&, const Tensor& x, const Tensor& weight);  // its shape, dtype and device

// Returns the result and the kept values; then, with save_statistics and where backward reads them, the GEMM's result
// and the statistics of the row word.
std::vector<Tensor> forward_with_linear(const forward_call&);

struct linear_saved {
  dtype x;
  const std::optional<Tensor>& product;         // the GEMM's result
  const std::optional<Tensor>& resumed_behind;  // instead of that, a kept value of the epilogue
};
// Returns the tensors of spec::plan_gradients(...).outputs. It recomputes the GEMM's input, and where endings stand
// behind `linear` its result.
std::vector<Tensor> backward_with_linear(const backward_call&, const linear_saved&);

// Backward of the epilogue: returns the tensors of plan.behind.outputs. statistics: of its row word. A runner keeps the
// gradient of the GEMM's result to itself; gives_shared: it stores that gradient where an operand has the same one.
std::vector<Tensor> backward_behind(const backward_call&, const linear_saved&, const spec::contraction_gradients& plan,
                                    const std::optional<Tensor>& statistics, const backward_runner& = {},
                                    bool gives_shared = false);

// Forward and backward in one, of a line whose results are all numbers, from given gradients of those: the results,
// then the tensors of spec::plan_gradients(...).outputs. A chunk's GEMM runs once.
std::vector<Tensor> forward_with_gradients(const forward_call&, const std::vector<Tensor>& gradients,
                                           const std::vector<std::int64_t>& types, std::int64_t wanted);

// The operators of lines with `linear`, with `scores`, and with `scores` and `values`.
std::vector<Tensor> forward_of_contraction(const forward_call&);
std::vector<Tensor> backward_of_contraction(const backward_call&, const linear_saved&);

}  // namespace onepass::binding
