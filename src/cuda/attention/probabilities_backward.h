// Backward of lines that begin with `scores` and end in softmax in one kernel
// (onepass/kernel/attention/probabilities_backward_sm90.cuda.h): where it serves, and its launch.
#pragma once

#include <functional>
#include <string>

#include "src/cuda/attention/tiles.h"
#include "src/line/line.h"

namespace onepass::cuda {

struct score_gradients_call {
  dtype type;
  float factor;                                    // that the words before softmax scale by
  batched_rows queries, keys, weights, gradients;  // gradients: of the weights
  void *to_queries = nullptr, *to_keys = nullptr;  // where theirs go, dense
};

// How many clusters share the strips of all batches, and how many floats they need for what several have of a batch.
struct shared_clusters {
  int count;
  int64 parts;
};
struct score_gradients_plan {
  int tile, cluster, stages;  // keys of a block, blocks that share a batch's, and strips in shared memory
  unsigned threads, shared_bytes;
};

struct score_sizes {
  int64 batches, group, rows, depth, keys;  // group: matrices of queries that share a batch's keys
};
// Empty where the kernel can take such sizes.
std::string why_not_score_gradients(const score_sizes&, dtype, const device_facts&);
// Its time, where that is empty, and that of softmax's kernel and two products.
double seconds_of_score_gradients(const score_sizes&, const device_facts&);
double seconds_of_softmax_and_products(const score_sizes&, const device_facts&);
bool fits(const score_gradients_call&);
score_gradients_plan plan_score_gradients(const score_gradients_call&);
// room: for so many clusters at a time.
shared_clusters share_strips(const score_sizes&, int room);
std::string source(const score_gradients_call&, const score_gradients_plan&);
std::string key_parts_source(dtype);
// False: the chip has no room for a cluster. room_for: floats on the device.
bool launch_score_gradients(const score_gradients_call&, const std::function<void*(int64 count)>& room_for, int device,
                            void* stream);

}  // namespace onepass::cuda
