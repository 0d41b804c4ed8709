// Launcher of forward by warp-level mma (onepass/kernel/attention/forward_sm80.cuda.h): probabilities, and flash
// attention with `values`.
#pragma once

#include <string>

#include "onepass/kernel/attention/arguments.h"
#include "src/cuda/linear/warp_gemm.h"
#include "src/plan/contraction.h"

namespace onepass::cuda {

// before: the queries. The matrix: the keys, [outer, inner, columns, head_dim]; a batch's rows are neighbours.
struct probabilities_sm80_call : warp_linear_call {
  int64 outer, inner, outer_stride, inner_stride;
};
// With `values`: the result is written to y, not to that of the words behind `scores`; y.query_head_stride is of
// a_behind.matrix_rows rows.
struct attention_sm80_call : probabilities_sm80_call {
  const void* values;  // [outer, inner, columns, value_head_dim]
  int64 value_stride, value_outer_stride, value_inner_stride, value_head_dim;
  strided_matrices y;
  bool causal;  // softmax of row i ignores keys > i
};
struct forward_sm80_plan : warp_linear_plan {
  int pitch, tile, rows_of_thread, blocks_per_sm;
  int64 blocks_of_batch;
};

// Why the kernel cannot take the line; empty where it can.
std::string why_not_probabilities_sm80(const spec::contraction&, int64 head_dim, dtype, const device_facts&);
int block_rows_sm80(int64 head_dim, int64 value_head_dim = 0);  // rows of a block; value_head_dim 0: without values
bool fits(const probabilities_sm80_call&);                      // whether addresses and strides suit it
forward_sm80_plan plan_probabilities_sm80(const probabilities_sm80_call&, const device_facts&);
std::string source(const probabilities_sm80_call&, const forward_sm80_plan&);
void launch_probabilities_sm80(const probabilities_sm80_call&, int device, void* stream);

// The same with values.
std::string why_not_attention_sm80(const spec::contraction&, int64 head_dim, int64 value_head_dim, dtype,
                                   const device_facts&);
bool fits(const attention_sm80_call&);
forward_sm80_plan plan_attention_sm80(const attention_sm80_call&, const device_facts&);
std::string source(const attention_sm80_call&, const forward_sm80_plan&);
void launch_attention_sm80(const attention_sm80_call&, int device, void* stream);

// 16-byte chunks of a row in a tile (onepass/kernel/common/swizzled_tile.cuda.h), rounded up.
constexpr int64 chunks_of(int64 head_dim) { return ceil_div(head_dim, 8); }
// Configures the words behind `scores` for threads that have eight neighbours of a row; four threads share a row, in
// tiles of `tile` keys.
void describe_words(configuration&, int threads, int64 keys, int tile);

}  // namespace onepass::cuda
