// Backward of lines that begin with `scores` and end in softmax in one kernel
// (onepass/skeleton/score_gradients.cuda.h): where it serves, and its launch.
#pragma once

#include <string>

#include "src/cuda/score_tiles.h"
#include "src/spec/line.h"

namespace onepass::cuda {

struct score_gradients_call {
  dtype type;
  float factor;                                    // that the words before softmax scale by
  batched_rows queries, keys, weights, gradients;  // gradients: of the weights
  void *to_queries = nullptr, *to_keys = nullptr;  // where theirs go, dense
};

struct score_gradients_plan {
  int tile, cluster;  // keys of a block, and blocks that share a batch's
  unsigned grid, threads, shared_bytes;
};

struct score_sizes {
  int64 batches, group, rows, depth, keys;  // group: matrices of queries that share a batch's keys
};
// Empty where the kernel can take such sizes, and is faster than softmax's kernel and two products.
std::string why_not_score_gradients(const score_sizes&, dtype, const device_facts&);
bool fits(const score_gradients_call&);
score_gradients_plan plan_score_gradients(const score_gradients_call&);
std::string source(const score_gradients_call&, const score_gradients_plan&);
bool launch_score_gradients(const score_gradients_call&, int device, void* stream);  // false: no room for a cluster

}  // namespace onepass::cuda
