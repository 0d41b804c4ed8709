// Matrix products of a warp, from registers (sm_80 and later).
#pragma once

#include "onepass/lane/device/memory.cuda.h"

ONEPASS_BEGIN

// d (16 x 8) = d + a (16 x 16) times the transpose of b (8 x 16), of 16-bit elements, two in a word. With r =
// lane_id / 4 and c = 2 (lane_id % 4), a thread has of a: (r, c), (r + 8, c), (r, c + 8), (r + 8, c + 8), each with its
// right neighbour; of b: (r, c), (r, c + 8); of d: (r, c), (r, c + 1), (r + 8, c), (r + 8, c + 1). Source: PTX ISA 8.7,
// "Matrix Fragments for mma.m16n8k16".
template <dtype D>
ONEPASS_FUNCTION void add_mma(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
  static_assert(D == dtype::bf16 || D == dtype::f16);
  if constexpr (D == dtype::bf16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four matrices of 8 x 8 16-bit elements, transposed: a thread gets of each, with c = lane_id / 4 and r = 2 (lane_id
// % 4), the numbers (r, c) and (r + 1, c). Each thread gives the address of a row: 8 i + r that of row r of matrix i.
ONEPASS_FUNCTION void load_transposed_matrices(uint32 row, uint32 (&of)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(of[0]), "=r"(of[1]), "=r"(of[2]), "=r"(of[3])
               : "r"(row)
               : "memory");
}

ONEPASS_END
