// Launcher of forward on sm_90a: when it can take a call, its plan, source and launch.
#include "src/cuda/attention/forward_sm90.h"

#include <algorithm>

#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/runtime/source.h"
#include "src/cuda/attention/tuning.h"
#include "src/plan/contraction.h"

namespace onepass::cuda {
namespace {

// Without values three warpgroups fit, since none has accumulators of P·V.
int warpgroups_of(int atoms, int value_atoms) {
  return value_atoms == 0 && atoms <= 2 ? kForwardSm90Tuning.warpgroups_of_probabilities
                                        : kForwardSm90Tuning.warpgroups;
}

}  // namespace

std::string why_not_forward_sm90(const spec::line& behind, int64 head_dim, int64 value_head_dim, int64 keys, dtype type,
                                 const device_facts& chip) {
  if (!spec::has_softmax(behind)) return "it is for lines with softmax";
  if (behind.keeps > 0) return "values cannot be kept";
  if (value_head_dim > 0 && !spec::is_linear(behind)) return "behind softmax it is for words that multiply";
  if (chip.arch != 90) return "its kernel is for compute capability 9.0";
  if (size_of(type) != 2) return "it is for bfloat16 and float16";
  if (head_dim % kTileLanes != 0 || value_head_dim % kTileLanes != 0 || keys % kTileLanes != 0 || head_dim == 0)
    return "head_dim and the number of keys must be multiples of 8";
  if (head_dim > kForwardSm90Tuning.head_dim || value_head_dim > kForwardSm90Tuning.head_dim)
    return "it is for a head_dim of at most " + std::to_string(kForwardSm90Tuning.head_dim);
  return "";
}

int block_rows_sm90(int64 head_dim, int64 value_head_dim) {
  return warpgroups_of(atoms_of(head_dim), atoms_of(value_head_dim)) * kWarpgroupRows;
}

tiles_plan plan_forward_sm90(const attention_call& call, const device_facts& chip) {
  const int atoms = atoms_of(call.queries.head_dim), value_atoms = atoms_of(call.values.head_dim),
            most = std::max(atoms, value_atoms), warpgroups = warpgroups_of(atoms, value_atoms),
            keys = most > 2 ? kForwardSm90Tuning.keys_of_large_head_dim : kForwardSm90Tuning.keys;
  const auto plan_with = [&](int stream_stages) {
    const tiles_room room{warpgroups * most * kAtomBytes, keys * (atoms + value_atoms) * 128, 1,
                          kForwardSm90Tuning.stages, stream_stages};
    return plan_tiles(call, warpgroups, keys, false, room, chip);
  };
  tiles_plan p = plan_with(value_atoms == 0 ? kForwardSm90Tuning.stream_stages_of_scores : 1);
  if (p.stages == 1) p = plan_with(1);  // a second stage of keys is worth more
  p.blocks = ceil_div(call.queries.rows, int64{warpgroups} * kWarpgroupRows);
  p.grid = static_cast<unsigned>(call.queries.outer * call.queries.inner * call.queries.query_heads * p.blocks);
  return p;
}

std::string source(const attention_call& call, const tiles_plan& p) {
  return tiles_source(call, p, "forward_sm90", "", "attention_arguments", "attention_forward_sm90");
}

void launch_forward_sm90(const attention_call& call, int device, void* stream) {
  const device_facts& chip = facts(device);
  const tiles_plan p = plan_forward_sm90(call, chip);
  static known_kernels known;
  const kernel_key key(device, call.behind.line, call.behind.x, call.behind.operand, p.behind, p.warpgroups, p.tile,
                       p.stages, ceil_div(call.queries.head_dim, 16), atoms_of(call.values.head_dim), call.causal);
  const kernel& built = known.find_or_build(key, [&]() -> const kernel& {
    return load(source(call, p), device, stream, chip.arch_name + " attention sm90 " + call.behind.line);
  });
  std::string packed;
  append_attention(packed, built, call, p);
  launch(built, {p.grid, 1}, {p.threads, 1}, p.shared_bytes, true, stream, packed.data());
}

}  // namespace onepass::cuda
