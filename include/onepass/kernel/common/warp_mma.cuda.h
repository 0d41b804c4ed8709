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
//   before    of the rows: kHeldVectors and kAtOnce, an even number
#pragma once

#include "onepass/kernel/common/cursor.cuda.h"
#include "onepass/kernel/common/swizzled_tile.cuda.h"
#include "onepass/lane/device/warp_matrix.cuda.h"

ONEPASS_BEGIN

inline constexpr int kResultColumns = 32;  // of the result at a time: eight in each of a row's threads

// `count` of its rows, `stride` numbers apart, with zeros behind their ends. A thread has the same piece of several
// rows.
template <class Config>
ONEPASS_FUNCTION void load_matrix_async(char* to, const void* from, int64 stride, int64 depth, int count) {
  constexpr int kPieces = Config::before::kHeldVectors * 4, kAtOnce = Config::kThreads / kPieces;
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
  static constexpr int kRows = Config::before::kAtOnce, kPieces = Config::before::kHeldVectors;
  uint4 of[kRows][kPieces];

  ONEPASS_FUNCTION void set(int row, int piece, pack<float, 8> numbers) {
    using memory_of = memory<Config::kX, 8, 8>;
    of[row][piece] = memory_of::whole(memory_of::buffer_of(numbers));
  }

  // The products with 32 rows of the matrix from `first` on; [rows, two of them at a time][the unit's 8 columns].
  ONEPASS_FUNCTION void multiply(float (&d)[kRows / 2][4][4], const char* matrix, int first) const {
    const int lane_id = static_cast<int>(threadIdx.x) % 32, nth = lane_id / 4;
    const char* own = matrix + (first + nth / 2 * 8 + nth % 2) * Config::kPitch + lane_id % 4 * 16;
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
          add_mma<Config::kX>(d[i / 2][j], above.x, below.x, above.y, below.y, w.x, w.y);
          add_mma<Config::kX>(d[i / 2][j], above.z, below.z, above.w, below.w, w.z, w.w);
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

// Sixteen rows of a warp, as the left factor of products with tiles in shared memory, and sums of a tile's rows (sm_80
// and later). A thread has two rows, eight apart.

template <dtype D, int kPieces>
struct warp_rows {
  struct config {
    static constexpr dtype kX = D;
    struct before {
      static constexpr int kAtOnce = 2, kHeldVectors = (kPieces + 3) / 4;
    };
  };
  using tile = swizzled_tile<kPieces>;
  using registers = rows_in_registers<config>;
  registers of{};

  static ONEPASS_FUNCTION int piece(int k) { return static_cast<int>(threadIdx.x) % 4 + 4 * k; }
  // Row i from memory.
  ONEPASS_FUNCTION void load(int i, const uint16* row, int64 depth) {
#pragma unroll
    for (int k = 0; k < registers::kPieces; ++k)
      if (piece(k) * 8 < depth) of.of[i][k] = __ldg(reinterpret_cast<const uint4*>(row) + piece(k));
  }
  // Both from a tile, the warp's first row there.
  ONEPASS_FUNCTION void take(const char* from, int first) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int k = 0; k < registers::kPieces; ++k)
        if (piece(k) < kPieces)
          of.of[i][k] = *reinterpret_cast<const uint4*>(
              from + tile::offset(first + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * i, piece(k)));
    }
  }
  // This thread's part of Σ row i · another row in memory.
  ONEPASS_FUNCTION float product_with(int i, const uint16* row, int64 depth) const {
    using memory_of = memory<D, 8, 8>;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < registers::kPieces; ++k) {
      if (piece(k) * 8 >= depth) continue;
      typename memory_of::buffer own;
      own.words[0] = of.of[i][k];
      sum += sum_lanes(memory_of::template numbers_of<float>(own) *
                       memory_of::template numbers_of<float>(memory_of::load(row + piece(k) * 8, 8)));
    }
    return sum;
  }
  // The products with the 32 rows of a tile from `first` on (kernel/common/warp_mma.cuda.h).
  ONEPASS_FUNCTION void multiply(float (&d)[1][4][4], const char* matrix, int first) const {
    const int nth = static_cast<int>(threadIdx.x) % 32 / 4, row = first + nth / 2 * 8 + nth % 2;
    of.multiply(d, [&](int j, int k) { return matrix + tile::offset(row + 2 * j, piece(k)); });
  }
  static ONEPASS_FUNCTION pack<float, 8> product(const float (&d)[1][4][4], int i) { return registers::product(d, i); }
};

// Σ weight · row of tiles, for so many times sixteen rows of weights.
template <dtype D, int kPieces, int kSixteens = 1>
struct warp_sums {
  using tile = swizzled_tile<kPieces>;
  static constexpr int kEven = (kPieces + 1) / 2 * 2, kRows = 2 * kSixteens;  // kRows: of a thread
  float of[kSixteens][kEven][4] = {};

  // left: of step `step` of the tile's 32 rows from `first` on, as the unit takes it.
  ONEPASS_FUNCTION void add(const uint32 (&left)[kSixteens][4], const char* rows, int first, int step) {
#pragma unroll
    for (int piece = 0; piece < kEven; piece += 2) {
      uint32 right[4];
      tile::load_rows(rows, first, step, piece, right);
#pragma unroll
      for (int k = 0; k < kSixteens; ++k) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
          add_mma<D>(of[k][piece + j], left[k][0], left[k][1], left[k][2], left[k][3], right[2 * j], right[2 * j + 1]);
      }
    }
  }
  // weights: of this thread's rows, eight neighbours each of the tile's 32 rows from `first` on.
  ONEPASS_FUNCTION void add_of_rows(const uint4 (&weights)[kRows], const char* rows, int first) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32 left[kSixteens][4];
#pragma unroll
      for (int k = 0; k < kSixteens; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4& row = weights[2 * k + i];
          left[k][i] = step == 0 ? row.x : row.z, left[k][2 + i] = step == 0 ? row.y : row.w;
        }
      }
      add(left, rows, first, step);
    }
  }
  ONEPASS_FUNCTION void scale(int i, float factor) {
#pragma unroll
    for (int piece = 0; piece < kEven; ++piece) {
      of[i / 2][piece][i % 2 * 2] *= factor;
      of[i / 2][piece][i % 2 * 2 + 1] *= factor;
    }
  }
  // Row i, times `factor`.
  ONEPASS_FUNCTION void store(int i, uint16* to, int64 depth, float factor = 1.0f) const {
    const int first = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int piece = 0; piece < kEven; ++piece) {
      if (piece * 8 + first < depth)
        *reinterpret_cast<uint32*>(to + piece * 8 + first) =
            pair_to_storage<D>(of[i / 2][piece][i % 2 * 2] * factor, of[i / 2][piece][i % 2 * 2 + 1] * factor);
    }
  }
};

ONEPASS_END
