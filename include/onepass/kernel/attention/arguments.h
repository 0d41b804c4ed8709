// Arguments and shared-memory layouts of the attention kernels, for the kernels and for their launchers in
// src/cuda/attention. `arguments` stands last in each struct: a kernel is compiled with room for what its line has
// (kernel/arguments.h), so only what is before it lies at the same offsets for both.
#pragma once

#include "onepass/kernel/arguments.h"
#include "onepass/kernel/common/shapes.h"
#include "onepass/lane/device/tensor_map.h"

namespace onepass {

// Per dimension of a tensor [outer, inner, group, ...]: 1, or 0 where it is broadcast along that dimension.
struct batch_steps {
  int outer, inner, group;
};

// forward_sm90, probabilities_sm90.
struct attention_arguments {
  tensor_map queries, keys,
      values;  // [outer, inner, group, rows, head_dim]; [outer, inner, keys / 8, 8, head_dim] twice
  batch_steps step_queries, step_keys, step_values;
  int inner, group, rows, blocks;  // sizes; blocks: that share a group's rows, or a batch's keys
  void* y;                         // [all rows, value_depth]
  int64 value_depth;
  arguments behind;
};

// What backward reads of a row of softmax: its probabilities are exp2(score · factor + offset), and delta = Σ result ·
// result's gradient. The default is a row that does not exist: all its probabilities are 0.
struct alignas(16) softmax_statistics {
  float factor = 1.0f, offset = static_cast<float>(-kInfinity), delta = 0.0f;
};
static_assert(sizeof(softmax_statistics) == 16);  // one access

// backward_sm90.
struct attention_backward_arguments {
  tensor_map gradients;  // of the result, [outer, inner, group, rows, value_depth]
  batch_steps step_gradients;
  const void* result;              // [all rows, value_depth]
  softmax_statistics* statistics;  // of each group's rows, in whole tiles
  void *rows_gradient, *keys_gradient, *values_gradient;
  int64 depth;
  attention_arguments of;
};

// forward_sm80, without `values` and with.
struct probabilities_sm80_arguments {
  const void* keys;  // [outer, inner, keys, head_dim]: the batches
  int64 stride, outer_stride, inner_stride, inner;
  int64 depth, rows_of_batch, blocks_of_batch;
  arguments behind, before;
};
struct attention_sm80_arguments {
  probabilities_sm80_arguments of;
  const void* values;  // [outer, inner, keys, value_depth]
  int64 stride, outer_stride, inner_stride, value_depth;
  void* y;  // [all rows, value_depth]
};

// backward_sm80. Keys and values are [outer, inner, keys, head_dim]; batches of rows have the same `inner`.
struct batched_keys {
  const void* data;
  int64 stride, outer_stride, inner_stride;
};
struct attention_backward_sm80_arguments {
  const void *queries, *gradients, *result;  // dense; of all rows
  softmax_statistics* statistics;            // of all rows
  void *rows_gradient, *keys_gradient, *values_gradient;
  batched_keys keys, values;
  int64 inner, depth, value_depth, rows_of_batch, blocks_of_batch;
  arguments behind;
};
// chunks: of 8 elements, of head_dim, begun ones too.
struct attention_backward_sm80_shape {
  int chunks, value_chunks;

  static constexpr int kWarpRows = 16, kTileRows = 64, kThreads = kTileRows / kWarpRows * 32;
  constexpr int first_bytes() const { return kTileRows * swizzled_pitch(chunks); }
  constexpr int tile_bytes() const { return first_bytes() + kTileRows * swizzled_pitch(value_chunks); }
  static constexpr int score_bytes() { return kTileRows * swizzled_pitch(kTileRows / 8); }
  // Two tiles are in flight; beside them, for keys, the block's own tile, and the scores' gradients and probabilities.
  constexpr int shared_bytes(bool for_keys) const {
    return for_keys ? 3 * tile_bytes() + 2 * score_bytes() : 2 * tile_bytes();
  }
};

// probabilities_sm90: what a block of `groups` warpgroups has in shared memory beside the ring of queries.
struct probabilities_shape {
  int atoms, groups, tile, cluster;
  bool masks_keys;

  static constexpr int kPartialBytes = 8;                    // a row's largest score and sum
  static constexpr int kMarkAtomBytes = 16 * kAtomRowBytes;  // sixteen rows, of which the first has the marks
  constexpr int key_bytes() const { return tile_bytes(atoms, tile); }
  constexpr int mark_bytes() const { return masks_keys ? tile / kAtomColumns * kMarkAtomBytes : 0; }
  constexpr int partials() const { return groups * cluster; }  // of a row
  constexpr int partial_bytes() const { return partials() * kWarpgroupRows * kPartialBytes; }
  constexpr int block_bytes() const { return groups * (key_bytes() + mark_bytes()) + 2 * partial_bytes(); }
};

// probabilities_backward_sm90.
struct probabilities_backward_arguments {
  tensor_map queries, keys, weights, gradients;  // [outer, inner, group, rows, head_dim or keys]
  batch_steps step_queries, step_keys, step_weights, step_gradients;
  int batches, inner, group, rows, columns;  // sizes; columns: keys of a batch
  int clusters;
  void *rows_gradient, *keys_gradient;  // [all rows, depth], [all keys, depth]
  float* key_parts;                     // [clusters, 2, columns, depth]: of batches that clusters share
  int64 depth;
  float factor;  // that the words before softmax scale by
};
struct probabilities_backward_shape {
  int atoms, tile, cluster, stages;

  static constexpr int kThreads = 4 * kWarpgroupThreads;
  static constexpr int kPartialRows = kWarpgroupRows + 8;  // partial sums of different blocks differ in banks
  constexpr bool is_alone() const { return cluster == 1; }
  constexpr int head_dim() const { return atoms * kAtomColumns; }
  constexpr int strip_bytes() const { return tile_bytes(tile / kAtomColumns, kWarpgroupRows); }
  constexpr int query_bytes() const { return tile_bytes(atoms, kWarpgroupRows); }
  constexpr int key_bytes() const { return tile_bytes(atoms, tile); }
  constexpr int key_stages() const { return is_alone() ? 2 : 1; }
  constexpr int sum_pitch() const { return head_dim() * 2 + 16; }  // rows differ in banks
  constexpr int sum_bytes() const { return is_alone() ? 0 : kWarpgroupRows * sum_pitch(); }
  constexpr int delta_bytes() const { return is_alone() ? 0 : cluster * kPartialRows * 4; }
  constexpr int shared_bytes() const {
    return kTileAlignment + stages * (2 * strip_bytes() + query_bytes() + 2 * sum_bytes() + delta_bytes()) +
           key_stages() * key_bytes();
  }
};

}  // namespace onepass
