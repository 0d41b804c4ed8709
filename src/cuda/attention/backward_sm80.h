// Backward of lines with `scores`, softmax and `values` in kernels of warps
// (onepass/kernel/attention/backward_sm80.cuda.h): where they serve, and their launch.
#pragma once

#include <string>

#include "src/cuda/attention/backward_sm90.h"
#include "src/plan/contraction.h"

namespace onepass::cuda {

// Queries, the result and its gradient are dense, and have all rows.
struct warp_gradients_call {
  const request& behind;  // forward's; what it wants are the words' tensors' gradients
  const arguments& a_behind;
  bool causal;
  const void *queries, *gradients, *result;
  batched_rows keys, values;  // without groups
  int64 rows_of_batch;
  softmax_statistics* statistics;                                        // written, of all rows
  void *to_queries = nullptr, *to_keys = nullptr, *to_values = nullptr;  // null: not wanted
};

struct warp_gradients_plan {
  configuration behind;
  bool causal;
  int64 blocks_of_batch;
  unsigned grid, threads, shared_bytes;
};

// Empty where the kernels can take such lines, sizes and dtype.
std::string why_not_warp_gradients(const spec::contraction&, int64 depth, int64 value_depth, dtype,
                                   const device_facts&);
bool fits(const warp_gradients_call&);  // whether addresses and strides suit them
warp_gradients_plan plan_warp_gradients(const warp_gradients_call&, gradients_of);
std::string source(const warp_gradients_call&, gradients_of, const warp_gradients_plan&);
void launch_warp_gradients(const warp_gradients_call&, int device, void* stream);

}  // namespace onepass::cuda
