// Arguments and shared-memory layouts of the attention kernels. The kernels and their launchers in src/cuda/attention
// both include them. `arguments` stands last in each struct: a kernel is compiled with room for its line's operands
// only (kernel/arguments.h), so only the fields before `arguments` have the same offsets on both sides.
#pragma once

#include "onepass/kernel/arguments.h"
#include "onepass/kernel/common/shapes.h"
#include "onepass/lane/device/tensor_map.h"

namespace onepass {

// Per dimension of a tensor [outer, inner, query_heads, ...]: 1, or 0 where the tensor is broadcast along it.
struct batch_steps {
  int outer, inner, query_head;
};

// The matrices of a tensor [outer, inner, query_heads, rows, head_dim] of 16-bit numbers, whose rows are contiguous;
// keys and values have one query head.
struct strided_matrices {
  void* data;
  int64 outer_stride, inner_stride, query_head_stride, row_stride;
};

// forward_sm90, probabilities_sm90.
struct attention_arguments {
  tensor_map queries, keys,
      values;  // [outer, inner, query_heads, rows, head_dim]; [outer, inner, keys / 8, 8, head_dim] twice
  batch_steps step_queries, step_keys, step_values;
  int inner, query_heads, rows;  // sizes; query_heads: matrices of queries that share a batch's keys (GQA)
  int blocks;                    // blocks that share a matrix of queries, or a batch's keys
  strided_matrices y;            // with values
  int64 value_head_dim;
  arguments behind;
};

// Softmax statistics of a row in backward: its probabilities are exp2(score · factor + offset), and D = delta =
// Σ output · grad_output. The default is a row that does not exist: all its probabilities are 0.
struct alignas(16) softmax_statistics {
  float factor = 1.0f, offset = static_cast<float>(-kInfinity), delta = 0.0f;
};
static_assert(sizeof(softmax_statistics) == 16);  // one access

// backward_sm90.
struct attention_backward_arguments {
  tensor_map grad_output;  // [outer, inner, query_heads, rows, value_head_dim]
  batch_steps step_grad_output;
  strided_matrices output;
  softmax_statistics* statistics;  // of each matrix of queries, padded to whole tiles of rows
  strided_matrices grad_queries, grad_keys, grad_values;
  int64 head_dim;
  attention_arguments forward;
};

// forward_sm80, without `values` and with.
struct probabilities_sm80_arguments {
  const void* keys;  // [outer, inner, keys, head_dim]
  int64 stride, outer_stride, inner_stride, inner;
  int64 head_dim, rows_of_batch, blocks_of_batch;
  arguments behind, before;
};
struct attention_sm80_arguments {
  probabilities_sm80_arguments probabilities;
  const void* values;  // [outer, inner, keys, value_head_dim]
  int64 stride, outer_stride, inner_stride, value_head_dim;
  strided_matrices y;
};

// backward_sm80.
struct attention_backward_sm80_arguments {
  const void *queries, *grad_output;  // dense, all rows
  softmax_statistics* statistics;     // all rows
  strided_matrices keys, values, output, grad_queries, grad_keys, grad_values;
  int64 inner, head_dim, value_head_dim, rows_of_batch, blocks_of_batch;
  arguments behind;
};
// chunks: head_dim in chunks of 8 elements, rounded up.
struct attention_backward_sm80_shape {
  int chunks, value_chunks;

  static constexpr int kWarpRows = 16, kTileRows = 64, kThreads = kTileRows / kWarpRows * 32;
  constexpr int first_bytes() const { return kTileRows * swizzled_pitch(chunks); }
  constexpr int tile_bytes() const { return first_bytes() + kTileRows * swizzled_pitch(value_chunks); }
  static constexpr int score_bytes() { return kTileRows * swizzled_pitch(kTileRows / 8); }
  // Two tiles are in flight. The kernel of keys also has the block's own tile, the scores' gradients, and the
  // probabilities.
  constexpr int shared_bytes(bool for_keys) const {
    return for_keys ? 3 * tile_bytes() + 2 * score_bytes() : 2 * tile_bytes();
  }
};

// probabilities_sm90: shared memory of a block, without the ring of queries.
struct probabilities_shape {
  int atoms, warpgroups, tile, cluster;
  bool masks_keys;

  static constexpr int kPartialBytes = 8;                    // a row's largest score and sum
  static constexpr int kMarkAtomBytes = 16 * kAtomRowBytes;  // 16 rows; the first has the mask
  constexpr int key_bytes() const { return tile_bytes(atoms, tile); }
  constexpr int mark_bytes() const { return masks_keys ? tile / kAtomColumns * kMarkAtomBytes : 0; }
  constexpr int partials() const { return warpgroups * cluster; }  // of a row
  constexpr int partial_bytes() const { return partials() * kWarpgroupRows * kPartialBytes; }
  constexpr int block_bytes() const { return warpgroups * (key_bytes() + mark_bytes()) + 2 * partial_bytes(); }
};

// probabilities_backward_sm90.
struct probabilities_backward_arguments {
  tensor_map queries, keys, probabilities, grad_probabilities;  // [outer, inner, query_heads, rows, head_dim or keys]
  batch_steps step_queries, step_keys, step_probabilities, step_grad_probabilities;
  int batches, inner, query_heads, rows, columns;  // sizes; columns: keys of a batch
  int clusters;
  void *grad_queries, *grad_keys;  // [all rows, head_dim], [all keys, head_dim]
  float* partial_grad_keys;        // [clusters, 2, columns, head_dim]: of batches that several clusters share
  int64 head_dim;
  float factor;  // scale of the words before softmax
};
struct probabilities_backward_shape {
  int atoms, tile, cluster, stages;

  static constexpr int kThreads = 4 * kWarpgroupThreads;
  static constexpr int kPartialRows = kWarpgroupRows + 8;  // the blocks' partial sums lie in different banks
  constexpr bool is_alone() const { return cluster == 1; }
  constexpr int head_dim() const { return atoms * kAtomColumns; }
  constexpr int row_tile_bytes() const { return tile_bytes(tile / kAtomColumns, kWarpgroupRows); }
  constexpr int query_bytes() const { return tile_bytes(atoms, kWarpgroupRows); }
  constexpr int key_bytes() const { return tile_bytes(atoms, tile); }
  constexpr int key_stages() const { return is_alone() ? 2 : 1; }
  constexpr int sum_pitch() const { return head_dim() * 2 + 16; }  // neighbouring rows lie in different banks
  constexpr int sum_bytes() const { return is_alone() ? 0 : kWarpgroupRows * sum_pitch(); }
  constexpr int delta_bytes() const { return is_alone() ? 0 : cluster * kPartialRows * 4; }
  constexpr int shared_bytes() const {
    return kTileAlignment + stages * (2 * row_tile_bytes() + query_bytes() + 2 * sum_bytes() + delta_bytes()) +
           key_stages() * key_bytes();
  }
};

}  // namespace onepass
