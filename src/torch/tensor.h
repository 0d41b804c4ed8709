// What the binding asks of a tensor, in the core's terms.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <vector>

#include "src/plan/layout.h"
#include "src/torch/check.h"

namespace onepass::binding {

using torch::stable::Tensor;

dtype dtype_of(const Tensor&);            // dtype::none for one that onepass has no kernels for
std::string dtype_text(const Tensor& t);  // as Python writes it
using spec::shape_text;
std::string shape_text(const Tensor&);

spec::strided strided_of(const Tensor&, view* out);
spec::shape shape_of(const Tensor&);

struct device {
  std::int32_t type = 0, index = -1;
  bool operator==(const device&) const = default;
  bool is_cuda() const;
  std::string text() const;
};
device device_of(const Tensor&);

// Raises as PyTorch does where a tensor, named what(), is not where x is.
template <class What>
void require_device(const Tensor& t, const device& of_x, const What& what) {
  const device its = device_of(t);
  ONEPASS_CHECK(its == of_x, "onepass: Expected all tensors to be on the same device, but x is on ", of_x.text(),
                " and ", what(), " is on ", its.text());
}

// A fresh contiguous tensor; large ones on the CPU are in pages of our own (src/cpu/page_pool.h), or ask for huge pages
// before their first touch. The stable ABI gives memory of one's own a storage that cannot be resized (a checkpoint
// that discards its output does that, and `out=`), so the former needs `let`, of the library that autograd.h opens,
// which gives a tensor's storage torch's allocator.
void let_storages_resize(void (*let)(void* tensor));
Tensor empty(const std::int64_t* sizes, int dim, dtype, const device&);
Tensor empty_like(const spec::shape&, dtype, const device&);
// The same with strides of its own, that are dense.
Tensor empty_strided(const std::int64_t* sizes, const std::int64_t* strides, int dim, dtype, const device&);

// The same memory in another shape; the dispatcher takes microseconds for it.
// offset: of its first number, from that of the tensor.
Tensor view_of(const Tensor&, const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides,
               std::int64_t offset = 0);

// A matrix in memory that something else holds; no gradient comes of it.
Tensor matrix_at(void* data, std::int64_t rows, std::int64_t columns, std::int64_t row_stride,
                 std::int64_t column_stride, dtype, const device&);

// The same numbers in another dtype; the tensor itself where it has it.
Tensor in_dtype(const Tensor&, dtype);

// The tensor broadcast to the shape; and made contiguous.
Tensor expanded(const Tensor&, const spec::shape&);
Tensor expanded_copy(const Tensor&, const spec::shape&);

}  // namespace onepass::binding
