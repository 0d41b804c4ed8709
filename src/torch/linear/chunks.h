// A line with endings behind `linear`, such as `linear | cross_entropy`: what `linear` gives exists a chunk of rows at
// a time. The words before `linear` run for all rows at once: their rows are short beside those.
#pragma once

#include "src/torch/linear/linear.h"

namespace onepass::binding {

// For lines of which spec::why_not_chunked is empty. input: what `linear` takes, (..., K).

// The epilogue's results, and with `saves` its statistics (statistics, rows).
std::vector<Tensor> numbers_in_chunks(const forward_call&, const Tensor& input, bool saves);

struct chunked_results {
  std::vector<Tensor> numbers;          // the epilogue's results, where forward runs, too
  std::vector<Tensor> behind;           // gradients: those of plan.kept_outputs
  std::optional<Tensor> input, weight;  // gradients, of the matrix' dtype: (rows, K), (V, K)
};
// statistics: of the epilogue, where backward reads them.
chunked_results gradients_in_chunks(const backward_call&, const spec::contraction_gradients&, const Tensor& input,
                                    const std::optional<Tensor>& statistics);
// Forward of each chunk before its backward. The two calls are of one line and its tensors.
chunked_results numbers_and_gradients_in_chunks(const forward_call&, const backward_call&,
                                                const spec::contraction_gradients&, const Tensor& input);

// Adds products in float32 (see autograd/autograd.h); null where torch's own headers are not at hand.
void let_products_add(void (*add)(void* sum, void* a, void* b));

}  // namespace onepass::binding
