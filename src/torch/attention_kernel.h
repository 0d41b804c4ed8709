// The kernel of tiles for lines that begin with `scores` (src/cuda/attention.h), of a call's tensors.
#pragma once

#include "src/cuda/attention.h"
#include "src/spec/contraction.h"
#include "src/torch/tensor.h"

namespace onepass::binding {

// Launches it where it can take the tensors; of the call, what stands behind `scores` is there, and y where there are
// values.
bool launch_attention(const spec::contraction&, cuda::attention_call, const Tensor& queries, const Tensor& keys,
                      const Tensor* values);

}  // namespace onepass::binding
