// Sixteen rows of a warp, as the left factor of products with tiles in shared memory, and sums of a tile's rows (sm_80
// and later). A thread has two rows, eight apart.
#pragma once

#include "onepass/skeleton/shared_matrix.cuda.h"
#include "onepass/skeleton/turned_tile.cuda.h"

ONEPASS_BEGIN

template <dtype D, int kPieces>
struct warp_rows {
  struct config {
    static constexpr dtype kX = D;
    struct before {
      static constexpr int kAtOnce = 2, kHeldLanes = (kPieces + 3) / 4;
    };
  };
  using tile = turned_tile<kPieces>;
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
              from + tile::place(first + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * i, piece(k)));
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
  // The products with the 32 rows of a tile from `first` on (shared_matrix.cuda.h).
  ONEPASS_FUNCTION void multiply(float (&d)[1][4][4], const char* matrix, int first) const {
    const int nth = static_cast<int>(threadIdx.x) % 32 / 4, row = first + nth / 2 * 8 + nth % 2;
    of.multiply(d, [&](int j, int k) { return matrix + tile::place(row + 2 * j, piece(k)); });
  }
  static ONEPASS_FUNCTION pack<float, 8> product(const float (&d)[1][4][4], int i) { return registers::product(d, i); }
};

// Σ weight · row of tiles, for so many times sixteen rows of weights.
template <dtype D, int kPieces, int kSixteens = 1>
struct warp_sums {
  using tile = turned_tile<kPieces>;
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
          add_warp_product<D>(of[k][piece + j], left[k][0], left[k][1], left[k][2], left[k][3], right[2 * j],
                              right[2 * j + 1]);
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
