// Matrix products by the vendor's library, through torch: its C functions for mm and addmm, below the dispatcher.
#include "src/torch/matrix_product.h"

#include <dlfcn.h>

#include <string>

#include "src/torch/check.h"

namespace onepass::binding {
namespace {

using mm_out = AOTITorchError (*)(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2);
using addmm_out = AOTITorchError (*)(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1,
                                     AtenTensorHandle mat2, double beta, double alpha);

struct products {
  mm_out mm;
  addmm_out addmm;

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
    addmm = reinterpret_cast<addmm_out>(find("addmm_out"));
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

// The same memory as a matrix; the dispatcher takes microseconds for it.
Tensor matrix_view(const Tensor& t, const std::int64_t (&sizes)[2], const std::int64_t (&strides)[2]) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), 2, sizes, strides, 0, &handle));
  return Tensor(handle);
}

}  // namespace

Tensor as_matrix(const Tensor& t, std::int64_t columns) {
  if (t.dim() == 2) return t;
  const std::int64_t rows = shape_of(t).rows();
  if (!t.is_contiguous()) return torch::stable::reshape(t, {rows, columns});
  return matrix_view(t, {rows, columns}, {columns, 1});
}

Tensor transposed(const Tensor& matrix) {
  return matrix_view(matrix, {matrix.size(1), matrix.size(0)}, {matrix.stride(1), matrix.stride(0)});
}

Tensor matrix_product(const Tensor& a, const Tensor& b, const Tensor& like, const Tensor* bias) {
  std::vector<std::int64_t> sizes(like.sizes().begin(), like.sizes().end());
  sizes.back() = b.size(1);
  const device on = device_of(a);
  Tensor result = empty(sizes.data(), static_cast<int>(sizes.size()), dtype_of(a), on);
  const Tensor flat = as_matrix(result, b.size(1));
  const products& with = products_on(on);
  TORCH_ERROR_CODE_CHECK(bias ? with.addmm(flat.get(), bias->get(), a.get(), b.get(), 1, 1)
                              : with.mm(flat.get(), a.get(), b.get()));
  return result;
}

}  // namespace onepass::binding
