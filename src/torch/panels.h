// On the CPU: what stands before `linear` and the matrix product a panel of rows at a time, so that what one gives the
// other stays in a core's cache.
#pragma once

#include "src/spec/strategy.h"
#include "src/torch/call.h"

namespace onepass::binding {

// Rows of a panel, for x (rows, columns) and a matrix (features, columns); 0 where panels bring nothing: 16-bit
// products, for which the library packs the matrix in every call, and wide ones. A function of shapes and dtypes only.
std::int64_t panel_rows(dtype of_matrix, std::int64_t rows, std::int64_t columns, std::int64_t features);
// The same of a call; 0 where its line names another strategy. Throws where it names this one and it brings nothing.
std::int64_t panel_rows(const spec::contraction&, spec::strategy, const Tensor& x, const Tensor& weight);

// The strategies on the CPU: unfused, dots, panels.
std::vector<spec::prediction> strategies_on_cpu(const spec::contraction&, const spec::linear_case&);

// Whether the gradient of the matrix may come of panels too.
bool sums_in_panels(const Tensor& x, const Tensor& weight);

// Fills in `product` (rows, N); gives the kept values, and the statistics where asked for.
std::vector<Tensor> forward_in_panels(const forward_call& before, std::int64_t rows, const Tensor& weight,
                                      const Tensor* bias, const Tensor& product);

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
