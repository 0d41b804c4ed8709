// Backward of a norm and a `linear` of few features in one pass on CUDA (src/cuda/linear/norm_backward.h).
#pragma once

#include <optional>

#include "src/torch/call.h"

namespace onepass::binding {

// Whether it serves a call whose result's gradient is aligned.
bool takes_narrow(const backward_call&, const spec::contraction_gradients&, const Tensor& w);

// The gradients that plan.before gives, the matrix's, and unless the dtype is none that of a bias behind the product;
// nothing where the kernel does not serve the call. rows_gradient: of the product, [rows, features].
std::optional<std::vector<Tensor>> backward_narrow(const backward_call&, const spec::contraction_gradients& plan,
                                                   const Tensor& rows_gradient, const Tensor& w, dtype bias);

}  // namespace onepass::binding
