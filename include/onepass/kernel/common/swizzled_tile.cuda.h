// Tiles in shared memory whose rows warps multiply by, as they lie or transposed (sm_80 and later).
//
// Rows are of whole 128 bytes, whose pieces of 16 are swizzled so that those read at a time differ in their banks: four
// pieces of two neighbouring rows, and one of each of eight rows that lie in pairs eight apart, which load_rows reads.
// The 16 columns of an mma may be any of a tile's rows, as long as both factors have the same ones.
#pragma once

#include "onepass/lane/device/warp_matrix.cuda.h"
#include "onepass/kernel/common/reduce.cuda.h"
#include "onepass/kernel/common/shapes.h"

ONEPASS_BEGIN

// kPieces: of a row, begun ones too.
template <int kPieces>
struct swizzled_tile {
  static constexpr int kPitch = swizzled_pitch(kPieces);

  static ONEPASS_FUNCTION int offset(int row, int piece) {
    return row * kPitch + (piece ^ (row % 2 * 4 + row / 8 % 4)) * 16;
  }
  // The first `count` of `rows`, `stride` numbers apart, of `depth` numbers each, and zeros for the others and behind
  // the last number, as far as a row's four threads read. The caller closes the copies' group.
  template <int kThreads>
  static ONEPASS_FUNCTION void load_async(char* to, const uint16* from, int64 stride, int64 depth, int count,
                                          int rows) {
    constexpr int kBrought = (kPieces + 3) / 4 * 4, kAtOnce = kThreads / kBrought;
    const int piece = static_cast<int>(threadIdx.x) % kBrought, first = static_cast<int>(threadIdx.x) / kBrought;
    if (first >= kAtOnce) return;
    for (int row = first; row < rows; row += kAtOnce) {
      const bool present = row < count && piece * 8 < depth;
      copy_or_clear(to + offset(row, piece), from + (present ? row * stride + piece * 8 : 0), present);
    }
  }
  // Row `step` (0 or 1) of the 16s of the 32 rows from `first` on, for the tensor cores: of each thread's eight of them
  // four, in pairs. Of `piece` and the next: two numbers each of a row's left and right pair.
  static ONEPASS_FUNCTION void load_rows(const char* tile, int first, int step, int piece, uint32 (&of)[4]) {
    const int lane_id = static_cast<int>(threadIdx.x) % 32;
    load_transposed_matrices(shared_address(tile + offset(row_of(first, step, lane_id / 8 % 2), piece + lane_id / 16)),
                             of);
  }
  // The same of eight numbers and the next eight as a left factor's rows.
  static ONEPASS_FUNCTION void load_columns(const char* tile, int first, int step, int piece, uint32 (&of)[4]) {
    const int lane_id = static_cast<int>(threadIdx.x) % 32;
    load_transposed_matrices(shared_address(tile + offset(row_of(first, step, lane_id / 16), piece + lane_id / 8 % 2)),
                             of);
  }

 private:
  static ONEPASS_FUNCTION int row_of(int first, int step, int half) {
    const int row = static_cast<int>(threadIdx.x) % 8;
    return first + row / 2 * 8 + step * 4 + half * 2 + row % 2;
  }
};

ONEPASS_END
