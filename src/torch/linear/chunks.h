// A line with endings behind `linear`, such as `linear | cross_entropy`: what `linear` gives exists a chunk of rows at
// a time. The words before `linear` run for all rows at once: their rows are short beside those.
#pragma once

#include "src/torch/linear/linear.h"

namespace onepass::binding {

// For lines of which spec::why_not_chunked is empty.
struct chunked_call {
  const prepared_contraction& parts;
  const Tensor& input;                  // (rows, K), what `linear` takes, of the matrix' dtype
  const Tensor& weight;                 // (V, K)
  const std::vector<Tensor>& operands;  // of the epilogue: columns, (rows, V), or (rows) of targets
  std::int64_t rows;                    // of a chunk
};

// The epilogue's numbers, each (rows), in the order of its results; `statistics` (of the epilogue, rows) is filled in
// if it is given.
std::vector<Tensor> forward_in_chunks(const chunked_call&, const Tensor* statistics);

struct chunked_gradients {
  const spec::contraction_gradients& plan;
  const std::vector<std::int64_t>& types;   // of the epilogue's operands
  const std::vector<Tensor>& upstream;      // of the numbers, each (rows)
  const std::optional<Tensor>& statistics;  // of the epilogue, where backward reads them and forward has run
  bool with_forward;                        // forward of a chunk runs before its backward
};
struct chunked_results {
  std::vector<Tensor> numbers;          // with_forward
  std::vector<Tensor> behind;           // those of plan.kept_outputs
  std::optional<Tensor> input, weight;  // gradients, of the matrix' dtype
};
chunked_results backward_in_chunks(const chunked_call&, const chunked_gradients&);

// Adds products in float32 (see autograd/autograd.h); null where torch's own headers are not at hand.
void let_products_add(void (*add)(void* sum, void* a, void* b));

}  // namespace onepass::binding
