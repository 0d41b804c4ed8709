// The CUDA skeletons' tuning: plain data, each figure with its reason.
#pragma once

namespace onepass::cuda {

struct row_tuning {
  int numbers,
      numbers_at_most;  // of a row in one thread's registers, preferred and at most; backward holds two values each
  int threads;          // of a row, at most
  int resident;         // threads that registers must leave room for on an SM; backward's persistent grid has as many
};

struct tuning {
  // Elementwise: threads of a block, lanes in flight a thread, and threads that registers must leave room for on an SM:
  // two loads of 16 bytes by 1024 threads are more than the 28 KB that fill HBM on an SM.
  int elementwise_threads = 256;
  int elementwise_unroll = 2;
  int elementwise_resident = 1024;
  int elementwise_blocks_per_sm = 8;  // with column sums, where blocks stride over the rows

  // Fractions of copy bandwidth on the H200, bf16, forward: 1024 threads an SM instead of what the compiler leaves room
  // for take layer_norm 32768x4096 from .60 to .75 and 8192x16384 from .49 to .73 (docs/measured-facts.md).
  row_tuning forward_row = {.numbers = 32, .numbers_at_most = 64, .threads = 512, .resident = 1024};
  // Backward: longer rows spill (layer_norm 8192x16384: .26 with 32 numbers a thread, .38 with 16) and go in two
  // kernels.
  row_tuning backward_row = {.numbers = 8, .numbers_at_most = 8, .threads = 1024, .resident = 1024};
  int sum_numbers = 32;     // column sums that fit in a thread's registers beside the row
  int block_threads = 256;  // where several rows share a block
  int streamed_threads = 1024;
  int shared_for_reductions = 4096;  // bytes of static shared memory, at most
};

inline constexpr tuning kTuning{};

}  // namespace onepass::cuda
