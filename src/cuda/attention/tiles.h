// Plans and arguments of the attention kernels on sm_90a (onepass/kernel/attention/tiles_sm90.cuda.h).
#pragma once

#include <string>
#include <vector>

#include "onepass/kernel/attention/arguments.h"
#include "src/cuda/row/configuration.h"
#include "src/cuda/runtime/driver.h"

namespace onepass::cuda {

// [outer, inner, query_heads, rows, head_dim], rows contiguous. query_heads: matrices of queries that share a batch's
// keys (GQA); keys and values have one.
struct batched_rows {
  const void* data;
  int64 outer, inner, query_heads, rows, head_dim;
  int64 outer_stride, inner_stride, query_head_stride, row_stride;
};
bool fits(const batched_rows&);  // whether address and strides suit TMA
strided_matrices matrices_of(const batched_rows&);

struct attention_call {
  const request& behind;  // the words behind `scores`; without values y is the probabilities
  const arguments& a_behind;
  bool causal = false;                       // softmax of row i ignores keys > i
  std::vector<int> prefetched{};             // operands that are prefetched: the words' tensors before softmax
  std::vector<int> leading_masks{};          // operands that are spec::leading_masks
  batched_rows queries{}, keys{}, values{};  // values.data null: none
  strided_matrices y{};                      // with values: [outer, inner, query_heads, rows, values.head_dim]
};
bool fits(const attention_call&);

struct tiles_plan {
  configuration behind;
  int warpgroups, tile, stages;  // tile: its keys, or rows of queries
  bool owns_keys;                // a block has keys and loops over rows
  bool causal;                   // tiles that are all masked are skipped
  uint64 key_masks = 0;          // operands that are key-padding masks (bits)
  int64 blocks;                  // that share a matrix of queries, or a batch's keys
  int cluster = 1, blocks_per_sm = 1;
  unsigned grid, threads, shared_bytes;
};

int atoms_of(int64 head_dim);
uint64 shared_operands(const arguments&);  // operands whose rows are the same in a matrix (bits)

// Shared memory of a kernel, beside the tensors that it prefetches.
struct tiles_room {
  int own_bytes, tile_bytes;  // resident; of a stage of the ring
  int least_stages, most_stages;
  int stream_stages = 1;
  int lost_bytes = kTileAlignment;  // at most, by alignment of the first tile
};
// Plans all but blocks and grid. The kernel prefetches as many tensors as have room.
tiles_plan plan_tiles(const attention_call&, int warpgroups, int tile, bool owns_keys, const tiles_room&,
                      const device_facts&);

tensor_map map_of_rows(const kernel& with, const batched_rows&, bool is_bf16);
tensor_map map_of_keys(const kernel& with, const batched_rows&, bool is_bf16, const tiles_plan&);

batch_steps steps_of(const batched_rows&);

// Appends attention_arguments, and pads the kernel's arguments to a multiple of the maps' alignment.
void append_attention(std::string& packed, const kernel& with, const attention_call&, const tiles_plan&);

// The source of a kernel that calls `function` of onepass/kernel/attention/<header>.cuda.h.
std::string tiles_source(const attention_call&, const tiles_plan&, const std::string& header, const std::string& more,
                         const std::string& arguments, const std::string& function);

}  // namespace onepass::cuda
