// Backward of lines with `scores`, softmax and `values` in two kernels of tiles: where they serve, and their launch.
#include "src/cuda/attention/backward_sm90.h"

#include <algorithm>

#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/runtime/packed_arguments.h"
#include "src/cuda/runtime/source.h"
#include "src/cuda/attention/tuning.h"
#include "src/plan/contraction.h"

namespace onepass::cuda {
namespace {

constexpr attention_gradients_tuning kTuned{};

const kernel& kernel_for(const attention_gradients_call& call, gradients_of which, const tiles_plan& p, int device,
                         void* stream) {
  static known_kernels known;
  const attention_call& of = call.of;
  const kernel_key key(device, which, of.behind.line, of.behind.x, of.behind.operand, of.behind.wants_tensor, p.behind,
                       p.groups, p.tile, p.stages, ceil_div(of.queries.depth, 16), ceil_div(of.values.depth, 16),
                       p.causal, of.queries.rows % p.tile == 0, call.queries != nullptr, call.keys != nullptr,
                       call.values != nullptr);
  return known.find_or_build(key, [&]() -> const kernel& {
    return load(source(call, which, p), device, stream,
                facts(device).arch_name + " attention backward " + of.behind.line);
  });
}

int all_panels(const attention_call& of) { return panels_of(of.queries.depth) + panels_of(of.values.depth); }
bool one_sum_at_a_time(const attention_call& of) { return all_panels(of) > kTuned.panels; }

// How much is under way at a time (see the kernel): what registers have room for.
int ahead_of(const attention_gradients_call& call, bool for_keys) {
  if (one_sum_at_a_time(call.of)) return 0;
  const bool deep = all_panels(call.of) > 2;
  if (for_keys) return deep ? kTuned.ahead_of_deep_for_keys : kTuned.ahead_for_keys;
  return deep ? kTuned.ahead_of_deep : kTuned.ahead;
}

}  // namespace

std::string why_not_attention_gradients(int64 depth, int64 value_depth) {
  if (std::max(depth, value_depth) > kTuned.depth)
    return "it is for rows of at most " + std::to_string(kTuned.depth) + " numbers";
  return "";
}

std::vector<gradients_launch> launches_of(const attention_gradients_call& call) {
  std::vector<gradients_launch> launches{{gradients_of::queries, call}};
  const auto add = [&](void* keys, void* values) {
    if (keys == nullptr && values == nullptr) return;
    launches.push_back({gradients_of::keys, call});
    launches.back().call.keys = keys, launches.back().call.values = values;
  };
  if (one_sum_at_a_time(call.of)) add(call.keys, nullptr), add(nullptr, call.values);
  else add(call.keys, call.values);
  return launches;
}

bool fits(const attention_gradients_call& call) { return fits(call.of) && fits(call.gradients); }

tiles_plan plan_attention_gradients(const attention_gradients_call& call, gradients_of which,
                                    const device_facts& chip) {
  const attention_call& of = call.of;
  const bool for_keys = which == gradients_of::keys;
  const bool deep = one_sum_at_a_time(of);
  const int panels = all_panels(of), groups = kTuned.groups;
  const int least_stages = deep ? 1 : 3;  // two tiles are being multiplied while one comes
  const int tile_bytes = panels * kAtomBytes + (for_keys ? kWarpgroupRows * int{sizeof(softmax_statistics)} : 0);
  tiles_plan p = plan_score_tiles(of, groups, kWarpgroupRows, for_keys,
                                  {groups * panels * kAtomBytes, tile_bytes, least_stages, kTuned.stages, 2}, chip);
  if (!for_keys && of.behind.wants_tensor != 0) p.causal = false;  // gradients of what is hidden are written too
  p.blocks = ceil_div(for_keys ? of.keys.rows : of.queries.rows, int64{groups} * kWarpgroupRows);
  p.grid = static_cast<unsigned>(of.queries.outer * of.queries.inner * (for_keys ? 1 : of.queries.group) * p.blocks);
  return p;
}

std::string source(const attention_gradients_call& call, gradients_of which, const tiles_plan& p) {
  const bool for_keys = which == gradients_of::keys;
  const std::string more = number_field("kValueSteps", static_cast<int>(ceil_div(call.of.values.depth, 16))) +
                           number_field("kAhead", ahead_of(call, for_keys)) + number_field("kStatistics", for_keys) +
                           number_field("kWholeRows", call.of.queries.rows % p.tile == 0) +
                           number_field("kWantsRows", call.queries != nullptr) +
                           number_field("kWantsKeys", call.keys != nullptr) +
                           number_field("kWantsValues", call.values != nullptr);
  return tiles_source(call.of, p, "backward_sm90", more, "attention_backward_arguments",
                      for_keys ? "attention_backward_keys_sm90" : "attention_backward_queries_sm90");
}

void launch_attention_gradients(const attention_gradients_call& all, int device, void* stream) {
  for (const auto& [which, call] : launches_of(all)) {
    const tiles_plan p = plan_attention_gradients(call, which, facts(device));
    const kernel& built = kernel_for(call, which, p, device, stream);
    const attention_backward_arguments a{
        .gradients = map_of_rows(built, call.gradients, call.of.behind.x == dtype::bf16),
        .step_gradients = steps_of(call.gradients),
        .result = call.result,
        .statistics = call.statistics,
        .rows_gradient = call.queries,
        .keys_gradient = call.keys,
        .values_gradient = call.values,
        .depth = call.of.queries.depth,
        .of = {}};
    std::string packed;
    append_between(packed, &a, &a.of);
    append_attention(packed, built, call.of, p);
    launch(built, {p.grid, 1}, {p.threads, 1}, p.shared_bytes, true, stream, packed.data());
  }
}

}  // namespace onepass::cuda
