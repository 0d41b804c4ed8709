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

}  // namespace

Tensor as_matrix(const Tensor& t, std::int64_t columns) {
  if (t.dim() == 2) return t;  // a call of the dispatcher less
  return torch::stable::reshape(t, {shape_of(t).rows(), columns});
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
