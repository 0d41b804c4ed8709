// Plans and arguments of the attention kernels of tiles (onepass/kernel/attention/tiles_sm90.cuda.h).
#pragma once

#include <string>
#include <vector>

#include "onepass/kernel/attention/arguments.h"
#include "src/cuda/row/configuration.h"
#include "src/cuda/runtime/driver.h"

namespace onepass::cuda {

// [outer, inner, group, rows, depth], numbers of a row neighbours. Keys and values have no groups.
struct batched_rows {
  const void* data;
  int64 outer, inner, group, rows, depth;
  int64 outer_stride, inner_stride, group_stride, row_stride;
};
bool fits(const batched_rows&);  // whether address and strides suit TMA

struct attention_call {
  const request& behind;  // what stands behind `scores`; y: the weights, where there are no values
  const arguments& a_behind;
  bool causal = false;                       // what stands before softmax masks what is behind a row's own place
  std::vector<int> brought{};                // tensors that it takes: numbers of operands
  std::vector<int> leading_masks{};          // likewise, of spec::leading_masks
  batched_rows queries{}, keys{}, values{};  // values.data null: none
  void* y = nullptr;                         // with values: [all rows, values.depth]
};
bool fits(const attention_call&);

struct tiles_plan {
  configuration behind;
  int groups, tile, stages;  // of a tile: keys, or rows of queries
  bool owns_keys;            // rows pass by, not keys
  bool causal;               // what no row needs is left out
  uint64 key_masks = 0;      // operands that leave keys out (bits)
  int64 blocks;              // that share a group's rows, or a batch's keys
  int cluster = 1, blocks_per_sm = 1;
  unsigned grid, threads, shared_bytes;
};

int panels_of(int64 depth);
uint64 shared_operands(const arguments&);  // of which a matrix's rows are the same (bits)

// What a kernel has shared memory for, beside the tensors that it loads ahead.
struct tiles_room {
  int own_bytes, tile_bytes;  // of what a block has all the time; of a stage
  int least_stages, most_stages;
  int stream_stages = 1;
  int lost_bytes = kTileAlignment;  // at most, before the first tile
};
// A kernel with so many warpgroups, and rows or keys of a tile, that loads as many tensors ahead as have room. Without
// blocks and grid.
tiles_plan plan_score_tiles(const attention_call&, int groups, int tile, bool owns_keys, const tiles_room&,
                            const device_facts&);

tensor_map map_of_rows(const kernel& with, const batched_rows&, bool is_bf16);
tensor_map map_of_keys(const kernel& with, const batched_rows&, bool is_bf16, const tiles_plan&);

batch_steps steps_of(const batched_rows&);

// attention_arguments, and the end of a kernel's argument, which is a multiple of what its maps are aligned to.
void append_attention(std::string& packed, const kernel& with, const attention_call&, const tiles_plan&);

// The source of a kernel that calls `function` of onepass/kernel/attention/<header>.cuda.h.
std::string tiles_source(const attention_call&, const tiles_plan&, const std::string& header, const std::string& more,
                         const std::string& arguments, const std::string& function);

}  // namespace onepass::cuda
