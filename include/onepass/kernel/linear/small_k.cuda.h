// `linear` with few in_features and a small matrix in one kernel (sm_80 and later): memory traffic is x and the result.
// Four threads have a row from x to the end of the line. They run the prologue, keep its result in registers as mma
// fragments, multiply it by the matrix in shared memory and run the epilogue. No warp waits for another. The fragments
// and their mma are in kernel/common/warp_mma.cuda.h.
//
// Config:
//   kX             storage type throughout: bf16 or f16
//   kPitch         bytes from a row of the matrix in shared memory to the next: 64 more than a multiple of 128
//   kThreads
//   before, behind prologue and epilogue: what kernel/common/cursor.cuda.h asks for; before: kAtOnce too, rows that a
//                  thread makes at a time, an even number
#pragma once

#include "onepass/kernel/linear/prologue.cuda.h"
#include "onepass/kernel/common/warp_mma.cuda.h"

ONEPASS_BEGIN

// The prefetched part of x, then the matrix.
extern __shared__ __align__(16) char small_k_memory[];

template <class Config, class Before, class Behind>
ONEPASS_FUNCTION void small_k_forward(const warp_linear_arguments& a) {
  using before = typename Config::before;
  using behind = typename Config::behind;
  using index = typename behind::index;
  __shared__ typename row_threads<before>::slots slots;
  input_rows<before, Before> input(a.before, slots, small_k_memory);
  constexpr int kRows = decltype(input)::kRows;
  const int64 own = static_cast<int64>(blockIdx.x) * kRows, step = static_cast<int64>(gridDim.x) * kRows;
  wait_for_kernel_before();
  if constexpr (before::kStages > 0) input.load_async(own);
  char* matrix = small_k_memory + decltype(input)::kCopyBytes;
  load_matrix_async<Config>(matrix, a.matrix, a.stride, a.k, static_cast<int>(a.behind.columns));
  rows_in_registers<Config> rows{};
  for (int64 first = own; first < a.before.rows; first += step) {
    input.make(first, first + step, [&](auto&, int i, int k, pack<float, 8> v) { rows.set(i, k, v); });
    if (first == own) {
      wait_for_copy_groups<before::kStages>();
      __syncthreads();
    }
    for (int group = 0; group < a.behind.columns; group += kResultColumns) {
      float d[rows.kRows / 2][4][4] = {};
      rows.multiply(d, matrix, group);
      const auto column = static_cast<index>(group + static_cast<int>(threadIdx.x) % 4 * 8);
      cursor<behind, Behind> at(a.behind);
#pragma unroll
      for (int i = 0; i < rows.kRows; ++i) {
        const int64 row = first + i * before::kDown + static_cast<int>(threadIdx.x) / 4;
        at.set_row(static_cast<index>(row), row < a.behind.rows);
        at.set_column(column, behind::kExact ? 8 : count_at<8>(column, a.behind.columns));
        at.store_y(Behind::pre::forward(at.rounded(rows.product(d, i)), at));
      }
    }
  }
}

ONEPASS_END
