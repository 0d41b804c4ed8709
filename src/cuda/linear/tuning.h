// Tuning of the kernels of lines with `linear` (onepass/kernel/linear): plain data. Each figure was measured on an
// H200; what chose it is in docs/measured-facts.md, "linear on the H200", whose words stand here in quotes.
#pragma once

namespace onepass::cuda {

// Tiles of 128 rows of a GEMM whose epilogue is the words behind `linear` (onepass/kernel/linear/gemm_sm90.cuda.h).
struct linear_tile {
  int columns;            // of the result
  int buffers;            // of products: 2 for all of a tile, 1 for half of it, which leaves room for one stage more
  double time;            // of a column, beside other tiles
  double time_finishing;  // with an activation behind
  double time_deferring;  // with a norm deferred
};
struct linear_tuning {
  // The first that has room for all columns.
  linear_tile narrow[2] = {{64, 2, 1, 1, 1}, {128, 2, 1, 1, 1}};
  // Else the fastest: "Four stages of 64 columns instead of three", "Two products of 128 rows each".
  linear_tile wide[3] = {{256, 1, 1.0, 1.04, 1.2}, {192, 2, 1.0, 1.01, 1.0}, {256, 2, 1.05, 1.05, 1.05}};
  int activation_flops = 4;  // flops of a number behind `linear`, from which on time_finishing counts
  int stages = 8;            // of the ring of tiles, at most
  int group = 8;             // tiles of a cluster below each other that are taken before the next ones beside them
};
inline constexpr linear_tuning kLinearTuning{};

// A matrix that streams past few rows (onepass/kernel/linear/small_m.cuda.h): "Few rows, bfloat16".
struct streamed_tuning {
  int rows = 16;     // at most
  int numbers = 64;  // of a row in one thread, at most
  int ahead = 4;     // steps that a warp asks for ahead
};
inline constexpr streamed_tuning kStreamedTuning{};

// Short rows past a small matrix (onepass/kernel/linear/small_k.cuda.h): "Short rows, bfloat16".
struct resident_tuning {
  int depth = 256;              // numbers of a row, at most
  int threads = 512;            // of a block, where a thread holds x as it is stored
  int threads_computing = 384;  // where it holds what words make of it
  int few_threads = 128;        // where there are few rows
};
inline constexpr resident_tuning kResidentTuning{};

// What decides between one kernel and three (src/choose/linear_ways.cc): seconds, but where a field says a rate.
struct linear_speed {
  double flops = 800e12;          // a second, of the library's product of 16-bit numbers
  double flops_wide = 50e12;      // a second, of float32's
  double launch = 2e-6;           // of a kernel
  double call = 4e-6;             // of a product
  double tile_column = 4.15e-11;  // of a turn's column, for each number of the depth
  double finish_column = 2e-8;    // of a turn's column, to the end of the line
  double moments = 4.2e-9;        // of 128 rows, for each number of the depth: a deferred norm's, from its tiles
  double moments_turn = 2e-6;     // to hand those over
  double norm_column = 5e-9;      // of a turn's column, to apply a deferred norm, for which the next product waits
  // A matrix that streams past few rows.
  double streamed_call = 1.5e-6;
  double streamed_bytes = 4.4e12;   // bytes a second, at most
  double streamed_ahead = 3.5e12;   // bytes a second, for each step ahead
  double streamed_number = 2.9e-8;  // for each number in a thread of the rows that a block makes at a time
  // Short rows past a small matrix.
  double resident_call = 4e-6;
  double resident_number = .87e-12;  // for each number of x
  double resident_product = 7e-15;   // for each product
  // Rows that end in dot products: "Few features". From instruction counts, not from measurements.
  double dots_call = 3e-6;
  double dots_product = .1e-12;  // for each product
};

}  // namespace onepass::cuda
