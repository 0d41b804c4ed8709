// A matrix in shared memory and rows in a warp's registers, which are multiplied by it (sm_80 and later). Four threads
// have a row of either factor.
//
// A thread has pieces of 16 bytes of a row as they lie in memory: which of the unit's 16 columns they make does not
// matter, as long as it is the same for both factors. Nor does which of its 8 columns is which of the matrix's rows:
// a thread's results are 8 neighbours.
//
// Config:
//   kX        storage type of both: bf16 or f16
//   kPitch    bytes from a row of the matrix in shared memory to the next: 64 more than a multiple of 128
//   kThreads
//   before    of the rows: kHeldLanes and kAtOnce, an even number
#pragma once

#include "onepass/lane/warp_matrix.cuda.h"
#include "onepass/skeleton/place.cuda.h"

ONEPASS_BEGIN

inline constexpr int kResultColumns = 32;  // of the result at a time: eight in each of a row's threads

// `count` of its rows, `stride` numbers apart, with zeros behind their ends. A thread has the same piece of several
// rows.
template <class Config>
ONEPASS_FUNCTION void bring_matrix(char* to, const void* from, int64 stride, int64 depth, int count) {
  constexpr int kPieces = Config::before::kHeldLanes * 4, kAtOnce = Config::kThreads / kPieces;
  const int piece = static_cast<int>(threadIdx.x) % kPieces, first = static_cast<int>(threadIdx.x) / kPieces;
  const bool present = Config::before::kExact || piece * 8 < depth;
  const auto* source = static_cast<const uint16*>(from) + first * stride + (present ? piece * 8 : 0);
  char* target = to + first * Config::kPitch + piece * 16;
  if (first < kAtOnce) {
#pragma unroll 4
    for (int row = first; row < count; row += kAtOnce) {
      copy_or_clear(target, source, present);
      source += kAtOnce * stride, target += kAtOnce * Config::kPitch;
    }
  }
  close_copy_group();
}

// This thread's rows.
template <class Config>
struct rows_in_registers {
  static constexpr int kRows = Config::before::kAtOnce, kPieces = Config::before::kHeldLanes;
  uint4 of[kRows][kPieces];

  ONEPASS_FUNCTION void set(int row, int piece, pack<float, 8> numbers) {
    using memory_of = memory<Config::kX, 8, 8>;
    of[row][piece] = memory_of::whole(memory_of::buffer_of(numbers));
  }

  // The products with 32 rows of the matrix from `first` on; [rows, two of them at a time][the unit's 8 columns].
  ONEPASS_FUNCTION void multiply(float (&d)[kRows / 2][4][4], const char* matrix, int first) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, nth = lane / 4;
    const char* own = matrix + (first + nth / 2 * 8 + nth % 2) * Config::kPitch + lane % 4 * 16;
    multiply(d, [&](int j, int k) { return own + j * 2 * Config::kPitch + k * 64; });
  }
  // piece(j, k): where of the thread's row j of the matrix's, two further each, its piece k is.
  template <class Piece>
  ONEPASS_FUNCTION void multiply(float (&d)[kRows / 2][4][4], const Piece& piece) const {
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4 w = *reinterpret_cast<const uint4*>(piece(j, k));
#pragma unroll
        for (int i = 0; i < kRows; i += 2) {
          const uint4 &above = of[i][k], &below = of[i + 1][k];
          add_warp_product<Config::kX>(d[i / 2][j], above.x, below.x, above.y, below.y, w.x, w.y);
          add_warp_product<Config::kX>(d[i / 2][j], above.z, below.z, above.w, below.w, w.z, w.w);
        }
      }
    }
  }
  // Of row i the 8 neighbours from column `first` + 8 (thread of the row) on.
  static ONEPASS_FUNCTION pack<float, 8> product(const float (&d)[kRows / 2][4][4], int i) {
    pack<float, 8> row;
#pragma unroll
    for (int c = 0; c < 8; ++c) row.v[c] = d[i / 2][c / 2][i % 2 * 2 + c % 2];
    return row;
  }
};

ONEPASS_END
