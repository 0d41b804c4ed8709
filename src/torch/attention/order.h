// How results of attention lie in memory: the output as the queries do, and a gradient as its tensor, in their order of
// dimensions. PyTorch's attention does so: heads are turned back without a copy.
#pragma once

#include "src/torch/tensor.h"

namespace onepass::binding {

// A fresh tensor of like's sizes, but for the last, in like's order of dimensions; contiguous where like's rows are
// not, or where like is broadcast. The fake operator has the same rule (python/onepass/_operators/fake.py).
Tensor empty_in_order(const Tensor& like, std::int64_t columns, dtype);
// The numbers of a tensor of such sizes, in that order.
Tensor in_order(const Tensor& like, const Tensor&);

}  // namespace onepass::binding
