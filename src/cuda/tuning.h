// The CUDA kernels' tuning: plain data. What chose each figure is in docs/measured-facts.md, "Tuning on the H200".
// Lines that begin with `scores`: attention/tuning.h.
#pragma once

namespace onepass::cuda {

struct elementwise_tuning {
  int threads;        // of a block
  int unroll;         // lanes in flight a thread
  int resident;       // threads that registers must leave room for on an SM
  int blocks_per_sm;  // with column sums, where blocks stride over the rows
};

// With column sums of few rows: one block has all rows of its columns, which is one kernel less.
struct few_rows_tuning {
  int unroll;    // lanes in flight a thread
  int down;      // threads down the rows, at most
  int resident;  // threads that registers must leave room for on an SM
};

inline constexpr int kAnyColumns = 1 << 30, kMany = 1 << 10;

struct row_tuning {
  int columns = kAnyColumns;  // for rows of so many numbers at most
  int numbers;                // of a row in one thread, at most
  int block = 512;            // threads of a block that rows share
  int threads = 512;          // of a row in a block, at most: longer rows are shared by the blocks of a cluster
  int resident = 512;         // threads that registers must leave room for on an SM; with copies the grid has as many
  int stages;                 // rows that copies run ahead by
  // Values are not held, but made again from the copies, which must find room: for lines whose words take few flops.
  bool computes_again = false;
  bool ahead = false;    // and the next row is read while this row's statistics are on their way
  int sums = kMany;      // for so many column sums at most
  int repeated = kMany;  // for so many operands at most of which one row serves all
  int cluster = 8;       // blocks that share a row, at most
  int busy = 0;          // where so many percent of its threads' lanes are within the row, at least
  int least_flops = 0;   // for lines with so many flops for 16 bits of x, at least, in words beside the row word
  int features = 0;      // only for lines whose rows end in so many features, at least
  int rounds = 0;        // where a row's threads take so many rows one after the other, at least
};

struct tuning {
  elementwise_tuning forward_16_bits = {.threads = 128, .unroll = 2, .resident = 1280, .blocks_per_sm = 16};
  elementwise_tuning forward = {.threads = 128, .unroll = 4, .resident = 1024, .blocks_per_sm = 16};
  elementwise_tuning backward = {.threads = 64, .unroll = 2, .resident = 1024, .blocks_per_sm = 16};
  // Without column sums, and of nothing but gradients: dropout's 252 us where the one above takes 319 (32768 x 4096,
  // float32); with an activation before it it would take 422 for 375.
  elementwise_tuning backward_of_gradients = {.threads = 128, .unroll = 2, .resident = 1280, .blocks_per_sm = 16};
  // Lanes of fewer than 16 bytes.
  elementwise_tuning forward_short = {.threads = 128, .unroll = 4, .resident = 1536, .blocks_per_sm = 16};
  // With results that leave through shared memory.
  elementwise_tuning forward_staged = {.threads = 128, .unroll = 2, .resident = 1536, .blocks_per_sm = 16};
  elementwise_tuning backward_staged = {.threads = 64, .unroll = 1, .resident = 1024, .blocks_per_sm = 16};

  few_rows_tuning few_rows = {.unroll = 2, .down = 64, .resident = 512};

