// Register-resident softmax without values: where it serves, and its launch.
#include "src/cuda/attention/probabilities_sm90.h"

#include <algorithm>
#include <bit>

#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/runtime/source.h"
#include "src/cuda/attention/tuning.h"

namespace onepass::cuda {
namespace {

constexpr held_scores_tuning kTuned{};
constexpr int kLeastStages = 2;
constexpr int kReserved = 1024;  // of shared memory, for the system, in every block

// How a block shares the keys of a row, and how many blocks do.
struct sharing {
  int groups, tile, blocks_per_sm, cluster;
};
sharing share(const held_tuning& with, int64 keys) {
  const int groups = keys <= with.groups * with.tile ? 1 : with.groups;  // several groups exchange through a cluster
  return {groups, with.tile, with.groups_per_sm / groups,
          static_cast<int>(std::bit_ceil(static_cast<uint64>(ceil_div(keys, groups * with.tile))))};
}
// masks: operands that leave keys out.
bool is_easy(const request& behind, int64 keys, int masks) {
  return behind.operands == masks && behind.flops <= kTuned.easy_flops &&
         (masks == 0 || keys <= int64{kTuned.easy.tile} * kTuned.cluster);
}
sharing share(const request& behind, int64 keys, int masks) {
  if (is_easy(behind, keys, masks)) return share(kTuned.easy, keys);
  const sharing any = share(kTuned.any, keys);
  return any.cluster > kPortableCluster ? share(kTuned.long_rows, keys) : any;
}

// Key-padding masks (bool, broadcast over queries), as operand bits. None if other operands exist: the words apply the
// mask anyway then, in less time than an MMA k-step.
uint64 key_masks(const attention_call& call) {
  uint64 masks = 0;
  for (const int i : call.leading_masks) {
    if (call.behind.operand[i] != dtype::boolean) break;
    masks |= shared_operands(call.a_behind) & uint64{1} << i;
  }
  return is_easy(call.behind, call.keys.rows, std::popcount(masks)) ? masks : 0;
}

}  // namespace

int count_key_masks(const attention_call& call) { return std::popcount(key_masks(call)); }

std::string why_not_held(const request& behind, int64 depth, int64 keys, bool causal, const device_facts& chip,
                         int key_masks) {
  if (causal) return "what no row needs is left out elsewhere";
  const int most = is_easy(behind, keys, key_masks) ? kTuned.depth_of_easy : kTuned.depth;
  if (depth > most) return "it is for rows of at most " + std::to_string(most) + " numbers";
  const int blocks = depth > kTuned.depth ? kTuned.cluster_of_deep : kTuned.cluster;
  if (share(behind, keys, key_masks).cluster > std::min(chip.cluster, blocks))
    return "a cluster has no room for a row of scores";
  return "";
}

double seconds_of_held(const request& behind, int64 matrices, int64 rows, int64 depth, int64 keys, int64 tensors,
                       const device_facts& chip, int key_masks) {
  const sharing how = share(behind, keys, key_masks);
  if (is_easy(behind, keys, key_masks)) tensors -= key_masks;
  const int64 held = int64{how.groups} * how.tile * how.cluster;  // whole strips, with or without keys
  const auto scores = static_cast<double>(matrices * ceil_div(rows, kWarpgroupRows) * kWarpgroupRows * held),
             places = static_cast<double>(chip.sm_count * how.blocks_per_sm) / how.cluster;
  const double each = kTuned.score + kTuned.score_depth * static_cast<double>(depth) +
                      kTuned.score_tensor * static_cast<double>(tensors);
  return scores * each + static_cast<double>(matrices) / places * kTuned.start;
}

tiles_plan plan_held_scores(const attention_call& call, const device_facts& chip) {
  const uint64 masks = key_masks(call);
  const sharing how = share(call.behind, call.keys.rows, std::popcount(masks));
  const int panels = panels_of(call.queries.depth);
  const auto plan_with = [&](int blocks_per_sm) {
    device_facts part = chip;
    part.shared_per_block = (chip.shared_per_block + kReserved) / blocks_per_sm - kReserved;
    const probabilities_shape shape{panels, how.groups, how.tile, how.cluster, masks != 0};
    const tiles_room room{.own_bytes = shape.block_bytes(),
                          .tile_bytes = tile_bytes(panels, kWarpgroupRows),
                          .least_stages = kLeastStages,
                          .most_stages = kTuned.stages,
                          .lost_bytes = 0};
    tiles_plan p = plan_score_tiles(call, how.groups, how.tile, false, room, part);
    p.blocks_per_sm = blocks_per_sm;
    return p;
  };
  tiles_plan p = plan_with(how.blocks_per_sm);
  for (int blocks = how.blocks_per_sm - 1; blocks > 0 && p.stages < kLeastStages; --blocks) p = plan_with(blocks);
  p.cluster = how.cluster, p.key_masks = masks;
  p.threads = static_cast<unsigned>(how.groups * kWarpgroupThreads);
  p.behind.threads = static_cast<int>(p.threads);
  p.behind.exact = call.keys.rows == int64{how.groups} * how.tile * how.cluster;
  const int64 matrices = call.queries.outer * call.queries.inner * call.queries.group,
              strips = ceil_div(call.queries.rows, kWarpgroupRows),
              clusters = std::max(chip.sm_count * p.blocks_per_sm / how.cluster, 1);
  p.blocks = ceil_div(strips, std::clamp<int64>(matrices * strips / (clusters * kTuned.turns), 1, strips));
  p.blocks = ceil_div(strips, ceil_div(strips, p.blocks));  // none without strips
  p.grid = static_cast<unsigned>(matrices * p.blocks * how.cluster);
  return p;
}

std::string held_source(const attention_call& call, const tiles_plan& p) {
  return tiles_source(call, p, "probabilities_sm90",
                      number_field("kCluster", p.cluster) + number_field("kKeyMasks", static_cast<int>(p.key_masks)),
                      "attention_arguments", "probabilities_forward_sm90");
}

bool launch_held_scores(const attention_call& call, int device, void* stream) {
  const device_facts& chip = facts(device);
  if (!why_not_held(call.behind, call.queries.depth, call.keys.rows, call.causal, chip, count_key_masks(call)).empty())
    return false;
  const tiles_plan p = plan_held_scores(call, chip);
  static known_kernels known;
  const kernel_key key(device, call.behind.line, call.behind.x, call.behind.operand, p.behind, p.groups, p.tile,
                       p.stages, p.cluster, p.blocks_per_sm, ceil_div(call.queries.depth, 16), call.causal,
                       p.key_masks);
  const kernel& built = known.find_or_build(key, [&]() -> const kernel& {
    return load(held_source(call, p), device, stream, chip.arch_name + " held scores " + call.behind.line);
  });
  if (p.cluster > kPortableCluster && active_clusters(built, p.cluster, p.threads, p.shared_bytes) == 0) return false;
  std::string packed;
  append_attention(packed, built, call, p);
  launch(built, {p.grid, 1}, {p.threads, 1}, p.shared_bytes, true, stream, packed.data());
  return true;
}

}  // namespace onepass::cuda
