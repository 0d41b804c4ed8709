// Products of bfloat16 matrices by the instruction that multiplies pairs of them (AVX512_BF16, which Highway 1.0 does
// not know), as panel_product.h has them.
#pragma once

#include "src/cpu/gemm/panel_product.h"

namespace onepass::cpu {

// Whether this file's functions were compiled. They may be called where the processor has the instruction.
extern const bool kHasBf16Product;

inline constexpr int64 kBf16TileColumns = 32;
// Some tiles of columns of a factor whose rows or columns are contiguous.
void pack_bf16_factor(const matrix& b, void* to, int64 begin, int64 end);

int64 bf16_left_bytes(const matrix& a);  // room for a left factor that is not as it is multiplied: transposed
// result: bfloat16 or float32.
void bf16_product(const matrix& result, const matrix& a, const factor_tiles& b, void* room_for_left, bool add);
void round_rows_to_bf16(const matrix& floats, const matrix& result);

}  // namespace onepass::cpu