  // The first that has room for the row; a row that none has room for is taken in parts.
  row_tuning forward_rows[16] = {
      {.columns = 1024, .numbers = 32, .block = 256, .stages = 2, .busy = 86, .features = 2},
      {.columns = 512, .numbers = 32, .block = 256, .stages = 2, .busy = 86, .features = 1, .rounds = 48},
      {.columns = 1024, .numbers = 32, .stages = 2, .busy = 86, .least_flops = 16},
      {.columns = 128, .numbers = 32, .block = 128, .resident = 1024, .stages = 0, .busy = 86},
      {.columns = 1024, .numbers = 32, .block = 128, .resident = 768, .stages = 0, .busy = 86},
      {.columns = 1536, .numbers = 48, .block = 128, .resident = 768, .stages = 0, .busy = 80},
      {.columns = 2048, .numbers = 64, .block = 64, .stages = 0, .least_flops = 7},
      {.columns = 2048, .numbers = 32, .block = 128, .resident = 1024, .stages = 0},
      {.columns = 8192, .numbers = 64, .block = 256, .stages = 0},
      {.columns = 32768, .numbers = 32, .stages = 3, .least_flops = 16},
      {.columns = 16384, .numbers = 64, .block = 256, .stages = 0},
      {.columns = 131072, .numbers = 32, .block = 1024, .threads = 1024, .resident = 1024, .stages = 2, .repeated = 0},
      {.numbers = 64, .stages = 3, .computes_again = true, .ahead = true},
      {.columns = 65536, .numbers = 32, .stages = 3},
      {.numbers = 32, .stages = 3, .least_flops = 4},
      {.numbers = 64, .stages = 2}};
  row_tuning backward_rows[15] = {
      {.columns = 512, .numbers = 16, .block = 128, .stages = 3, .busy = 80},
      {.columns = 8192, .numbers = 32, .block = 64, .resident = 384, .stages = 2, .least_flops = 20},
      {.columns = 1024, .numbers = 16, .block = 128, .stages = 3, .busy = 80},
      {.columns = 16384, .numbers = 16, .block = 256, .stages = 3, .busy = 80},
      {.columns = 8192, .numbers = 24, .block = 128, .resident = 384, .stages = 3},
      {.columns = 16384, .numbers = 32, .block = 256, .resident = 384, .stages = 3, .sums = 1, .busy = 92},
      {.columns = 16384, .numbers = 16, .block = 256, .stages = 3},
      {.numbers = 32, .stages = 2, .computes_again = true, .ahead = true, .sums = 0},
      {.numbers = 16, .stages = 3, .computes_again = true, .ahead = true},
      {.numbers = 16, .stages = 3},
      {.numbers = 16, .stages = 3, .computes_again = true, .ahead = true, .cluster = 16},
      {.numbers = 16, .stages = 3, .cluster = 16},
      {.numbers = 32, .stages = 2, .computes_again = true, .ahead = true, .sums = 1, .cluster = 16},
      {.numbers = 32, .stages = 2, .sums = 1, .cluster = 16},
      {.numbers = 32, .stages = 2, .computes_again = true}};
  int held_lanes = 16;     // of a row in a thread, at most: each takes registers besides its numbers
  int again_flops = 8;     // of a number, in words beside the row word, that may be computed again
  int least_across = 8;    // threads of a row, at least, where it has so many lanes: 128 bytes in a row
  int sum_numbers = 64;    // column sums that fit in a thread's registers beside the row
  int part_threads = 256;  // of a block that has a part of a row, lanes at a time, and parts' lanes a thread
  int part_lanes_at_once = 4;
  int part_lanes = 16;
  unsigned column_sum_threads =
      512;  // of a block of the second kernel, columns of a thread, and threads down the parts
  unsigned column_sum_columns = 4;
  unsigned column_sum_down = 64;
  int reduction_bytes = 12;  // of static shared memory for each warp of a cluster: three sets, of a float
};

inline constexpr tuning kTuning{};

// Tiles of 128 rows in one kernel with a matrix product (onepass/kernel/linear/gemm_sm90.cuda.h).
struct linear_tile {
  int columns;
  int buffers;  // of products: 2 for all of a tile, 1 for half of it, which leaves room for one stage more
  // Time of a column, beside other tiles: alone, with an activation behind, with short rows made before, with a norm
  // deferred.
  double time, time_finishing, time_making, time_deferring;
};
struct linear_tuning {
  linear_tile narrow[2] = {{64, 2, 1, 1, 1, 1}, {128, 2, 1, 1, 1, 1}};
  linear_tile wide[3] = {
      {256, 1, 1.0, 1.04, 1.05, 1.2}, {192, 2, 1.0, 1.01, 1.12, 1.0}, {256, 2, 1.05, 1.05, 1.0, 1.05}};
  int activation_flops = 4, short_rows = 2048;
  int stages = 8;                         // at most
  int group = 8, group_making_input = 4;  // tiles below each other that are taken in turn
};
inline constexpr linear_tuning kLinearTuning{};

// A matrix that streams past few rows (onepass/kernel/linear/small_m.cuda.h).
struct streamed_tuning {
  int rows = 16;     // at most
  int numbers = 64;  // of a row in one thread, at most
  int ahead = 4;     // steps that a warp asks for ahead
};
inline constexpr streamed_tuning kStreamedTuning{};

// Short rows past a small matrix (onepass/kernel/linear/small_k.cuda.h).
struct resident_tuning {
  int depth = 256;  // at most
  // Of a block: where a thread holds x as it is stored, where it holds what words make of it, where there are few rows.
  int threads = 512, threads_computing = 384, few_threads = 128;
};
inline constexpr resident_tuning kResidentTuning{};

// Seconds, on the H200: what decides between a kernel for all and three. docs/measured-facts.md, "linear".
struct linear_speed {
  double launch = 2e-6, call = 4e-6;  // of a kernel; of a product
  double tile_column = 4.15e-11;      // of a turn's column, for each number of the depth
  double finish_column = 2e-8;        // to the end of the line
  double rows_round = 3e-6;           // for the rows that a block makes at a time
  double moments = 4.2e-9;            // of 128 rows, for each number of the depth
  double moments_turn = 2e-6;         // and to hand them over
  double norm_column = 5e-9;          // to apply a deferred norm, which the next tile's product waits for
  double first_rows = 5.4e-9, later_rows = 2.4e-13;  // for each number of the depth, of all tensors
  // A matrix that streams past few rows: beside its bytes, of them at most and for each step ahead, and for each number
  // in a thread of the rows that a block makes at a time.
  double streamed_call = 1.5e-6, streamed_bytes = 4.4e12, streamed_ahead = 3.5e12, streamed_number = 2.9e-8;
  // Short rows past a small matrix: for each number of x, and each product.
  double resident_call = 4e-6, resident_number = .87e-12, resident_product = 7e-15;
  // Rows that end in dot products: for each product. From instruction counts, not yet from measurements.
  double dots_call = 3e-6, dots_product = .1e-12;
};

}  // namespace onepass::cuda
