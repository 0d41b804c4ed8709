// src/cpu/linear.h for tensors: their memory.
#include "src/torch/linear/cpu_panels.h"

#include "src/cpu/linear.h"
#include "src/torch/matrix_product.h"
#include "src/torch/call/run.h"

namespace onepass::binding {
namespace {

// A factor as the GEMM reads it: its rows contiguous, or its columns.
Tensor factor_of(const Tensor& matrix, bool by_rows) {
  const bool fits = matrix.stride(1) == 1 || (matrix.stride(0) == 1 && !by_rows);
  return fits ? matrix : torch::stable::contiguous(matrix);
}

}  // namespace

linear_results forward_in_panels(const forward_call& call, const forward_call& before) {
  const prepared_contraction& c = *call.line.contraction;
  const Tensor weight = factor_of(call.operands[static_cast<std::size_t>(c.parts.weight)], false);
  const dtype type = dtype_of(weight);
  const std::int64_t columns = weight.size(1), features = weight.size(0);
  const bool goes_on = !c.behind.line.words.empty();

  linear_results made;
  const Tensor result = empty_product(call.x, features, type);
  if (!goes_on) made.product = result;
  else if (call.save_statistics && call.line.reads.product) made.product = empty_product(call.x, features, type);
  cpu::linear_forward panels{.weight = matrix_of(weight), .result = matrix_of(as_matrix(result, features))};
  if (made.product) panels.product = matrix_of(as_matrix(*made.product, features));

  const auto run_behind = [&] {
    if (!goes_on) return cpu::forward_in_panels(panels);
    const Tensor shape = shape_of_product(call.x, weight);
    made.results = forward({shape, part_of(call.operands, c.parts.weight + 1, call.line.line.operands), c.behind,
                            call.dropout_state, false},
                           [&](frame& f) {
                             f.a.stream_stores = stream_stores(f, 1);
                             const cpu::row_call behind = row_call_of(f);
                             panels.behind = &behind;
                             cpu::forward_in_panels(panels);
                           });
  };
  if (c.before.line.words.empty()) {
    const Tensor x = factor_of(as_matrix(in_dtype(call.x, type), columns), true);
    panels.x = matrix_of(x);
    run_behind();
  } else {
    made.kept = forward(before, [&](frame& f) {
      const cpu::row_call words = row_call_of(f);
      panels.before = &words;
      run_behind();
    });
  }
  made.results.insert(made.results.begin(), result);
  return made;
}

std::vector<Tensor> backward_in_panels(const backward_call& before, std::int64_t rows, const Tensor& product_gradient,
                                       const Tensor& weight,
                                       const std::optional<panel_weight_gradient>& weight_gradient) {
  cpu::linear_backward panels{.gradient = matrix_of(product_gradient), .weight = matrix_of(weight), .panel_rows = rows};
  const auto run = [&] {
    return backward(before, [&](frame& f, const spec::gradients&, const std::vector<view>& column_outputs) {
      const cpu::row_call words = row_call_of(f);
      panels.before = &words, panels.column_outputs = column_outputs;
      cpu::backward_in_panels(panels);
    });
  };
  if (!weight_gradient) return run();
  panels.weight_gradient = matrix_of(weight_gradient->result);
  std::vector<Tensor> results;
  forward(weight_gradient->recompute, [&](frame& f) {
    const cpu::row_call recompute = row_call_of(f);
    panels.recompute = &recompute;
    results = run();
  });
  return results;
}

}  // namespace onepass::binding
