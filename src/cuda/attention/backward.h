// Launchers of attention's backward, for lines with `scores`, softmax and `values`: on sm_90a
// (onepass/kernel/attention/backward_sm90.cuda.h), and by warp-level mma
// (onepass/kernel/attention/backward_sm80.cuda.h).
#pragma once

#include <string>
#include <vector>

#include "src/cuda/attention/tiles.h"
#include "src/line/line.h"
#include "src/plan/contraction.h"

namespace onepass::cuda {

// Backward has two kernels. The first computes dQ and stores the statistics that the second reads for dK and dV.
enum class backward_kernel : int { queries, keys };

struct backward_sm90_call {
  const attention_call& forward;  // y is not read; the request wants the gradients of the words' tensors
  batched_rows grad_output{};
  strided_matrices output{};
  softmax_statistics* statistics = nullptr;  // written; of each matrix of queries, padded to whole tiles of rows
  strided_matrices grad_queries{}, grad_keys{}, grad_values{};  // data null: not wanted
};

// Why the kernels cannot take a call that forward_sm90 takes; empty where they can.
std::string why_not_backward_sm90(int64 head_dim, int64 value_head_dim);
bool fits(const backward_sm90_call&);  // whether addresses and strides suit TMA

struct backward_launch {
  backward_kernel which;
  backward_sm90_call call;
};
// The first kernel, then the second: once for dK and dV, or, where registers hold one sum, once for each.
std::vector<backward_launch> backward_launches(const backward_sm90_call&);
tiles_plan plan_backward_sm90(const backward_sm90_call&, backward_kernel, const device_facts&);
std::string source(const backward_sm90_call&, backward_kernel, const tiles_plan&);
void launch_backward_sm90(const backward_sm90_call&, int device, void* stream);

// Queries and grad_output are dense and have all rows.
struct backward_sm80_call {
  const request& behind;  // forward's; it wants the gradients of the words' tensors
  const arguments& a_behind;
  bool causal;
  const void *queries, *grad_output;
  strided_matrices output;
  batched_rows keys, values;  // query_heads: 1
  int64 rows_of_batch;
  softmax_statistics* statistics;                               // written; of all rows
  strided_matrices grad_queries{}, grad_keys{}, grad_values{};  // data null: not wanted
};

struct backward_sm80_plan {
  configuration behind;
  bool causal;
  int64 blocks_of_batch;
  unsigned grid, threads, shared_bytes;
};

// Why the kernels cannot take such lines, sizes and dtype; empty where they can.
std::string why_not_backward_sm80(const spec::contraction&, int64 head_dim, int64 value_head_dim, dtype,
                                  const device_facts&);
bool fits(const backward_sm80_call&);  // whether addresses and strides suit them
backward_sm80_plan plan_backward_sm80(const backward_sm80_call&, backward_kernel);
std::string source(const backward_sm80_call&, backward_kernel, const backward_sm80_plan&);
void launch_backward_sm80(const backward_sm80_call&, int device, void* stream);

}  // namespace onepass::cuda
