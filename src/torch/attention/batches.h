// Rows of queries in batches, each with its own keys and values.
#pragma once

#include <functional>
#include <numeric>

#include <optional>

#include "src/cuda/attention/forward_sm90.h"
#include "src/torch/tensor.h"

namespace onepass::binding {

inline int own_batch_sizes(const Tensor& keys) { return spec::own_batch_sizes(shape_of(keys)); }

// The tensor as the kernels of sm_90a take it; own: batch sizes that the keys have. None where strides do not suit
// them.
inline std::optional<cuda::batched_rows> batched_rows(const Tensor& t, int own) {
  const int dim = static_cast<int>(t.dim());
  const spec::strided all = strided_of(t, nullptr);
  const auto outer = spec::one_dimension(all, 0, own - 1), inner = spec::one_dimension(all, own > 0 ? own - 1 : 0, own),
             query_heads = spec::one_dimension(all, own, dim - 2);
  if (!outer || !inner || !query_heads || t.stride(dim - 1) != 1) return {};
  return cuda::batched_rows{.data = t.data_ptr(),
                            .outer = outer->size,
                            .inner = inner->size,
                            .query_heads = query_heads->size,
                            .rows = t.size(dim - 2),
                            .head_dim = t.size(dim - 1),
                            .outer_stride = outer->stride,
                            .inner_stride = inner->stride,
                            .query_head_stride = query_heads->stride,
                            .row_stride = t.stride(dim - 2)};
}

// Queries, scores and keys as [batches, rows, columns], in the keys' dtype. Rows that share keys are of one batch.
class batches {
 public:
  batches(const Tensor& queries, const Tensor& keys)
      : own_(own_batch_sizes(keys)),
        type_(dtype_of(keys)),
        count_(count(queries, 0, own_)),
        rows_(count(queries, own_, static_cast<int>(queries.dim()) - 1)) {}

  Tensor rows(const Tensor& t) const {
    return torch::stable::reshape(in_dtype(t, type_), {count_, rows_, t.size(t.dim() - 1)});
  }
  Tensor keys(const Tensor& t) const {
    return torch::stable::reshape(t, {count_, t.size(t.dim() - 2), t.size(t.dim() - 1)});
  }

  std::int64_t count() const { return count_; }
  std::int64_t row_count() const { return rows_; }

 private:
  static std::int64_t count(const Tensor& t, int begin, int end) {
    const auto sizes = t.sizes();
    return std::accumulate(sizes.begin() + begin, sizes.begin() + end, std::int64_t{1}, std::multiplies<>());
  }

  int own_;
  dtype type_;
  std::int64_t count_, rows_;
};

}  // namespace onepass::binding
