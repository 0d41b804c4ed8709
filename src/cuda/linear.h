// A line with `linear` in one kernel (onepass/skeleton/linear.cuda.h): where it serves, and its launch.
#pragma once

#include <string>

#include "src/cuda/configuration.h"
#include "src/cuda/driver.h"
#include "src/cuda/tuning.h"

namespace onepass::cuda {

// before.a.y: the input of `linear`, which the kernel makes; with no words before it, `input` alone says where it is.
// behind.a.x and y: the result.
struct linear_call {
  const request& before;
  const arguments& a_before;
  const request& behind;
  const arguments& a_behind;
  bool makes_input;
  const void* input;  // [rows, depth]
  int64 input_stride;
  const void* matrix;  // [columns, depth]
  int64 matrix_stride, depth;
  unsigned* ready;  // one number, which is 0, for each kReadyRows rows
};
inline constexpr int kReadyRows = 128;

inline constexpr int kTileLanes = 8;          // numbers of 16 bytes: what all rows must be a multiple of
inline constexpr int kMostRowColumns = 8192;  // of a row word before `linear`
int rows_at_once(int64 depth);                // that a block makes of the input

// Tiles of 128 rows of products, and how many a block computes, one after the other, at most.
struct tile_plan {
  linear_tile tile;
  int cluster;
  int64 turns;
};
tile_plan plan_tiles(int64 rows, int64 depth, int64 columns, bool makes_input, int flops_behind, const device_facts&);

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
