// Lines with `linear` of many short rows and a small matrix in one kernel (sm_80 and later): x and the result are what
// crosses memory. Four threads have a row, from its first number to the end of the line: they make what `linear` takes,
// which stays in their registers as the matrix unit wants it, and multiply it by the matrix, which stays in shared
// memory. No warp waits for another.
//
// A thread has pieces of 16 bytes of a row as they lie in memory: which of the unit's 16 columns they make does not
// matter, as long as it is the same for both factors. Nor does which of its 8 columns is which of the matrix's rows:
// a thread's results are 8 neighbours.
//
// Config:
//   kX             storage type throughout: bf16 or f16
//   kPitch         bytes from a row of the matrix in shared memory to the next: 64 more than a multiple of 128
//   kThreads
//   before, behind what place.cuda.h asks for; before: kAtOnce too, rows that a thread makes at a time, an even number
#pragma once

#include "onepass/lane/warp_matrix.cuda.h"
#include "onepass/skeleton/input_rows.cuda.h"

ONEPASS_BEGIN

inline constexpr int kResultColumns = 32;  // of the result at a time: eight in each of a row's threads

// x on its way, behind it the matrix.
extern __shared__ __align__(16) char resident_memory[];
template <class Config>
ONEPASS_FUNCTION char* resident_matrix() {
  return resident_memory + input_rows<typename Config::before, line<chain<>>>::kCopyBytes;
}

// All of it, zeros behind its rows' ends.
template <class Config>
ONEPASS_FUNCTION void bring_matrix(const warp_linear_arguments& a) {
  constexpr int kPieces = Config::before::kHeldLanes * 4;
  const int pieces = static_cast<int>(a.behind.columns) * kPieces;
  for (int i = static_cast<int>(threadIdx.x); i < pieces; i += Config::kThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const bool present = piece * 8 < a.depth;
    copy_or_clear(resident_matrix<Config>() + row * Config::kPitch + piece * 16,
                  static_cast<const uint16*>(a.matrix) + row * a.stride + (present ? piece * 8 : 0), present);
  }
  close_copy_group();
}

// This thread's rows of what `linear` takes.
template <class Config>
struct rows_in_registers {
  static constexpr int kRows = Config::before::kAtOnce, kPieces = Config::before::kHeldLanes;
  uint4 of[kRows][kPieces];

  // The products with 32 rows of the matrix from `first` on; [rows, two of them at a time][the unit's 8 columns].
  ONEPASS_FUNCTION void multiply(float (&d)[kRows / 2][4][4], int first) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, nth = lane / 4;
    const char* own = resident_matrix<Config>() + (first + nth / 2 * 8 + nth % 2) * Config::kPitch + lane % 4 * 16;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4 w = *reinterpret_cast<const uint4*>(own + j * 2 * Config::kPitch + k * 64);
#pragma unroll
        for (int i = 0; i < kRows; i += 2) {
          const uint4 &above = of[i][k], &below = of[i + 1][k];
          add_warp_product<Config::kX>(d[i / 2][j], above.x, below.x, above.y, below.y, w.x, w.y);
          add_warp_product<Config::kX>(d[i / 2][j], above.z, below.z, above.w, below.w, w.z, w.w);
        }
      }
    }
  }
};

template <class Config, class Before, class Behind>
ONEPASS_FUNCTION void resident_forward(const warp_linear_arguments& a) {
  using before = typename Config::before;
  using behind = typename Config::behind;
  using index = typename behind::index;
  using memory_of = memory<Config::kX, 8, 8>;
  __shared__ typename row_threads<before>::slots slots;
  input_rows<before, Before> input(a.before, slots, resident_memory);
  constexpr int kRows = decltype(input)::kRows;
  const int64 own = static_cast<int64>(blockIdx.x) * kRows, step = static_cast<int64>(gridDim.x) * kRows;
  wait_for_kernel_before();
  if constexpr (before::kStages > 0) input.bring(own);
  bring_matrix<Config>(a);
  rows_in_registers<Config> rows{};
  for (int64 first = own; first < a.before.rows; first += step) {
    input.make(first, first + step, [&](auto&, int i, int k, pack<float, 8> v) {
      rows.of[i][k] = memory_of::whole(memory_of::buffer_of(v));
    });
    if (first == own) {
      wait_for_copy_groups<before::kStages>();
      __syncthreads();
    }
    for (int group = 0; group < a.behind.columns; group += kResultColumns) {
      float d[rows.kRows / 2][4][4] = {};
      rows.multiply(d, group);
      const auto column = static_cast<index>(group + static_cast<int>(threadIdx.x) % 4 * 8);
      place<behind, Behind> at(a.behind);
#pragma unroll
      for (int i = 0; i < rows.kRows; ++i) {
        const int64 row = first + i * before::kDown + static_cast<int>(threadIdx.x) / 4;
        pack<float, 8> product;
#pragma unroll
        for (int c = 0; c < 8; ++c) product.v[c] = d[i / 2][c / 2][i % 2 * 2 + c % 2];
        at.set_row(static_cast<index>(row), row < a.behind.rows);
        at.set_column(column, behind::kExact ? 8 : count_at<8>(column, a.behind.columns));
        at.store_y(Behind::pre::forward(at.rounded(product), at));
      }
    }
  }
}

ONEPASS_END
