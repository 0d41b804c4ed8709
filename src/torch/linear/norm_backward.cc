// Backward of a norm and a `linear` of few features in one pass on CUDA.
#include "src/torch/linear/norm_backward.h"

#include <torch/csrc/stable/accelerator.h>

#include <cstdint>

#include "src/cuda/linear/norm_backward.h"
#include "src/torch/linear/folded_matrix.h"
#include "src/torch/matrix_product.h"
#include "src/torch/run.h"

namespace onepass::binding {
namespace {

constexpr std::int64_t kLeastNumbers = 1 << 20;  // of x; below, kernels cost more than memory

bool begins_at_16_bytes(const Tensor& rows) {
  return reinterpret_cast<std::uintptr_t>(rows.data_ptr()) % 16 == 0 && rows.stride(1) == 1 && rows.stride(0) % 8 == 0;
}

}  // namespace

bool takes_narrow(const backward_call& call, const spec::contraction_gradients& plan, const Tensor& w) {
  const spec::strategy how = call.line.line.how;
  const prepared_contraction& c = *call.line.contraction;
  if (how != spec::strategy::automatic && how != spec::strategy::deferred) return false;
  if (!c.parts.norm.is_one || !call.x || !call.statistics || !device_of(w).is_cuda()) return false;
  if (!plan.wants_weight || plan.gives_input || plan.before.inputs[0] < 0) return false;
  const cuda::device_facts& chip = cuda::facts(device_of(w).index);
  // A row's deviation might take float16's gradients out of their range.
  return chip.arch == 90 && dtype_of(w) == dtype::bf16 && dtype_of(*call.x) == dtype::bf16 &&
         w.size(0) <= cuda::kNarrowFeatures && w.size(0) % 8 == 0 && w.size(1) % 8 == 0 && w.stride(1) == 1 &&
         call.x->numel() >= kLeastNumbers && call.x->numel() / w.size(1) < std::int64_t{1} << 30;
}

std::optional<std::vector<Tensor>> backward_narrow(const backward_call& call, const spec::contraction_gradients& plan,
                                                   const Tensor& rows_gradient, const Tensor& w, dtype result_bias) {
  if (!takes_narrow(call, plan, w) || !begins_at_16_bytes(rows_gradient)) return {};
  const device on = device_of(w);
  const cuda::narrow_plan shares = cuda::plan_narrow(rows_gradient.size(0), w.size(1), cuda::facts(on.index));
  const Tensor x = as_matrix(*call.x, w.size(1));
  if (shares.teams == 0 || !begins_at_16_bytes(x)) return {};
  const prepared_contraction& c = *call.line.contraction;
  const spec::contraction::affine_norm& norm = c.parts.norm;
  const torch::stable::accelerator::DeviceGuard guard(on.index);
  void* stream = current_stream(on.index);
  const auto floats = [&](std::int64_t count) { return empty(&count, 1, dtype::f32, on); };

  frame before(c.before, *call.x, "x");
  for (const int i : {norm.scale, norm.bias})
    if (i >= 0) before.operand(i, *call.operands[static_cast<std::size_t>(i)]);
  const auto operand = [&](int i) { return i < 0 ? view{} : before.a.operand[i]; };
  const std::optional<Tensor> ready = floats(shares.tiles);
  const folded_matrix folded = fold_norm(norm, before, w, ready, stream);

  std::vector<Tensor> results;
  void* operand_gradient[kMaxOperands] = {};
  void* dx = nullptr;
  for (const spec::gradient_output& output : plan.before.outputs) {
    const std::int64_t columns = w.size(1);
    results.push_back(output.input == 0 ? empty_like(before.shape, output.type, on)
                                        : empty(&columns, 1, output.type, on));
    (output.input == 0 ? dx : operand_gradient[output.input - 1]) = results.back().data_ptr();
  }
  results.push_back(empty_like(shape_of(w), dtype_of(w), on));
  void* const matrix_gradient = results.back().data_ptr();
  void* result_bias_gradient = nullptr;
  if (result_bias != dtype::none) {
    const std::int64_t features = w.size(0);
    results.push_back(empty(&features, 1, result_bias, on));
    result_bias_gradient = results.back().data_ptr();
  }
  const auto gradient_of = [&](int i) { return i < 0 ? nullptr : operand_gradient[i]; };

  const Tensor parts = floats(shares.teams * shares.part()), products = floats(shares.part()),
               sums = floats(shares.shares());
  cuda::launch(cuda::narrow_call{.x = x.data_ptr(),
                                 .folded = folded.matrix.data_ptr(),
                                 .gradient = rows_gradient.data_ptr(),
                                 .dx = dx,
                                 .rows = x.size(0),
                                 .depth = w.size(1),
                                 .features = w.size(0),
                                 .x_stride = x.stride(0),
                                 .gradient_stride = rows_gradient.stride(0),
                                 .statistics = static_cast<const float*>(call.statistics->data_ptr()),
                                 .centres = norm.centres,
                                 .type = dtype_of(w),
                                 .shares = static_cast<float*>(sums.data_ptr()),
                                 .ready = static_cast<unsigned*>(ready->data_ptr()),
                                 .products = static_cast<float*>(parts.data_ptr())},
               shares, on.index, stream);
  const view scale = operand(norm.scale), bias = operand(norm.bias);
  cuda::launch(cuda::narrow_gradients_call{.parts = static_cast<float*>(parts.data_ptr()),
                                           .products = static_cast<float*>(products.data_ptr()),
                                           .matrix = w.data_ptr(),
                                           .scale = scale.data,
                                           .bias = bias.data,
                                           .matrix_gradient = matrix_gradient,
                                           .scale_gradient = gradient_of(norm.scale),
                                           .bias_gradient = gradient_of(norm.bias),
                                           .result_bias_gradient = result_bias_gradient,
                                           .depth = w.size(1),
                                           .features = w.size(0),
                                           .matrix_stride = w.stride(0),
                                           .type = dtype_of(w),
                                           .scale_type = scale.type,
                                           .bias_type = bias.type,
                                           .result_bias_type = result_bias},
               shares, on.index, stream);
  return results;
}

}  // namespace onepass::binding
