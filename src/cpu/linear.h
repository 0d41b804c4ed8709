// On the CPU: what stands before `linear`, the matrix product and what stands behind it a panel of rows at a time, so
// that what one gives the other stays in a core's cache.
#pragma once

#include <vector>

#include "src/cpu/panel.h"
#include "src/plan/contraction.h"

namespace onepass::cpu {

// Whether forward in panels brings anything beside a library's product. A function of shapes and dtypes only: other
// sums of a product's terms give other bits.
bool panels_serve_linear(dtype, int64 rows, int64 columns, int64 features);
inline constexpr const char* kWhyNoLinearPanels = "panels are for many rows on the CPU, in float32 or float64";

// Rows of a panel in backward of what stands before `linear`; 0 where panels bring nothing beside a library's product.
int64 backward_panel_rows(const spec::contraction&, dtype, int64 rows, int64 columns, int64 features);

// Whether the gradient of the matrix may come of panels too, beside a library's product.
bool sums_in_panels(int64 rows, int64 features);

// Everything but x and the result of what stands before and behind has the dtype of `weight`.
struct linear_forward {
  matrix weight;     // (features, columns), its rows or columns contiguous
  matrix x{};        // what `linear` takes, its rows contiguous, where no words stand before it
  matrix product{};  // where it is wanted, or is the result
  matrix result;     // of the words behind, or the product; its rows contiguous
  const row_call* before = nullptr;
  const row_call* behind = nullptr;
};
void forward_in_panels(const linear_forward&);

struct linear_backward {
  matrix gradient;  // of the product: (rows, features)
  matrix weight;
  // Of the words before; where there are none, what `linear` took and its gradient, if that is wanted.
  const row_call* before = nullptr;
  matrix x{}, x_gradient{};
  // What makes again what `linear` took, where the gradient of the matrix is wanted or `before` begins there.
  const row_call* again = nullptr;
  bool from_result = false;
  matrix weight_gradient{};            // contiguous; no data where it is not wanted
  int64 panel_rows = 0;                // 0: as many as fit
  std::vector<view> column_outputs{};  // of `before`, one for each wanted column operand
};
void backward_in_panels(const linear_backward&);

}  // namespace onepass::cpu
