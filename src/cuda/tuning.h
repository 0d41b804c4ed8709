// The CUDA skeletons' tuning: plain data. What chose each figure is in docs/measured-facts.md, "Tuning on the H200".
#pragma once

namespace onepass::cuda {

struct elementwise_tuning {
  int threads;        // of a block
  int unroll;         // lanes in flight a thread
  int resident;       // threads that registers must leave room for on an SM
  int blocks_per_sm;  // with column sums, where blocks stride over the rows
};

struct row_tuning {
  int columns;   // for rows of so many numbers at most
  int numbers;   // of a row in one thread's registers, at most
  int block;     // threads of a block that rows share
  int threads;   // of a row in a block, at most: longer rows are shared by the blocks of a cluster
  int resident;  // threads that registers must leave room for on an SM; with copies the grid has as many
  int stages;    // rows that copies run ahead by
  // Backward: values are not held, but made again from the copies: column sums leave no registers.
  bool computes_again = false;
};
inline constexpr int kAnyColumns = 1 << 30;

struct tuning {
  elementwise_tuning forward = {.threads = 128, .unroll = 2, .resident = 1536, .blocks_per_sm = 16};
  elementwise_tuning backward = {.threads = 128, .unroll = 4, .resident = 1024, .blocks_per_sm = 16};

  // The first that has room for the row; a row that none has room for is streamed.
  row_tuning forward_rows[3] = {
      {.columns = 2048, .numbers = 32, .block = 256, .threads = 512, .resident = 1024, .stages = 0},
      {.columns = 32768, .numbers = 64, .block = 256, .threads = 512, .resident = 512, .stages = 0},
      {.columns = kAnyColumns, .numbers = 64, .block = 256, .threads = 512, .resident = 512, .stages = 2}};
  row_tuning backward_rows[5] = {
      {.columns = 1024, .numbers = 16, .block = 256, .threads = 512, .resident = 512, .stages = 3},
      {.columns = 8192, .numbers = 16, .block = 512, .threads = 512, .resident = 512, .stages = 3},
      {.columns = 16384, .numbers = 16, .block = 256, .threads = 256, .resident = 768, .stages = 2},
      {.columns = 65536,
       .numbers = 32,
       .block = 256,
       .threads = 256,
       .resident = 512,
       .stages = 3,
       .computes_again = true},
      {.columns = kAnyColumns,
       .numbers = 32,
       .block = 256,
       .threads = 512,
       .resident = 512,
       .stages = 2,
       .computes_again = true}};
  int least_across = 8;  // threads of a row, at least, where it has so many lanes: 128 bytes in a row
  int cluster = 8;       // blocks that share a row, at most
  int sum_numbers = 64;  // column sums that fit in a thread's registers beside the row
  int streamed_threads = 1024;
  int shared_for_reductions = 8192;  // bytes of static shared memory, at most
};

inline constexpr tuning kTuning{};

}  // namespace onepass::cuda
