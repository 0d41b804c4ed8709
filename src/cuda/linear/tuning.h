// Tuning of the kernels of lines with `linear` (onepass/kernel/linear): plain data. Each figure was measured on an
// H200; docs/measured-facts.md, "linear on the H200", has the measurements, whose titles stand here in quotes.
#pragma once

namespace onepass::cuda {

// Tiles of 128 rows of a GEMM whose epilogue is the words behind `linear` (onepass/kernel/linear/gemm_sm90.cuda.h).
struct linear_tile {
  int columns;  // of the result
  int buffers;  // for accumulators: 2 for all of a tile, 1 for half of it, which leaves room for one more stage
  double time;  // of a column, relative to other tiles
  double time_activating;  // the same with an activation behind `linear`
  double time_deferring;   // the same with a deferred norm
};
struct linear_tuning {
  // The first that has room for all columns.
  linear_tile narrow[2] = {{64, 2, 1, 1, 1}, {128, 2, 1, 1, 1}};
  // Else the fastest: "Four stages of 64 columns instead of three", "Two products of 128 rows each".
  linear_tile wide[3] = {{256, 1, 1.0, 1.04, 1.2}, {192, 2, 1.0, 1.01, 1.0}, {256, 2, 1.05, 1.05, 1.05}};
  int activation_flops = 4;  // flops an element in the epilogue from which on time_activating counts
  int stages = 8;            // of the ring of tiles, at most
  int group = 8;             // tiles of a cluster below each other that are computed before the next ones beside them
};
inline constexpr linear_tuning kLinearTuning{};

// `linear` with few rows (onepass/kernel/linear/small_m.cuda.h): "Few rows, bfloat16".
struct small_m_tuning {
  int rows = 16;      // at most
  int elements = 64;  // of a row in one thread, at most
  int ahead = 4;      // steps that a warp prefetches, at most
};
inline constexpr small_m_tuning kSmallMTuning{};

// `linear` with few in_features (onepass/kernel/linear/small_k.cuda.h): "Short rows, bfloat16".
struct small_k_tuning {
  int k = 256;                  // in_features, at most
  int threads = 512;            // of a block, where a thread keeps x in registers as it is stored
  int threads_computing = 384;  // where it keeps the result of words
  int few_threads = 128;        // where there are few rows
};
inline constexpr small_k_tuning kSmallKTuning{};

// The rates that decide between one kernel and three (src/choose/linear_ways.cc): seconds, unless a field says
// otherwise.
struct linear_speed {
  double flops = 800e12;          // flops a second of the library's GEMM of 16-bit elements
  double flops_wide = 50e12;      // flops a second of its float32 GEMM
  double launch = 2e-6;           // of a kernel
  double call = 4e-6;             // of a GEMM
  double tile_column = 4.15e-11;  // the GEMM of a tile: for each of its columns and each element of K
  double finish_column = 2e-8;    // the epilogue of a tile: for each of its columns
  double moments = 4.2e-9;        // the moments of a deferred norm from a tile of x: for each element of K
  double moments_turn = 2e-6;     // and for each tile
  double norm_column = 5e-9;  // a deferred norm applied to a tile, during which no wgmma runs: for each of its columns
  double small_m_call = 1.5e-6;
  double small_m_bytes = 4.4e12;    // bytes a second, at most
  double small_m_ahead = 3.5e12;    // bytes a second, for each prefetched step
  double small_m_element = 2.9e-8;  // the prologue: for each element of the rows in a thread
  double small_k_call = 4e-6;
  double small_k_element = .87e-12;  // for each element of x
  double small_k_fma = 7e-15;        // for each multiply-add
  // "Few features". From instruction counts, not from measurements.
  double small_n_call = 3e-6;
  double small_n_fma = .1e-12;  // for each multiply-add
};

}  // namespace onepass::cuda
