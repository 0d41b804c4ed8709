// The CUDA skeletons' tuning: plain data, each figure with its reason.
#pragma once

namespace onepass::cuda {

struct tuning {
  // Elementwise: threads of a block, and lanes in flight a thread. Four loads of 16 bytes by 2048 threads are far more
  // than the 28 KB that fill HBM on an SM; backward reads two tensors or more, so two lanes do there.
  int elementwise_threads = 256;
  int elementwise_unroll = 4;
  int elementwise_backward_unroll = 2;
  int elementwise_blocks_per_sm = 8;  // with column sums, where blocks stride over the rows

  // Rowwise: numbers of a row in one thread's registers, preferred and at most. Backward holds two values each.
  int forward_numbers = 32, forward_numbers_at_most = 64;
  int backward_numbers = 16, backward_numbers_at_most = 32;
  int sum_numbers = 32;      // column sums that fit beside them
  int row_threads = 512;     // at most for one row: 128 registers each
  int block_threads = 256;   // where several rows share a block
  int streamed_threads = 512;
  int sm_threads_narrow = 1024, sm_threads_wide = 512;  // resident threads that backward's persistent grid is cut for
};

inline constexpr tuning kTuning{};

}  // namespace onepass::cuda
