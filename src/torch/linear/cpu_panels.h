// src/cpu/linear.h for tensors: their memory, and which calls take panels.
#pragma once

#include "src/torch/call/call.h"

namespace onepass::binding {

struct linear_results {
  std::vector<Tensor> kept;         // the prologue's kept values, then its statistics where they are saved
  std::vector<Tensor> results;      // the line's result, then the epilogue's kept values
  std::optional<Tensor> product{};  // the GEMM's result, where backward reads it or it is the line's
};
// For calls for which src/choose has chosen panels. before: the prologue.
linear_results forward_in_panels(const forward_call&, const forward_call& before);

// How panels compute the gradient of the matrix.
struct panel_weight_gradient {
  const forward_call& recompute;  // the GEMM's input
  const Tensor& result;           // is filled in
};
// `backward` of the prologue, from product_gradient (rows, N), the gradient of the GEMM's result. before.gradients[0]
// only has the shape.
std::vector<Tensor> backward_in_panels(const backward_call& before, std::int64_t rows, const Tensor& product_gradient,
                                       const Tensor& weight, const std::optional<panel_weight_gradient>&);

}  // namespace onepass::binding
