// A line with `linear` of few features by one kernel (strategy `dots`): its rows end in dot products with the matrix's
// rows, and backward begins at their gradients. Forward on CUDA is in one_kernel.h.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "src/torch/linear/linear.h"

namespace onepass::binding {

// Whether the line's kernels for the CPU are there, or can be compiled.
bool has_kernels(const prepared_line&, std::uint64_t boolean_masks);

Tensor row_of(const Tensor& matrix, std::int64_t row);
// A dense tensor of as many rows as the arguments have, each of `features` numbers.
view rows_at(const Tensor& dense, std::int64_t features, const arguments&);

// Of a call: its words before `linear` with the features, their operands, and the row of a result at each.
const prepared_line& line_with_features(const forward_call&, const Tensor& w);
std::vector<Tensor> operands_with_features(const forward_call&, const Tensor& w);

// The same of a call on the CPU that takes this way.
bool has_kernels_of_dots(const forward_call&, const Tensor& w);
// Fills in `product` (rows, features); gives the kept values, and the statistics where asked for. before: of the words
// before `linear`.
std::vector<Tensor> forward_in_dots(const forward_call& call, bool save_statistics, const Tensor& w,
                                    const Tensor& product);

// On both devices: the tensors of spec::plan_gradients(...).outputs, or nothing where it does not serve.
std::optional<std::vector<Tensor>> backward_in_dots(const backward_call&, const linear_saved&,
                                                    const spec::contraction_gradients&);

}  // namespace onepass::binding
