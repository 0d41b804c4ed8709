// Lines that begin with `scores` in one kernel (onepass/kernel/attention/forward_sm80.cuda.h): where it serves, and its
// launch.
#pragma once

#include <string>

#include "onepass/kernel/attention/arguments.h"
#include "src/cuda/linear/warp_gemm.h"
#include "src/plan/contraction.h"

namespace onepass::cuda {

// before: the queries. The matrix: the keys, [outer, inner, columns, depth]; a batch's rows are neighbours.
struct scores_call : warp_linear_call {
  int64 outer, inner, outer_stride, inner_stride;
};
// With `values` (onepass/kernel/attention/forward_sm80.cuda.h): the result is y, and not that of what stands behind
// `scores`.
struct warp_attention_call : scores_call {
  const void* values;  // [outer, inner, columns, value_depth]
  int64 value_stride, value_outer_stride, value_inner_stride, value_depth;
  void* y;
  bool causal;  // what stands before softmax masks what is behind a row's own place
};
struct scores_plan : warp_linear_plan {
  int pitch, tile, rows_of_thread, blocks_per_sm;
  int64 blocks_of_batch;
};

// Empty where the kernel can take the line, with keys of so many numbers.
std::string why_not_scores(const spec::contraction&, int64 depth, dtype, const device_facts&);
int rows_of_block(int64 depth, int64 value_depth = 0);             // of one batch; with values of so many numbers
bool fits(const scores_call&);                                     // whether addresses and strides suit it
scores_plan plan_scores(const scores_call&, const device_facts&);  // where why_not_scores says nothing
std::string source(const scores_call&, const scores_plan&);
void launch_scores(const scores_call&, int device, void* stream);

// Likewise with values of so many numbers.
std::string why_not_warp_attention(const spec::contraction&, int64 depth, int64 value_depth, dtype,
                                   const device_facts&);
bool fits(const warp_attention_call&);
scores_plan plan_warp_attention(const warp_attention_call&, const device_facts&);
std::string source(const warp_attention_call&, const scores_plan&);
void launch_warp_attention(const warp_attention_call&, int device, void* stream);

// 16-byte pieces of a row in a tile (onepass/kernel/common/swizzled_tile.cuda.h), begun ones too.
constexpr int64 pieces_of(int64 depth) { return ceil_div(depth, 8); }
// The words behind `scores` at a thread's eight neighbours of a row, which four threads share, in tiles of so many
// keys.
void describe_words(configuration&, int threads, int64 keys, int tile);

}  // namespace onepass::cuda
