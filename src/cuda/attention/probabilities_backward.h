// Launcher of probabilities' backward (onepass/kernel/attention/probabilities_backward_sm90.cuda.h), for lines that
// begin with `scores` and end in softmax.
#pragma once

#include <functional>
#include <string>

#include "src/cuda/attention/tiles.h"
#include "src/line/line.h"

namespace onepass::cuda {

struct probabilities_backward_call {
  dtype type;
  float factor;  // scale of the words before softmax
  batched_rows queries, keys, probabilities, grad_probabilities;
  void *grad_queries = nullptr, *grad_keys = nullptr;  // dense
};

// The number of clusters that share the row tiles of all batches, and of floats for partial sums of shared batches.
struct cluster_schedule {
  int count;
  int64 partial_elements;
};
struct probabilities_backward_plan {
  int tile, cluster, stages;  // keys of a block; blocks that share a batch's keys; row tiles in shared memory
  unsigned threads, shared_bytes;
};

struct probabilities_sizes {
  int64 batches, query_heads, rows, head_dim, keys;  // query_heads: matrices of queries that share a batch's keys
};
// Why the kernel cannot take such sizes; empty where it can.
std::string why_not_probabilities_backward(const probabilities_sizes&, dtype, const device_facts&);
// Predicted time of the kernel, and of the alternative: softmax's kernel and two GEMMs.
double seconds_of_probabilities_backward(const probabilities_sizes&, const device_facts&);
double seconds_of_softmax_and_products(const probabilities_sizes&, const device_facts&);
bool fits(const probabilities_backward_call&);
probabilities_backward_plan plan_probabilities_backward(const probabilities_backward_call&);
// room: clusters that run at a time.
cluster_schedule schedule_row_tiles(const probabilities_sizes&, int room);
std::string source(const probabilities_backward_call&, const probabilities_backward_plan&);
std::string reduce_dk_source(dtype);
// False: the chip has no room for a cluster. room_for allocates floats on the device.
bool launch_probabilities_backward(const probabilities_backward_call&,
                                   const std::function<void*(int64 count)>& room_for, int device, void* stream);

}  // namespace onepass::cuda
