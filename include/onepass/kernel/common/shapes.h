// Sizes that CUDA kernels and their launchers share.
#pragma once

#include "onepass/lane/types.h"

namespace onepass {

inline constexpr int kWarpgroupThreads = 128, kWarpgroupRows = 64;  // rows of a wgmma

// TMA's 128-byte swizzle: a tile in shared memory is stored in atoms of 64 columns of 16 bits, all rows of one atom
// before the next. Tiles begin at multiples of kTileAlignment.
inline constexpr int kAtomColumns = 64, kAtomRowBytes = 128, kTileAlignment = 1024;
constexpr int tile_bytes(int atoms, int rows) { return atoms * rows * kAtomRowBytes; }
inline constexpr int kAtomBytes = tile_bytes(1, kWarpgroupRows);

// Warps that multiply with mma.sync: four threads have a row of either factor. A row of a tile in shared memory has
// whole 128 bytes (kernel/common/swizzled_tile.cuda.h); chunk: 16 bytes.
inline constexpr int kThreadsOfRow = 4;
constexpr int swizzled_pitch(int chunks) { return (chunks + 7) / 8 * 128; }

// Elements that a reduction over a row combines at a time: a line's features, or the moments that merge() takes.
// is_short: the results have at most 11 significant bits (kShort).
constexpr int most_reduced(int features, bool is_short) {
  const int moments = is_short ? 3 : 4;
  return features > moments ? features : moments;
}
// Sets of partial results in shared memory that reductions use in turn, at most (kernel/common/reduce.cuda.h).
inline constexpr int kMostReductionSets = 3;

// Bytes of one row in shared memory: `vectors` of each of its threads, and spare ones behind.
constexpr int64 row_bytes(int64 threads, int64 vectors, int64 spare_vectors, int64 vector_bytes) {
  return (threads * vectors + spare_vectors) * vector_bytes;
}

}  // namespace onepass
