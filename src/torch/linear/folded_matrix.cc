// A norm folded into the matrix behind it, on CUDA.
#include "src/torch/linear/folded_matrix.h"

#include "src/cuda/linear/gemm_sm90.h"

namespace onepass::binding {

folded_matrix fold_norm(const spec::contraction::affine_norm& norm, const frame& before, const Tensor& w,
                        const std::optional<Tensor>& ready, void* stream) {
  const std::int64_t size[2] = {w.size(0), w.size(1)}, padded[2] = {2, cuda::padded_columns(w.size(0))};
  folded_matrix into{empty(size, 2, dtype_of(w), before.on), empty(padded, 2, dtype::f32, before.on)};
  auto* sums = static_cast<float*>(into.sums.data_ptr());
  const auto operand = [&](int i) { return i < 0 ? view{} : before.a.operand[i]; };
  const view scale = operand(norm.scale), bias = operand(norm.bias);
  cuda::launch(cuda::fold_call{.matrix = w.data_ptr(),
                               .scale = scale.data,
                               .bias = bias.data,
                               .folded = into.matrix.data_ptr(),
                               .sums = sums,
                               .offsets = sums + padded[1],
                               .depth = w.size(1),
                               .stride = w.stride(0),
                               .ready = ready ? static_cast<unsigned*>(ready->data_ptr()) : nullptr,
                               .panels = ready ? ready->numel() : 0,
                               .type = dtype_of(w),
                               .scale_type = scale.type,
                               .bias_type = bias.type,
                               .centres = norm.centres,
                               .columns = w.size(0)},
               before.on.index, stream);
  return into;
}

}  // namespace onepass::binding
