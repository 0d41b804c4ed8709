// Lines that begin with `scores` in one kernel of tiles: where it serves, and its launch.
#include "src/cuda/attention/forward_sm90.h"

#include <algorithm>

#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/runtime/source.h"
#include "src/cuda/attention/tuning.h"
#include "src/plan/contraction.h"

namespace onepass::cuda {
namespace {

// Without values a warpgroup has room for less.
int groups_of(int panels, int value_panels) {
  return value_panels == 0 && panels <= 2 ? kAttentionTuning.groups_of_scores : kAttentionTuning.groups;
}

}  // namespace

std::string why_not_attention(const spec::line& behind, int64 depth, int64 value_depth, int64 keys, dtype type,
                              const device_facts& chip) {
  if (!spec::has_softmax(behind)) return "it is for lines with softmax";
  if (behind.keeps > 0) return "values cannot be kept";
  if (value_depth > 0 && !spec::is_linear(behind)) return "behind softmax it is for words that multiply";
  if (chip.arch != 90) return "its kernel is for compute capability 9.0";
  if (size_of(type) != 2) return "it is for bfloat16 and float16";
  if (depth % kTileLanes != 0 || value_depth % kTileLanes != 0 || keys % kTileLanes != 0 || depth == 0)
    return "rows, and the number of keys, must be multiples of 8";
  if (depth > kAttentionTuning.depth || value_depth > kAttentionTuning.depth)
    return "it is for rows of at most " + std::to_string(kAttentionTuning.depth) + " numbers";
  return "";
}

int rows_of_attention(int64 depth, int64 value_depth) {
  return groups_of(panels_of(depth), panels_of(value_depth)) * kWarpgroupRows;
}

tiles_plan plan_attention(const attention_call& call, const device_facts& chip) {
  const int panels = panels_of(call.queries.depth), value_panels = panels_of(call.values.depth),
            most = std::max(panels, value_panels), groups = groups_of(panels, value_panels),
            keys = most > 2 ? kAttentionTuning.keys_of_deep : kAttentionTuning.keys;
  const auto plan_with = [&](int stream_stages) {
    const tiles_room room{groups * most * kAtomBytes, keys * (panels + value_panels) * 128, 1, kAttentionTuning.stages,
                          stream_stages};
    return plan_score_tiles(call, groups, keys, false, room, chip);
  };
  tiles_plan p = plan_with(value_panels == 0 ? kAttentionTuning.stream_stages_of_scores : 1);
  if (p.stages == 1) p = plan_with(1);  // tiles of keys first
  p.blocks = ceil_div(call.queries.rows, int64{groups} * kWarpgroupRows);
  p.grid = static_cast<unsigned>(call.queries.outer * call.queries.inner * call.queries.group * p.blocks);
  return p;
}

std::string source(const attention_call& call, const tiles_plan& p) {
  return tiles_source(call, p, "forward_sm90", "", "attention_arguments", "attention_forward");
}

void launch_attention(const attention_call& call, int device, void* stream) {
  const device_facts& chip = facts(device);
  const tiles_plan p = plan_attention(call, chip);
  static known_kernels known;
  const kernel_key key(device, call.behind.line, call.behind.x, call.behind.operand, p.behind, p.groups, p.tile,
                       p.stages, ceil_div(call.queries.depth, 16), panels_of(call.values.depth), call.causal);
  const kernel& built = known.find_or_build(key, [&]() -> const kernel& {
    return load(source(call, p), device, stream, chip.arch_name + " attention " + call.behind.line);
  });
  std::string packed;
  append_attention(packed, built, call, p);
  launch(built, {p.grid, 1}, {p.threads, 1}, p.shared_bytes, true, stream, packed.data());
}

}  // namespace onepass::cuda
