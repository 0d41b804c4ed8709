// The kernels of tiles and of warps for lines that begin with `scores` (src/cuda/attention), of a call's tensors. Where
// they serve says src/choose/choose.h; false: addresses or strides do not suit the kernel.
#pragma once

#include "src/choose/choose.h"
#include "src/cuda/attention/forward_sm90.h"
#include "src/cuda/attention/backward_sm90.h"
#include "src/plan/contraction.h"
#include "src/torch/call/prepared.h"
#include "src/torch/tensor.h"

namespace onepass::binding {

// By a cluster or by tiles; of the call, what stands behind `scores` is there, and y where there are values.
bool launch_attention(const spec::contraction&, choice::implementation by, cuda::attention_call, const Tensor& queries,
                      const Tensor& keys, const Tensor* values);

// By warps: with values the result goes to y, without to where what stands behind `scores` says.
struct values_to {
  const Tensor* values = nullptr;
  void* y = nullptr;
};
bool launch_by_warps(const prepared_contraction&, const cuda::request& behind, const arguments& a_behind,
                     const Tensor& queries, const Tensor& keys, const values_to&);

// Backward with values, likewise. `to`: where gradients go; products is filled in. `gradient`: of the result.
struct attention_gradients_to {
  const Tensor *queries, *keys, *values;  // null: not wanted
};
bool launch_attention_gradients(const spec::contraction&, cuda::attention_call, const Tensor& queries,
                                const Tensor& keys, const Tensor& values, const Tensor& result, const Tensor& gradient,
                                const attention_gradients_to&);
// The same by warps, of any number of keys; of the call, what stands behind `scores` is there.
bool launch_warp_gradients(const spec::contraction&, const cuda::attention_call&, const Tensor& queries,
                           const Tensor& keys, const Tensor& values, const Tensor& result, const Tensor& gradient,
                           const attention_gradients_to&);

// Backward of a line without values that ends in softmax, whose other words scale by `factor` or mask. `gradient`: of
// the weights.
struct score_gradients_to {
  const Tensor &queries, &keys;
};
bool launch_score_gradients(float factor, const Tensor& queries, const Tensor& keys, const Tensor& weights,
                            const Tensor& gradient, const score_gradients_to&);

}  // namespace onepass::binding
