// Plans and arguments of the attention kernels on sm_90a.
#include "src/cuda/attention/tiles.h"

#include <algorithm>
#include <bit>

#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/runtime/packed_arguments.h"
#include "src/cuda/runtime/source.h"

namespace onepass::cuda {
namespace {

// A broadcast dimension has size 1.
int64 broadcast_size(int64 size, int64 stride) { return stride == 0 ? 1 : size; }
int64 stride_of(int64 stride) { return stride == 0 ? kTileLanes : stride; }

// Prefetched tensors of the words before softmax, whose vectors have at most 16 bytes (bits, as
// kernel/common/cursor.cuda.h counts them).
uint64 streams_of(const attention_call& call, const configuration& c) {
  uint64 streams = 0;
  for (const int i : call.prefetched) {
    const dtype type = call.behind.operand[i];
    const bool suits = size_of(type) == 2 || type == dtype::boolean;
    if (suits && !((c.single_operand | c.shared_operand) >> i & 1)) streams |= bit_of(stream::operand + i);
  }
  return streams;
}

}  // namespace

uint64 shared_operands(const arguments& a) {
  uint64 shared = 0;
  for (int i = 0; i < kMaxOperands; ++i) {
    const view& v = a.operand[i];
    shared |= static_cast<uint64>(v.data && v.column_stride == 1 && v.stride[kMaxDims - 1] == 0) << i;
  }
  return shared;
}

bool fits(const batched_rows& of) {
  const int64 strides = of.outer_stride | of.inner_stride | of.query_head_stride | of.row_stride;
  return is_aligned(of.data, strides);
}

strided_matrices matrices_of(const batched_rows& of) {
  return {const_cast<void*>(of.data), of.outer_stride, of.inner_stride, of.query_head_stride, of.row_stride};
}

bool fits(const attention_call& call) {
  const bool values = call.values.data == nullptr || fits(call.values);
  return fits(call.queries) && fits(call.keys) && values && call.a_behind.rows < 1 << 30 &&
         describe(call.behind, call.a_behind).access == kTileLanes;
}

int atoms_of(int64 head_dim) { return static_cast<int>(ceil_div(head_dim, 64)); }

tiles_plan plan_tiles(const attention_call& call, int warpgroups, int tile, bool owns_keys, const tiles_room& with,
                      const device_facts& chip) {
  constexpr int kMbarrierBytes = 1024;
  tiles_plan p{};
  p.warpgroups = warpgroups, p.tile = tile, p.owns_keys = owns_keys, p.causal = call.causal;
  p.threads = static_cast<unsigned>((warpgroups + 1) * kWarpgroupThreads);
  configuration& c = p.behind = describe(call.behind, call.a_behind);
  c.shared_operand = shared_operands(call.a_behind);
  c.threads = static_cast<int>(p.threads), c.stages = with.stream_stages, c.staged = 0, c.aligned_operand = 0;
  if (owns_keys) {
    c.vector_size = c.access = 2, c.across = warpgroups * kWarpgroupThreads, c.down = 1, c.held_vectors = tile / 4,
    c.spare_vectors = 0;
  } else {
    c.vector_size = kTileLanes, c.across = 4, c.down = warpgroups * kWarpgroupRows, c.held_vectors = tile / 32;
    c.spare_vectors = 4;  // rows lie in different banks
    c.exact = call.keys.rows % tile == 0;
  }
  const int stream = c.stages * c.down * (c.across * c.held_vectors + c.spare_vectors) * c.vector_size * 2;
  const int room = chip.shared_per_block - kMbarrierBytes - with.lost_bytes - with.own_bytes,
            least = with.least_stages * with.tile_bytes;
  c.streams = streams_of(call, c);
  while (c.streams != 0 && std::popcount(c.streams) * stream + least > room) c.streams &= c.streams - 1;
  const int streams = std::popcount(c.streams) * stream;
  p.stages = std::min((room - streams) / with.tile_bytes, with.most_stages);
  p.shared_bytes = static_cast<unsigned>(with.lost_bytes + with.own_bytes + streams + p.stages * with.tile_bytes);
  return p;
}

tensor_map map_of_rows(const kernel& with, const batched_rows& of, bool is_bf16) {
  return describe_tensor(
      with, {of.data,
             is_bf16,
             {of.head_dim, of.rows, broadcast_size(of.query_heads, of.query_head_stride),
              broadcast_size(of.inner, of.inner_stride), broadcast_size(of.outer, of.outer_stride)},
             {of.row_stride, stride_of(of.query_head_stride), stride_of(of.inner_stride), stride_of(of.outer_stride)},
             {64, kWarpgroupRows, 1, 1, 1}});
}
tensor_map map_of_keys(const kernel& with, const batched_rows& of, bool is_bf16, const tiles_plan& p) {
  const int beside = p.owns_keys ? 2 : kTileLanes;
  return describe_tensor(
      with, {of.data,
             is_bf16,
             {of.head_dim, beside, of.rows / beside, broadcast_size(of.inner, of.inner_stride),
              broadcast_size(of.outer, of.outer_stride)},
             {of.row_stride, beside * of.row_stride, stride_of(of.inner_stride), stride_of(of.outer_stride)},
             {64, p.owns_keys ? 1u : 2u, static_cast<unsigned>(p.owns_keys ? 8 : p.tile / 8), 1, 1}});
}

batch_steps steps_of(const batched_rows& of) {
  return {of.outer_stride != 0, of.inner_stride != 0, of.query_head_stride != 0};
}

void append_attention(std::string& packed, const kernel& with, const attention_call& call, const tiles_plan& p) {
  const bool is_bf16 = call.behind.x == dtype::bf16;
  const attention_arguments a{.queries = map_of_rows(with, call.queries, is_bf16),
                              .keys = map_of_keys(with, call.keys, is_bf16, p),
                              .values = map_of_keys(with, call.values.data ? call.values : call.keys, is_bf16, p),
                              .step_queries = steps_of(call.queries),
                              .step_keys = steps_of(call.keys),
                              .step_values = steps_of(call.values),
                              .inner = static_cast<int>(call.queries.inner),
                              .query_heads = static_cast<int>(call.queries.query_heads),
                              .rows = static_cast<int>(call.queries.rows),
                              .blocks = static_cast<int>(p.blocks),
                              .y = call.y,
                              .value_head_dim = call.values.head_dim,
                              .behind = {}};
  append_between(packed, &a, &a.behind);
  append_packed(packed, call.behind, call.a_behind);
  constexpr std::size_t kAlignment = alignof(tensor_map);
  packed.resize((packed.size() + kAlignment - 1) / kAlignment * kAlignment);
}

std::string tiles_source(const attention_call& call, const tiles_plan& p, const std::string& header,
                         const std::string& more, const std::string& arguments, const std::string& function) {
  const auto number = number_field;
  return heading(call.behind, "attention/" + header) + "using line_behind = " + call.behind.line +
         ";\nstruct config_behind {\n" + fields(call.behind, p.behind) + "};\nstruct config {\n" +
         type_field("kX", call.behind.x) + number("kWarpgroups", p.warpgroups) + number("kTile", p.tile) +
         number("kSteps", static_cast<int>(ceil_div(call.queries.head_dim, 16))) +
         number("kAtoms", atoms_of(call.queries.head_dim)) + number("kValueAtoms", atoms_of(call.values.head_dim)) +
         number("kStages", p.stages) + number("kCausal", p.causal) + more + "  using behind = config_behind;\n};\n" +
         kernel_text(function, "config, line_behind",
                     bounds(static_cast<int>(p.threads), p.blocks_per_sm, p.cluster > 1 ? p.cluster : 0), arguments) +
         "ONEPASS_END\n";
}

}  // namespace onepass::cuda
