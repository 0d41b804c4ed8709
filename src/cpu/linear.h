// `linear` on the CPU: prologue, GEMM and epilogue of a panel of rows at a time, while the panel is in a core's cache.
#pragma once

#include <vector>

#include "src/cpu/panel.h"
#include "src/plan/contraction.h"

namespace onepass::cpu {

// Whether forward in panels is faster than a library's GEMM. A function of shapes and dtypes only: another order of a
// sum gives other bits.
bool panels_serve_linear(dtype, int64 rows, int64 columns, int64 features);
inline constexpr const char* kWhyNoLinearPanels = "panels are for many rows on the CPU, in float32 or float64";

// Rows of a panel in backward of the words before `linear`; 0 where a library's GEMM is faster.
int64 backward_panel_rows(const spec::contraction&, dtype, int64 rows, int64 columns, int64 features);

// Whether panels may compute the gradient of the matrix, too.
bool sums_in_panels(int64 rows, int64 features);

// All matrices have the dtype of `weight`; x of `before` and the result of `behind` may have another.
struct linear_forward {
  matrix weight;     // (features, columns), its rows or columns contiguous
  matrix x{};        // the input of the GEMM, its rows contiguous, where no words stand before `linear`
  matrix product{};  // the GEMM's result, where it is wanted or is the line's
  matrix result;     // of the epilogue, or the GEMM; its rows contiguous
  const row_call* before = nullptr;
  const row_call* behind = nullptr;
};
void forward_in_panels(const linear_forward&);

struct linear_backward {
  matrix gradient;  // of the GEMM's result: (rows, features)
  matrix weight;
  // Backward of the prologue; where there is none, the GEMM's input, and its gradient if that is wanted.
  const row_call* before = nullptr;
  matrix x{}, x_gradient{};
  // Recomputes the GEMM's input, where the gradient of the matrix is wanted or `before` begins at that input.
  const row_call* recompute = nullptr;
  bool from_result = false;
  matrix weight_gradient{};            // contiguous; no data where it is not wanted
  int64 panel_rows = 0;                // 0: as many as fit
  std::vector<view> column_outputs{};  // of `before`, one for each wanted column operand
};
void backward_in_panels(const linear_backward&);

}  // namespace onepass::cpu
