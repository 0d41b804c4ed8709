// The GEMM of `linear` with its epilogue (onepass/kernel/linear/gemm_sm90.cuda.h): when it serves, and its launch.
#pragma once

#include <string>

#include "src/cuda/linear/tuning.h"
#include "src/cuda/row/configuration.h"
#include "src/cuda/runtime/driver.h"

namespace onepass::cuda {

// x enters the GEMM: the prologue is empty, or a deferred norm. a_behind: x and y are both the result.
struct linear_call {
  const request& before;
  const arguments& a_before;
  const request& behind;
  const arguments& a_behind;
  bool defers;
  const void* input;  // x, [rows, k]
  int64 input_stride;
  const void* matrix;  // [columns, k]
  int64 matrix_stride, k;
  const float *sums, *offsets;  // of a deferred norm: padded_columns of them
};

inline constexpr int kTileLanes = 8;  // elements of 16 bytes: every row's length is a multiple of it
bool is_aligned(const void* data, int64 stride);
request widest(const request&, const request&);  // with room for the operands of either line
// Whether a_before must have a deferred norm's statistics. A block that has all columns of its rows computes them from
// its tiles instead.
bool needs_statistics(int64 columns);

// Tiles of 128 rows of the result, and how many of them a block computes at most.
struct tile_plan {
  linear_tile tile;
  int cluster;
  int64 turns;
};
tile_plan plan_tiles(int64 rows, int64 columns, bool defers, int flops_behind, const device_facts&);

// Folds a deferred norm into the matrix (onepass/kernel/linear/folded_norm.cuda.h).
struct fold_call {
  const void *matrix, *scale, *bias;  // null where there is none
  void* folded;
  float *sums, *offsets;
  int64 k, stride;
  dtype type, scale_type, bias_type;  // none: there is none
  bool centres;
  int64 columns;
};
constexpr int64 padded_columns(int64 columns) { return (columns / 256 + 2) * 256; }  // whole tiles
std::string source(const fold_call&);
void launch(const fold_call&, int device, void* stream);

struct linear_plan {
  configuration before, behind;
  tile_plan tiles;
  int stages;
  unsigned grid, shared_bytes;
};

// Whether addresses and strides suit the kernel. src/choose checks everything else.
bool fits(const linear_call&);
linear_plan choose(const linear_call&, const device_facts&);
std::string source(const linear_call&, const linear_plan&);

void launch(const linear_call&, int device, void* stream);

}  // namespace onepass::cuda
