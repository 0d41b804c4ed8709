// src/cpu/linear.h for tensors: their memory, and which calls take panels.
#pragma once

#include "src/torch/call/call.h"

namespace onepass::binding {

// Rows of a panel in backward of what stands before `linear`; 0 where panels bring nothing, or the line names
// another strategy.
std::int64_t backward_panel_rows(const spec::contraction&, spec::strategy, const Tensor& x, const Tensor& weight);

struct linear_results {
  std::vector<Tensor> kept;         // what the words before `linear` keep, then their statistics where asked for
  std::vector<Tensor> results;      // the line's result, then what the words behind keep
  std::optional<Tensor> product{};  // where backward reads it, or where it is the result
};
// before: the words before `linear`. Where panels are chosen (src/choose/choose.h).
linear_results forward_in_panels(const forward_call&, const forward_call& before);

// What the gradient of `linear`'s matrix is made of.
struct panel_weight_gradient {
  const forward_call& again;  // gives what `linear` took
  const Tensor& result;       // filled in
};
// As `backward` of what stands before `linear`. Its gradients[0] gives the shape only: it is made of product_gradient
// (rows, N).
std::vector<Tensor> backward_in_panels(const backward_call& before, std::int64_t rows, const Tensor& product_gradient,
                                       const Tensor& weight, const std::optional<panel_weight_gradient>&);

}  // namespace onepass::binding
