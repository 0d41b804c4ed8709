// Backward of lines with `scores`, softmax and `values` in two kernels of tiles: where they serve, and their launch.
#include "src/cuda/attention_gradients.h"

#include <algorithm>
#include <cstddef>

#include "src/cuda/known_kernels.h"
#include "src/cuda/packed_arguments.h"
#include "src/cuda/source.h"
#include "src/cuda/tuning.h"
#include "src/spec/contraction.h"

namespace onepass::cuda {
namespace {

constexpr attention_gradients_tuning kTuned{};
constexpr int kLeastStages = 2;  // a tile comes while products with the one before are under way

const kernel& kernel_for(const attention_gradients_call& call, gradients_of which, const tiles_plan& p, int device,
                         void* stream) {
  static known_kernels known;
  const attention_call& of = call.of;
  const kernel_key key(device, which, of.behind.line, of.behind.x, of.behind.operand, of.behind.wants_tensor, p.behind,
                       p.groups, p.keys, p.stages, ceil_div(of.queries.depth, 16), ceil_div(of.values.depth, 16),
                       of.causal, call.queries != nullptr, call.keys != nullptr, call.values != nullptr);
  return known.find_or_build(key, [&]() -> const kernel& {
    return load(source(call, which, p), kKernelName, device, stream,
                facts(device).arch_name + " attention backward " + of.behind.line);
  });
}

}  // namespace

std::string why_not_attention_gradients(const spec::line& behind, int64 depth, int64 value_depth) {
  if (!spec::leaves_zeros(behind)) return "behind softmax it is for words that multiply";
  if (std::max(depth, value_depth) > kTuned.depth)
    return "it is for rows of at most " + std::to_string(kTuned.depth) + " numbers";
  return "";
}

bool fits(const attention_gradients_call& call) { return fits(call.of) && fits(call.gradients); }

tiles_plan plan_attention_gradients(const attention_gradients_call& call, gradients_of which,
                                    const device_facts& chip) {
  const attention_call& of = call.of;
  const int panels = panels_of(of.queries.depth) + panels_of(of.values.depth);
  if (which == gradients_of::queries) {
    const int groups = kTuned.groups_for_queries, keys = panels > 2 ? kTuned.keys_of_deep : kTuned.keys;
    tiles_plan p = plan_score_tiles(
        of, groups, keys, {groups * panels * kPanelBytes, keys * panels * 128, kLeastStages, kTuned.stages}, chip);
    p.blocks = ceil_div(of.queries.rows, int64{groups} * kGroupRows);
    p.grid = static_cast<unsigned>(of.queries.outer * of.queries.inner * of.queries.group * p.blocks);
    return p;
  }
  const int groups = panels > 2 ? kTuned.groups_of_deep_for_keys : kTuned.groups_for_keys, keys = kGroupRows;
  tiles_plan p = plan_score_tiles(
      of, groups, keys,
      {groups * (panels + kTuned.handed) * kPanelBytes, kGroupRows * panels * 128, kLeastStages, kTuned.stages}, chip);
  p.behind.exact = of.keys.rows % (int64{groups} * keys) == 0;
  p.blocks = ceil_div(of.keys.rows, int64{groups} * keys);
  p.grid = static_cast<unsigned>(of.queries.outer * of.queries.inner * p.blocks);
  return p;
}

std::string source(const attention_gradients_call& call, gradients_of which, const tiles_plan& p) {
  const bool for_keys = which == gradients_of::keys;
  const std::string more =
      number_field("kValueSteps", static_cast<int>(ceil_div(call.of.values.depth, 16))) +
      number_field("kHanded", for_keys ? kTuned.handed : 0) + number_field("kWantsRows", call.queries != nullptr) +
      number_field("kWantsKeys", call.keys != nullptr) + number_field("kWantsValues", call.values != nullptr);
  return tiles_source(call.of, p, "attention_gradients", more, "attention_gradient_arguments",
                      for_keys ? "gradients_of_keys" : "gradients_of_queries");
}

void launch_attention_gradients(const attention_gradients_call& call, int device, void* stream) {
  struct alignas(tensor_map) head_of {  // attention_gradient_arguments, but for the last
    tensor_map gradients;
    batch_steps step_gradients;
    const void* result;
    float* products;
    void *rows_gradient, *keys_gradient, *values_gradient;
    int64 depth;
  };
  const auto launch_one = [&](gradients_of which) {
    const tiles_plan p = plan_attention_gradients(call, which, facts(device));
    const kernel& built = kernel_for(call, which, p, device, stream);
    const head_of head{map_of_rows(built, call.gradients, call.of.behind.x == dtype::bf16),
                       batch_steps(call.gradients),
                       call.result,
                       call.products,
                       call.queries,
                       call.keys,
                       call.values,
                       call.of.queries.depth};
    std::string packed;
    append_value(packed, head);
    append_attention(packed, built, call.of, p);
    launch(built, {p.grid, 1}, {p.threads, 1}, p.shared_bytes, true, stream, packed.data());
  };
  launch_one(gradients_of::queries);
  if (call.keys || call.values) launch_one(gradients_of::keys);
}

}  // namespace onepass::cuda
