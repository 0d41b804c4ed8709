// GEMMs that take less time than the call of a library.
#pragma once

#include "src/cpu/gemm/matrix.h"

namespace onepass::cpu {

// A function of shapes and dtypes only.
bool is_small_product(const matrix& a, const matrix& b);

// result = a b + bias (one row, or null); the result's rows are contiguous. Arithmetic is float, or double where the
// result is, with one rounding at the store.
void small_product(const matrix& result, const matrix& a, const matrix& b, const matrix* bias);

// Copies a row to every row of the result, which has its dtype. Returns false, and does nothing, for large results.
bool repeat_row(const matrix& row, const matrix& result);

}  // namespace onepass::cpu
