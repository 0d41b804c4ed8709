// Lines that begin with `scores` in one kernel of tiles: where it serves, and its launch.
#include "src/cuda/attention.h"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "src/cuda/known_kernels.h"
#include "src/cuda/linear.h"
#include "src/cuda/packed_arguments.h"
#include "src/cuda/source.h"
#include "src/cuda/tuning.h"
#include "src/spec/contraction.h"

namespace onepass::cuda {
namespace {

constexpr int kGroupRows = 64, kGroupThreads = 128;  // as in the skeleton

int panels_of(int64 depth) { return static_cast<int>(ceil_div(depth, 64)); }

// Without values a warpgroup has room for less.
int groups_of(int panels, int value_panels) {
  return value_panels == 0 && panels <= 2 ? kAttentionTuning.groups_of_scores : kAttentionTuning.groups;
}

bool fits(const batched_rows& of) {
  const int64 strides = of.outer_stride | of.inner_stride | of.group_stride | of.row_stride;
  return is_aligned(of.data, strides);
}

// A dimension along which the rows are the same has one place.
int64 places(int64 size, int64 stride) { return stride == 0 ? 1 : size; }
int64 stride_of(int64 stride) { return stride == 0 ? kTileLanes : stride; }

tensor_map map_of_queries(const kernel& with, const batched_rows& of, bool is_bf16) {
  return describe_tensor(
      with, {of.data,
             is_bf16,
             {of.depth, of.rows, places(of.group, of.group_stride), places(of.inner, of.inner_stride),
              places(of.outer, of.outer_stride)},
             {of.row_stride, stride_of(of.group_stride), stride_of(of.inner_stride), stride_of(of.outer_stride)},
             {64, kGroupRows, 1, 1, 1}});
}
tensor_map map_of_keys(const kernel& with, const batched_rows& of, bool is_bf16, int keys) {
  return describe_tensor(
      with, {of.data,
             is_bf16,
             {of.depth, kTileLanes, of.rows / kTileLanes, places(of.inner, of.inner_stride),
              places(of.outer, of.outer_stride)},
             {of.row_stride, kTileLanes * of.row_stride, stride_of(of.inner_stride), stride_of(of.outer_stride)},
             {64, 2, static_cast<unsigned>(keys / 8), 1, 1}});
}

// Tensors that words before softmax take, in lanes of at most 16 bytes (bits, as place.cuda.h counts them).
uint64 streams_of(const attention_call& call, const configuration& c) {
  uint64 streams = 0;
  for (const int i : call.brought) {
    const dtype type = call.behind.operand[i];
    const bool suits = size_of(type) == 2 || type == dtype::boolean;
    if (suits && !(c.single_operand >> i & 1)) streams |= uint64{4} << i;
  }
  return streams;
}

struct batch_steps {
  int outer, inner, group;
  explicit batch_steps(const batched_rows& of)
      : outer(of.outer_stride != 0), inner(of.inner_stride != 0), group(of.group_stride != 0) {}
};

}  // namespace

std::string why_not_attention(const spec::line& behind, int64 depth, int64 value_depth, int64 keys, dtype type,
                              const device_facts& chip) {
  if (!spec::has_softmax(behind)) return "it is for lines with softmax";
  if (behind.keeps > 0) return "values cannot be kept";
  if (chip.arch != 90) return "its kernel is for compute capability 9.0";
  if (size_of(type) != 2) return "it is for bfloat16 and float16";
  if (depth % kTileLanes != 0 || value_depth % kTileLanes != 0 || keys % kTileLanes != 0 || depth == 0)
    return "rows, and the number of keys, must be multiples of 8";
  if (depth > kAttentionTuning.depth || value_depth > kAttentionTuning.depth)
    return "it is for rows of at most " + std::to_string(kAttentionTuning.depth) + " numbers";
  return "";
}

int rows_of_attention(int64 depth, int64 value_depth) {
  return groups_of(panels_of(depth), panels_of(value_depth)) * kGroupRows;
}

bool fits(const attention_call& call) {
  const bool values = call.values.data == nullptr || fits(call.values);
  return fits(call.queries) && fits(call.keys) && values && call.a_behind.rows < 1 << 30 &&
         describe(call.behind, call.a_behind).access == kTileLanes;
}

attention_plan plan_attention(const attention_call& call, const device_facts& chip) {
  attention_plan p{};
  const int panels = panels_of(call.queries.depth), value_panels = panels_of(call.values.depth);
  const bool deep = std::max(panels, value_panels) > 2;
  p.groups = groups_of(panels, value_panels);
  p.keys = deep ? kAttentionTuning.keys_of_deep : kAttentionTuning.keys;
  p.threads = static_cast<unsigned>((p.groups + 1) * kGroupThreads);
  constexpr int kKept = 2048;  // for alignment and mailboxes
  p.behind = describe(call.behind, call.a_behind);
  p.behind.across = 4, p.behind.down = p.groups * kGroupRows, p.behind.threads = static_cast<int>(p.threads);
  p.behind.held_lanes = p.keys / 32, p.behind.spare_lanes = 4;  // rows differ in their banks
  const int stream = p.behind.down * (4 * p.behind.held_lanes + p.behind.spare_lanes) * 16;
  const int rows = p.groups * kGroupRows * std::max(panels, value_panels) * 128;
  const int stage = p.keys * (panels + value_panels) * 128, room = chip.shared_per_block - kKept - rows;
  p.behind.stages = 1, p.behind.streams = streams_of(call, p.behind);
  while (std::popcount(p.behind.streams) * stream + stage > room) p.behind.streams &= p.behind.streams - 1;
  const int streams = std::popcount(p.behind.streams) * stream;
  p.stages = std::min((room - streams) / stage, kAttentionTuning.stages);
  p.shared_bytes = static_cast<unsigned>(1024 + rows + streams + p.stages * stage);
  p.behind.lanes = kTileLanes, p.behind.staged = 0, p.behind.aligned_operand = 0;
  p.behind.exact = call.keys.rows % p.keys == 0;
  p.blocks = ceil_div(call.queries.rows, int64{p.groups} * kGroupRows);
  p.grid = static_cast<unsigned>(call.queries.outer * call.queries.inner * call.queries.group * p.blocks);
  return p;
}

std::string source(const attention_call& call, const attention_plan& p) {
  const auto number = number_field;
  return heading(call.behind, "attention") + "using line_behind = " + call.behind.line + ";\nstruct config_behind {\n" +
         fields(call.behind, p.behind) + "};\nstruct config {\n" + type_field("kX", call.behind.x) +
         number("kGroups", p.groups) + number("kKeys", p.keys) +
         number("kSteps", static_cast<int>(ceil_div(call.queries.depth, 16))) +
         number("kPanels", panels_of(call.queries.depth)) + number("kValuePanels", panels_of(call.values.depth)) +
         number("kStages", p.stages) + number("kCausal", call.causal) +
         "  using behind = config_behind;\n};\nextern \"C\" __global__ void __launch_bounds__(" +
         std::to_string(p.threads) + ", 1) " + kKernelName +
         "(const __grid_constant__ attention_arguments a) {\n  attention_forward<config, line_behind>(a);\n}\n"
         "ONEPASS_END\n";
}

void launch_attention(const attention_call& call, int device, void* stream) {
  const device_facts& chip = facts(device);
  const attention_plan p = plan_attention(call, chip);
  static known_kernels known;
  const kernel_key key(device, call.behind.line, call.behind.x, call.behind.operand, p.behind, p.groups, p.keys,
                       p.stages, ceil_div(call.queries.depth, 16), panels_of(call.values.depth), call.causal);
  const kernel& built = known.find_or_build(key, [&]() -> const kernel& {
    return load(source(call, p), kKernelName, device, stream, chip.arch_name + " attention " + call.behind.line);
  });
  const bool is_bf16 = call.behind.x == dtype::bf16;
  struct head_of {  // attention_arguments, but for the last
    tensor_map queries, keys, values;
    batch_steps step_queries, step_keys, step_values;
    int inner, group, rows, blocks;
    void* y;
    int64 value_depth;
  };
  const head_of head{map_of_queries(built, call.queries, is_bf16),
                     map_of_keys(built, call.keys, is_bf16, p.keys),
                     map_of_keys(built, call.values.data ? call.values : call.keys, is_bf16, p.keys),
                     batch_steps(call.queries),
                     batch_steps(call.keys),
                     batch_steps(call.values),
                     static_cast<int>(call.queries.inner),
                     static_cast<int>(call.queries.group),
                     static_cast<int>(call.queries.rows),
                     static_cast<int>(p.blocks),
                     call.y,
                     call.values.depth};
  std::string packed;
  append_bytes(packed, &head, offsetof(head_of, value_depth) + sizeof head.value_depth);
  append_packed(packed, call.behind, call.a_behind);
  constexpr std::size_t kAlignment = alignof(tensor_map);  // the kernel's argument ends at a multiple of it
  packed.resize((packed.size() + kAlignment - 1) / kAlignment * kAlignment);
  launch(built, {p.grid, 1}, {p.threads, 1}, p.shared_bytes, true, stream, packed.data());
}

}  // namespace onepass::cuda
