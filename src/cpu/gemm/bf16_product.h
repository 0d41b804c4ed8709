// The GEMM of panel_product.h for bfloat16, by AVX512_BF16 (which Highway 1.0 does not know).
#pragma once

#include "src/cpu/gemm/panel_product.h"

namespace onepass::cpu {

// False where the compiler could not compile this file's functions. The caller checks that the processor has
// AVX512_BF16.
extern const bool kHasBf16Product;

inline constexpr int64 kBf16TileColumns = 32;
// Packs tiles [begin, end) of the columns of a right factor, whose rows or columns are contiguous.
void pack_bf16_factor(const matrix& b, void* to, int64 begin, int64 end);

int64 bf16_left_bytes(const matrix& a);  // to pack a left factor whose rows are not contiguous
// result: bfloat16 or float32.
void bf16_product(const matrix& result, const matrix& a, const factor_tiles& b, void* room_for_left, bool add);
void round_rows_to_bf16(const matrix& floats, const matrix& result);

}  // namespace onepass::cpu
