// Matrix products by the vendor's library, through torch: its C functions for mm, addmm, bmm and baddbmm, below the
// dispatcher.
#include "src/torch/matrix_product.h"

#include <dlfcn.h>

#include <string>

#include "src/cpu/gemm/small_product.h"
#include "src/torch/check.h"

namespace onepass::binding {
namespace {

using mm_out = AOTITorchError (*)(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2);
using addmm_out = AOTITorchError (*)(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1,
                                     AtenTensorHandle mat2, double beta, double alpha);

struct products {
  mm_out mm, bmm;
  addmm_out addmm, baddbmm;

  explicit products(const std::string& device) {
    const std::string name = "libtorch_" + device + ".so";
    void* library = dlopen(name.c_str(), RTLD_NOLOAD | RTLD_LAZY);
    ONEPASS_CHECK(library != nullptr, "onepass: ", name, " is not loaded");
    const auto find = [&](const char* what) {
      const std::string symbol = "aoti_torch_" + device + "_" + what;
      void* found = dlsym(library, symbol.c_str());
      ONEPASS_CHECK(found != nullptr, "onepass: ", symbol, " is missing from ", name);
      return found;
    };
    mm = reinterpret_cast<mm_out>(find("mm_out"));
    bmm = reinterpret_cast<mm_out>(find("bmm_out"));
    addmm = reinterpret_cast<addmm_out>(find("addmm_out"));
    baddbmm = reinterpret_cast<addmm_out>(find("baddbmm_out"));
  }
};

const products& products_on(const device& on) {
  if (on.is_cuda()) {
    static const products cuda("cuda");
    return cuda;
  }
  static const products cpu("cpu");
  return cpu;
}

}  // namespace

cpu::matrix matrix_of(const Tensor& t) {
  return {t.data_ptr(), dtype_of(t), t.size(0), t.size(1), t.stride(0), t.stride(1)};
}

Tensor as_matrix(const Tensor& t, std::int64_t columns) {
  if (t.dim() == 2) return t;
  const std::int64_t rows = shape_of(t).rows();
  if (!t.is_contiguous()) return torch::stable::reshape(t, {rows, columns});
  return view_of(t, {rows, columns}, {columns, 1});
}

Tensor transposed(const Tensor& t) {
  std::vector<std::int64_t> sizes(t.sizes().begin(), t.sizes().end()), strides(t.strides().begin(), t.strides().end());
  std::swap(sizes.back(), sizes[sizes.size() - 2]);
  std::swap(strides.back(), strides[strides.size() - 2]);
  return view_of(t, sizes, strides);
}

Tensor empty_product(const Tensor& like, std::int64_t columns, dtype type) {
  std::vector<std::int64_t> sizes(like.sizes().begin(), like.sizes().end());
  sizes.back() = columns;
  return empty(sizes.data(), static_cast<int>(sizes.size()), type, device_of(like));
}

Tensor shape_of_product(const Tensor& x, const Tensor& matrix) {
  std::vector<std::int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = matrix.size(matrix.dim() - 2);
  return view_of(matrix, sizes, std::vector<std::int64_t>(sizes.size(), 0));
}

void multiply(const Tensor& result, const Tensor& a, const Tensor& b, const Tensor* added) {
  const products& with = products_on(device_of(a));
  TORCH_ERROR_CODE_CHECK(added ? with.addmm(result.get(), added->get(), a.get(), b.get(), 1, 1)
                               : with.mm(result.get(), a.get(), b.get()));
}

void multiply_batches(const Tensor& result, const Tensor& a, const Tensor& b, const Tensor* added) {
  const products& with = products_on(device_of(a));
  TORCH_ERROR_CODE_CHECK(added ? with.baddbmm(result.get(), added->get(), a.get(), b.get(), 1, 1)
                               : with.bmm(result.get(), a.get(), b.get()));
}

void product_into(const Tensor& result, const Tensor& a, const Tensor& b, const Tensor* bias) {
  if (device_of(a).is_cuda()) return multiply(result, a, b, bias);
  const cpu::matrix left = matrix_of(a), right = matrix_of(b), to = matrix_of(result);
  const cpu::matrix row = bias ? cpu::matrix{bias->data_ptr(), to.type, 1, to.columns, 0, bias->stride(0)} : to;
  if (cpu::is_small_product(left, right)) {
    cpu::small_product(to, left, right, bias ? &row : nullptr);
  } else if (bias && cpu::repeat_row(row, to)) {
    multiply(result, a, b, &result);
  } else {
    multiply(result, a, b, bias);
  }
}

Tensor matrix_product(const Tensor& a, const Tensor& b, const Tensor& like, const Tensor* bias) {
  Tensor result = empty_product(like, b.size(1), dtype_of(a));
  product_into(as_matrix(result, b.size(1)), a, b, bias);
  return result;
}

}  // namespace onepass::binding
