// Launcher of register-resident softmax: when it can take a call, its predicted time, plan, source and launch.
#include "src/cuda/attention/probabilities_sm90.h"

#include <algorithm>
#include <bit>

#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/runtime/source.h"
#include "src/cuda/attention/tuning.h"

namespace onepass::cuda {
namespace {

constexpr probabilities_sm90_tuning kTuned{};
constexpr int kLeastStages = 2;
constexpr int kReserved = 1024;  // bytes of shared memory that the system has in every block

// How the keys of a row are distributed: over the warpgroups of a block, and over the blocks of a cluster.
struct key_split {
  int warpgroups, tile, blocks_per_sm, cluster;
};
key_split share(const probabilities_block& with, int64 keys) {
  const int warpgroups =
      keys <= with.warpgroups * with.tile ? 1 : with.warpgroups;  // several warpgroups exchange through a cluster
  return {warpgroups, with.tile, with.warpgroups_per_sm / warpgroups,
          static_cast<int>(std::bit_ceil(static_cast<uint64>(ceil_div(keys, warpgroups * with.tile))))};
}
// masks: operands that are key-padding masks.
bool is_light(const request& behind, int64 keys, int masks) {
  return behind.operands == masks && behind.flops <= kTuned.light_flops &&
         (masks == 0 || keys <= int64{kTuned.light.tile} * kTuned.cluster);
}
key_split share(const request& behind, int64 keys, int masks) {
  if (is_light(behind, keys, masks)) return share(kTuned.light, keys);
  const key_split any = share(kTuned.any, keys);
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
  return is_light(call.behind, call.keys.rows, std::popcount(masks)) ? masks : 0;
}

}  // namespace

int count_key_masks(const attention_call& call) { return std::popcount(key_masks(call)); }

std::string why_not_probabilities_sm90(const request& behind, int64 head_dim, int64 keys, bool causal,
                                       const device_facts& chip, int key_masks) {
  if (causal) return "causal lines skip masked tiles in another kernel";
  const int most = is_light(behind, keys, key_masks) ? kTuned.head_dim_of_light : kTuned.head_dim;
  if (head_dim > most) return "it is for a head_dim of at most " + std::to_string(most);
  const int blocks = head_dim > kTuned.head_dim ? kTuned.cluster_of_large_head_dim : kTuned.cluster;
  if (share(behind, keys, key_masks).cluster > std::min(chip.cluster, blocks))
    return "a cluster has no room for a row of scores";
  return "";
}

double seconds_of_probabilities_sm90(const request& behind, int64 matrices, int64 rows, int64 head_dim, int64 keys,
                                     int64 tensors, const device_facts& chip, int key_masks) {
  const key_split how = share(behind, keys, key_masks);
  if (is_light(behind, keys, key_masks)) tensors -= key_masks;
  const int64 columns = int64{how.warpgroups} * how.tile * how.cluster;  // of the whole cluster, with or without keys
  const auto scores = static_cast<double>(matrices * ceil_div(rows, kWarpgroupRows) * kWarpgroupRows * columns),
             places = static_cast<double>(chip.sm_count * how.blocks_per_sm) / how.cluster;
  const double each = kTuned.score + kTuned.score_element * static_cast<double>(head_dim) +
                      kTuned.score_tensor * static_cast<double>(tensors);
  return scores * each + static_cast<double>(matrices) / places * kTuned.start;
}

tiles_plan plan_probabilities_sm90(const attention_call& call, const device_facts& chip) {
  const uint64 masks = key_masks(call);
  const key_split how = share(call.behind, call.keys.rows, std::popcount(masks));
  const int atoms = atoms_of(call.queries.head_dim);
  const auto plan_with = [&](int blocks_per_sm) {
    device_facts part = chip;
    part.shared_per_block = (chip.shared_per_block + kReserved) / blocks_per_sm - kReserved;
    const probabilities_shape shape{atoms, how.warpgroups, how.tile, how.cluster, masks != 0};
    const tiles_room room{.own_bytes = shape.block_bytes(),
                          .tile_bytes = tile_bytes(atoms, kWarpgroupRows),
                          .least_stages = kLeastStages,
                          .most_stages = kTuned.stages,
                          .lost_bytes = 0};
    tiles_plan p = plan_tiles(call, how.warpgroups, how.tile, false, room, part);
    p.blocks_per_sm = blocks_per_sm;
    return p;
  };
  tiles_plan p = plan_with(how.blocks_per_sm);
  for (int blocks = how.blocks_per_sm - 1; blocks > 0 && p.stages < kLeastStages; --blocks) p = plan_with(blocks);
  p.cluster = how.cluster, p.key_masks = masks;
  p.threads = static_cast<unsigned>(how.warpgroups * kWarpgroupThreads);
  p.behind.threads = static_cast<int>(p.threads);
  p.behind.exact = call.keys.rows == int64{how.warpgroups} * how.tile * how.cluster;
  const int64 matrices = call.queries.outer * call.queries.inner * call.queries.query_heads,
              row_tiles = ceil_div(call.queries.rows, kWarpgroupRows),
              clusters = std::max(chip.sm_count * p.blocks_per_sm / how.cluster, 1);
  p.blocks = ceil_div(row_tiles, std::clamp<int64>(matrices * row_tiles / (clusters * kTuned.waves), 1, row_tiles));
  p.blocks = ceil_div(row_tiles, ceil_div(row_tiles, p.blocks));  // no cluster without row tiles
  p.grid = static_cast<unsigned>(matrices * p.blocks * how.cluster);
  return p;
}

std::string probabilities_sm90_source(const attention_call& call, const tiles_plan& p) {
  return tiles_source(call, p, "probabilities_sm90",
                      number_field("kCluster", p.cluster) + number_field("kKeyMasks", static_cast<int>(p.key_masks)),
                      "attention_arguments", "probabilities_forward_sm90");
}

bool launch_probabilities_sm90(const attention_call& call, int device, void* stream) {
  const device_facts& chip = facts(device);
  if (!why_not_probabilities_sm90(call.behind, call.queries.head_dim, call.keys.rows, call.causal, chip,
                                  count_key_masks(call))
           .empty())
    return false;
  const tiles_plan p = plan_probabilities_sm90(call, chip);
  static known_kernels known;
  const kernel_key key(device, call.behind.line, call.behind.x, call.behind.operand, p.behind, p.warpgroups, p.tile,
                       p.stages, p.cluster, p.blocks_per_sm, ceil_div(call.queries.head_dim, 16), call.causal,
                       p.key_masks);
  const kernel& built = known.find_or_build(key, [&]() -> const kernel& {
    return load(probabilities_sm90_source(call, p), device, stream,
                chip.arch_name + " probabilities sm90 " + call.behind.line);
  });
  if (p.cluster > kPortableCluster && active_clusters(built, p.cluster, p.threads, p.shared_bytes) == 0) return false;
  std::string packed;
  append_attention(packed, built, call, p);
  launch(built, {p.grid, 1}, {p.threads, 1}, p.shared_bytes, true, stream, packed.data());
  return true;
}

}  // namespace onepass::cuda
