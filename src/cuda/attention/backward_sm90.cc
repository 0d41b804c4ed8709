// Launcher of attention's backward on sm_90a: when it can take a call, its plan, source and launch.
#include "src/cuda/attention/backward.h"

#include <algorithm>

#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/runtime/packed_arguments.h"
#include "src/cuda/runtime/source.h"
#include "src/cuda/attention/tuning.h"
#include "src/plan/contraction.h"

namespace onepass::cuda {
namespace {

constexpr backward_sm90_tuning kTuned{};

const kernel& kernel_for(const backward_sm90_call& call, backward_kernel which, const tiles_plan& p, int device,
                         void* stream) {
  static known_kernels known;
  const attention_call& of = call.forward;
  const kernel_key key(device, which, of.behind.line, of.behind.x, of.behind.operand, of.behind.wants_tensor, p.behind,
                       p.warpgroups, p.tile, p.stages, ceil_div(of.queries.head_dim, 16),
                       ceil_div(of.values.head_dim, 16), p.causal, of.queries.rows % p.tile == 0,
                       call.grad_queries.data != nullptr, call.grad_keys.data != nullptr,
                       call.grad_values.data != nullptr);
  return known.find_or_build(key, [&]() -> const kernel& {
    return load(source(call, which, p), device, stream,
                facts(device).arch_name + " attention backward " + of.behind.line);
  });
}

int all_atoms(const attention_call& of) { return atoms_of(of.queries.head_dim) + atoms_of(of.values.head_dim); }
bool one_sum_at_a_time(const attention_call& of) { return all_atoms(of) > kTuned.atoms; }

// The kernel's kAhead: how far GEMMs overlap, as registers allow.
int ahead_of(const backward_sm90_call& call, bool for_keys) {
  if (one_sum_at_a_time(call.forward)) return 0;
  const bool large = all_atoms(call.forward) > 2;
  if (for_keys) return large ? kTuned.ahead_of_large_head_dim_for_keys : kTuned.ahead_for_keys;
  return large ? kTuned.ahead_of_large_head_dim : kTuned.ahead;
}

}  // namespace

std::string why_not_backward_sm90(int64 head_dim, int64 value_head_dim) {
  if (std::max(head_dim, value_head_dim) > kTuned.head_dim)
    return "it is for a head_dim of at most " + std::to_string(kTuned.head_dim);
  return "";
}

std::vector<backward_launch> backward_launches(const backward_sm90_call& call) {
  std::vector<backward_launch> launches{{backward_kernel::queries, call}};
  const auto add = [&](const strided_matrices& keys, const strided_matrices& values) {
    if (keys.data == nullptr && values.data == nullptr) return;
    launches.push_back({backward_kernel::keys, call});
    launches.back().call.grad_keys = keys, launches.back().call.grad_values = values;
  };
  if (one_sum_at_a_time(call.forward)) add(call.grad_keys, {}), add({}, call.grad_values);
  else add(call.grad_keys, call.grad_values);
  return launches;
}

bool fits(const backward_sm90_call& call) { return fits(call.forward) && fits(call.grad_output); }

tiles_plan plan_backward_sm90(const backward_sm90_call& call, backward_kernel which, const device_facts& chip) {
  const attention_call& of = call.forward;
  const bool for_keys = which == backward_kernel::keys;
  const bool large = one_sum_at_a_time(of);
  const int atoms = all_atoms(of), warpgroups = kTuned.warpgroups;
  const int least_stages = large ? 1 : 3;  // two tiles are in GEMMs while one is loaded
  const int tile_bytes = atoms * kAtomBytes + (for_keys ? kWarpgroupRows * int{sizeof(softmax_statistics)} : 0);
  tiles_plan p = plan_tiles(of, warpgroups, kWarpgroupRows, for_keys,
                            {warpgroups * atoms * kAtomBytes, tile_bytes, least_stages, kTuned.stages, 2}, chip);
  if (!for_keys && of.behind.wants_tensor != 0) p.causal = false;  // masked scores' gradients are written too
  p.blocks = ceil_div(for_keys ? of.keys.rows : of.queries.rows, int64{warpgroups} * kWarpgroupRows);
  p.grid =
      static_cast<unsigned>(of.queries.outer * of.queries.inner * (for_keys ? 1 : of.queries.query_heads) * p.blocks);
  return p;
}

std::string source(const backward_sm90_call& call, backward_kernel which, const tiles_plan& p) {
  const bool for_keys = which == backward_kernel::keys;
  const std::string more = number_field("kValueSteps", static_cast<int>(ceil_div(call.forward.values.head_dim, 16))) +
                           number_field("kAhead", ahead_of(call, for_keys)) + number_field("kStatistics", for_keys) +
                           number_field("kWholeRows", call.forward.queries.rows % p.tile == 0) +
                           number_field("kWantsQueries", call.grad_queries.data != nullptr) +
                           number_field("kWantsKeys", call.grad_keys.data != nullptr) +
                           number_field("kWantsValues", call.grad_values.data != nullptr);
  return tiles_source(call.forward, p, "backward_sm90", more, "attention_backward_arguments",
                      for_keys ? "attention_backward_keys_sm90" : "attention_backward_queries_sm90");
}

void launch_backward_sm90(const backward_sm90_call& all, int device, void* stream) {
  for (const auto& [which, call] : backward_launches(all)) {
    const tiles_plan p = plan_backward_sm90(call, which, facts(device));
    const kernel& built = kernel_for(call, which, p, device, stream);
    const attention_backward_arguments a{
        .grad_output = map_of_rows(built, call.grad_output, call.forward.behind.x == dtype::bf16),
        .step_grad_output = steps_of(call.grad_output),
        .output = call.output,
        .statistics = call.statistics,
        .grad_queries = call.grad_queries,
        .grad_keys = call.grad_keys,
        .grad_values = call.grad_values,
        .head_dim = call.forward.queries.head_dim,
        .forward = {}};
    std::string packed;
    append_between(packed, &a, &a.forward);
    append_attention(packed, built, call.forward, p);
    launch(built, {p.grid, 1}, {p.threads, 1}, p.shared_bytes, true, stream, packed.data());
  }
}

}  // namespace onepass::cuda
