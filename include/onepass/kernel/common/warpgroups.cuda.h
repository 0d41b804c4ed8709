// What kernels share whose warpgroups multiply tiles that TMA loads (sm_90a).
#pragma once

#include "onepass/lane/device/matrix.cuda.h"
#include "onepass/kernel/common/reduce.cuda.h"
#include "onepass/kernel/common/shapes.h"

ONEPASS_BEGIN

// Of this thread's warpgroup; the compiler sees that a warp has one.
ONEPASS_FUNCTION int warpgroup_id() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
}

// A named barrier of kThreads threads: of one warpgroup, each at a barrier of its own, or of several.
template <int kThreads = kWarpgroupThreads>
ONEPASS_FUNCTION void sync_warpgroup(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Where the tiles in a block's shared memory begin, and where an address in it is for threads that load and store.
ONEPASS_FUNCTION uint32 first_tile(char* dynamic) { return (shared_address(dynamic) + 1023) & ~1023u; }
ONEPASS_FUNCTION char* at_shared(char* dynamic, uint32 address) {
  return dynamic + (address - shared_address(dynamic));
}

// This thread's first of the 64 rows of add_wgmma's accumulators; its other row is eight further.
ONEPASS_FUNCTION int row_of_accumulators() {
  return static_cast<int>(threadIdx.x) % kWarpgroupThreads / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
}

// Where a ring is.
template <int kStages>
struct ring_position {
  int stage = 0;
  uint32 phase = 0;
  ONEPASS_FUNCTION void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// Where a row of products has its piece of 16 bytes: rows that are stored at a time differ in their banks.
ONEPASS_FUNCTION int swizzled_piece(int piece, int row) { return piece ^ (row & 7); }

// Stores 64 rows of accumulators to shared memory (stmatrix).
template <dtype D, int N>
ONEPASS_FUNCTION void store_accumulators(const float (&d)[N / 2], char* products) {
  const int lane_id = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) % kWarpgroupThreads / 32;
  const int matrix = lane_id / 8;  // of the four that store_matrices takes: 8 rows below, 8 columns beside
  const uint32 row = shared_address(products) + (warp * 16 + (matrix & 1) * 8 + lane_id % 8) * (N * 2);
#pragma unroll
  for (int j = 0; j < N / 8; j += 2) {
    const float* at = d + 4 * j;
    store_matrices(row + swizzled_piece(j + (matrix >> 1), lane_id) * 16, pair_to_storage<D>(at[0], at[1]),
                   pair_to_storage<D>(at[2], at[3]), pair_to_storage<D>(at[4], at[5]),
                   pair_to_storage<D>(at[6], at[7]));
  }
}

ONEPASS_END
