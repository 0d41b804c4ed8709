// A line with `linear` in one kernel (onepass/kernel/linear/gemm_sm90.cuda.h): where it serves, and its launch.
#pragma once

#include <string>

#include "src/cuda/linear/tuning.h"
#include "src/cuda/row/configuration.h"
#include "src/cuda/runtime/driver.h"

namespace onepass::cuda {

// x enters the product: no words stand before it, or a norm that is deferred. behind.a.x and y: the result.
struct linear_call {
  const request& before;
  const arguments& a_before;
  const request& behind;
  const arguments& a_behind;
  bool defers;
  const void* input;  // x, [rows, depth]
  int64 input_stride;
  const void* matrix;  // [columns, depth]
  int64 matrix_stride, depth;
  const float *sums, *offsets;  // where a norm is deferred: padded_columns
};

inline constexpr int kTileLanes = 8;  // numbers of 16 bytes: what all rows must be a multiple of
bool is_aligned(const void* data, int64 stride);
request widest(const request&, const request&);  // as a kernel for both lines has room
// Whether a deferred norm's statistics must be given (in a_before): where no block has all columns of its rows, and so
// their moments from its tiles.
bool needs_statistics(int64 columns);

// Tiles of 128 rows of products, and how many a block computes, one after the other, at most.
struct tile_plan {
  linear_tile tile;
  int cluster;
  int64 turns;
};
tile_plan plan_tiles(int64 rows, int64 columns, bool defers, int flops_behind, const device_facts&);

// A deferred norm's part of the matrix (onepass/kernel/linear/folded_norm.cuda.h).
struct fold_call {
  const void *matrix, *scale, *bias;  // null where there is none
  void* folded;
  float *sums, *offsets;
  int64 depth, stride;
  dtype type, scale_type, bias_type;  // none: there is none
  bool centres;
  int64 columns;
};
constexpr int64 padded_columns(int64 columns) { return (columns / 256 + 2) * 256; }  // of whole tiles, at least
std::string source(const fold_call&);
void launch(const fold_call&, int device, void* stream);

struct linear_plan {
  configuration before, behind;
  tile_plan tiles;
  int stages;
  unsigned grid, shared_bytes;
};

// Whether addresses and strides suit the kernel. What else it needs: src/choose.
bool fits(const linear_call&);
linear_plan choose(const linear_call&, const device_facts&);
std::string source(const linear_call&, const linear_plan&);

void launch(const linear_call&, int device, void* stream);

}  // namespace onepass::cuda
