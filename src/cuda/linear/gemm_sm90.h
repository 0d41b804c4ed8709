// A line with `linear` in one kernel (onepass/kernel/linear/gemm_sm90.cuda.h): where it serves, and its launch.
#pragma once

#include <string>

#include "src/cuda/row/configuration.h"
#include "src/cuda/runtime/driver.h"
#include "src/cuda/tuning.h"

namespace onepass::cuda {

// What enters the product: what the words before it make of x, written to before.a.y; or, with no such words, or a norm
// that is deferred, x. behind.a.x and y: the result.
enum class input_of : int { x, made, deferred };
struct linear_call {
  const request& before;
  const arguments& a_before;
  const request& behind;
  const arguments& a_behind;
  input_of from;
  const void* input;  // [rows, depth]
  int64 input_stride;
  const void* matrix;  // [columns, depth]
  int64 matrix_stride, depth;
  unsigned* ready;              // where rows are made: one number, which is 0, for each kReadyRows rows
  const float *sums, *offsets;  // where a norm is deferred: padded_columns
};
inline constexpr int kReadyRows = 128;

inline constexpr int kTileLanes = 8;  // numbers of 16 bytes: what all rows must be a multiple of
bool is_aligned(const void* data, int64 stride);
request widest(const request&, const request&);  // as a kernel for both lines has room
inline constexpr int kMostRowColumns = 8192;     // of a row word before `linear`
int rows_at_once(int64 depth);                   // that a block makes of the input
// Whether a deferred norm's statistics must be given (in a_before): where no block has all columns of its rows, and so
// their moments from its tiles.
bool needs_statistics(input_of, int64 columns);

// Tiles of 128 rows of products, and how many a block computes, one after the other, at most.
struct tile_plan {
  linear_tile tile;
  int cluster;
  int64 turns;
};
tile_plan plan_tiles(int64 rows, int64 depth, int64 columns, input_of, int flops_behind, const device_facts&);

// A deferred norm's part of the matrix (onepass/kernel/linear/folded_norm.cuda.h).
struct fold_call {
  const void *matrix, *scale, *bias;  // null where there is none
  void* folded;
  float *sums, *offsets;
  int64 depth, stride;
  unsigned* ready;  // set to 0 on the way; null where panels is 0
  int64 panels;
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
  int stages, group, rows_of_thread;
  unsigned grid, shared_bytes;
};

// Whether addresses and strides suit the kernel. What else it needs: strategy.h.
bool fits(const linear_call&);
linear_plan choose(const linear_call&, const device_facts&);
std::string source(const linear_call&, const linear_plan&);

void launch(const linear_call&, int device, void* stream);

}  // namespace onepass::cuda
