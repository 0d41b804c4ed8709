// `linear` with few out_features in one kernel (strategy `small_n`): a row ends in its dot products with the matrix's
// rows, and backward begins at their gradients. Forward on CUDA is in one_kernel.h.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "src/torch/linear/linear.h"

namespace onepass::binding {

// Whether the line's kernels for the CPU are there, or can be compiled.
bool has_kernels(const prepared_line&, std::uint64_t boolean_masks, dtype x);

Tensor row_of(const Tensor& matrix, std::int64_t row);
// A view of a dense tensor that has the rows of the arguments, each of `features` elements.
view rows_at(const Tensor& dense, std::int64_t features, const arguments&);

// A call's words before `linear` with the features behind them, and the operands of that line.
const prepared_line& line_with_features(const forward_call&, const Tensor& w);
std::vector<Tensor> operands_with_features(const forward_call&, const Tensor& w);

// has_kernels of a call on the CPU.
bool has_small_n_kernels(const forward_call&, const Tensor& w);
// Fills in `product` (rows, features). Returns the prologue's kept values, then its statistics where they are saved.
std::vector<Tensor> forward_small_n(const forward_call& call, bool save_statistics, const Tensor& w,
                                    const Tensor& product);

// On both devices, for calls for which src/choose has chosen small_n: returns the tensors of
// spec::plan_gradients(...).outputs, or nothing where a block has no room for a row or what it reads is not there.
std::optional<std::vector<Tensor>> backward_small_n(const backward_call&, const linear_saved&,
                                                    const spec::contraction_gradients&);

}  // namespace onepass::binding
