// What the C++ API's lines with products share.
#include "src/cpu/api/products.h"

#include "src/cpu/gemm/panel_product.h"

namespace onepass {

void require_product(const tensor& matrix, const std::string& name) {
  if (!cpu::has_panel_product(matrix.type))
    refuse(name + " must be float32, float64 or, where the processor multiplies it (AVX512_BF16), bfloat16");
}

cpu::matrix rows_of(const tensor& t, const std::string& name) {
  require_there(t, name);
  const sizes_of strides = strides_of(t);
  const int last = static_cast<int>(t.sizes.size()) - 1;
  const auto rows = spec::one_dimension({t.data, t.type, last + 1, t.sizes.data(), strides.data(), nullptr}, 0, last);
  const std::int64_t columns = t.sizes.back();
  if (!rows || (strides.back() != 1 && columns > 1))
    refuse(name + " must be contiguous, or at least rows of one distance and contiguous in its last dimension");
  return {t.data, t.type, rows->size, columns, rows->stride, 1};
}

tensor elsewhere_like(const tensor& t, const sizes_of& sizes) {
  return {t.data, t.type, sizes, sizes_of(sizes.size(), 0)};
}

}  // namespace onepass
