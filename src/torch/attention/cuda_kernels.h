// The attention kernels (src/cuda/attention) on a call's tensors. src/choose/choose.h chooses the kernel. A launch
// returns false where addresses or strides do not suit it.
#pragma once

#include "src/choose/choose.h"
#include "src/cuda/attention/forward_sm90.h"
#include "src/cuda/attention/backward.h"
#include "src/plan/contraction.h"
#include "src/torch/call/prepared.h"
#include "src/torch/tensor.h"

namespace onepass::binding {

// Whether the kernels can write the tensor as it lies in memory.
bool are_batched_rows(const Tensor&, const Tensor& keys);

// With values the output is written to y, without to the result of the words behind `scores`.
struct values_and_output {
  const Tensor *values = nullptr, *y = nullptr;
};
// forward_sm90, or probabilities_sm90 (`by` a cluster). The call has the words behind `scores`; the tensors are filled
// in.
bool launch_forward_sm90(const spec::contraction&, choice::implementation by, cuda::attention_call,
                         const Tensor& queries, const Tensor& keys, const values_and_output&);
bool launch_forward_sm80(const prepared_contraction&, const cuda::request& behind, const arguments& a_behind,
                         const Tensor& queries, const Tensor& keys, const values_and_output&);

// Backward with values. The call has the words behind `scores`; the tensors are filled in.
struct attention_gradient_tensors {
  const Tensor *queries, *keys, *values;  // written, `are_batched_rows`; null: not wanted
};
bool launch_backward_sm90(const spec::contraction&, cuda::attention_call, const Tensor& queries, const Tensor& keys,
                          const Tensor& values, const Tensor& output, const Tensor& grad_output,
                          const attention_gradient_tensors&);
// The same for any number of keys.
bool launch_backward_sm80(const spec::contraction&, const cuda::attention_call&, const Tensor& queries,
                          const Tensor& keys, const Tensor& values, const Tensor& output, const Tensor& grad_output,
                          const attention_gradient_tensors&);

// Backward of a line without values that ends in softmax, whose other words scale by `factor` or mask.
struct probabilities_gradient_tensors {
  const Tensor &queries, &keys;
};
bool launch_probabilities_backward(float factor, const Tensor& queries, const Tensor& keys, const Tensor& probabilities,
                                   const Tensor& grad_probabilities, const probabilities_gradient_tensors&);

}  // namespace onepass::binding
