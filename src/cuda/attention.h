// Lines that begin with `scores` in one kernel of tiles, with `values` or without (onepass/skeleton/attention.cuda.h):
// where it serves, and its launch.
#pragma once

#include <string>
#include <vector>

#include "src/cuda/configuration.h"
#include "src/cuda/driver.h"
#include "src/spec/line.h"

namespace onepass::cuda {

// [outer, inner, group, rows, depth], numbers of a row neighbours. Keys and values have no groups.
struct batched_rows {
  const void* data;
  int64 outer, inner, group, rows, depth;
  int64 outer_stride, inner_stride, group_stride, row_stride;
};

struct attention_call {
  const request& behind;  // what stands behind `scores`; y: the weights, where there are no values
  const arguments& a_behind;
  bool causal = false;                       // what stands before softmax masks what is behind a row's own place
  std::vector<int> brought{};                // tensors that it takes: numbers of operands
  batched_rows queries{}, keys{}, values{};  // values.data null: none
  void* y = nullptr;                         // with values: [all rows, values.depth]
};
struct attention_plan {
  configuration behind;
  int groups, keys, stages;
  int64 blocks;  // that share a group's rows
  unsigned grid, threads, shared_bytes;
};

// Empty where the kernel can take lines of these words, sizes and dtype; value_depth 0: without `values`.
std::string why_not_attention(const spec::line& behind, int64 depth, int64 value_depth, int64 keys, dtype,
                              const device_facts&);
int rows_of_attention(int64 depth, int64 value_depth);  // of a block
bool fits(const attention_call&);                       // whether addresses and strides suit it
attention_plan plan_attention(const attention_call&, const device_facts&);
std::string source(const attention_call&, const attention_plan&);
void launch_attention(const attention_call&, int device, void* stream);

}  // namespace onepass::cuda
