// Backward of lines with `scores`, softmax and `values` in kernels of warps: where they serve, and their launch.
#include "src/cuda/attention/backward_sm80.h"

#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/runtime/packed_arguments.h"
#include "src/cuda/attention/forward_sm80.h"
#include "src/cuda/runtime/source.h"
#include "src/cuda/attention/tuning.h"

namespace onepass::cuda {
namespace {

constexpr int kTileRows = attention_backward_sm80_shape::kTileRows;

int64 batches_of(const warp_gradients_call& call) { return call.keys.outer * call.keys.inner; }

attention_backward_sm80_shape shape_of(int64 depth, int64 value_depth) {
  return {static_cast<int>(pieces_of(depth)), static_cast<int>(pieces_of(value_depth))};
}

}  // namespace

std::string why_not_warp_gradients(const spec::contraction& of, int64 depth, int64 value_depth, dtype type,
                                   const device_facts& chip) {
  if (std::max(depth, value_depth) > kWarpGradientsTuning.depth)
    return "it is for rows of at most " + std::to_string(kWarpGradientsTuning.depth) + " numbers";
  if (shape_of(depth, value_depth).shared_bytes(true) > chip.shared_per_block)
    return "shared memory has no room for its tiles";
  return why_not_warp_attention(of, depth, value_depth, type, chip);
}

bool fits(const warp_gradients_call& call) {
  const int64 depth = call.keys.depth, value_depth = call.values.depth;
  return fits(call.keys) && fits(call.values) && is_aligned(call.queries, depth) &&
         is_aligned(call.gradients, value_depth) && is_aligned(call.result, value_depth);
}

warp_gradients_plan plan_warp_gradients(const warp_gradients_call& call, gradients_of which) {
  const bool for_keys = which == gradients_of::keys;
  warp_gradients_plan p{};
  p.behind = describe(call.behind, call.a_behind);
  describe_words(p.behind, attention_backward_sm80_shape::kThreads, call.keys.rows, kTileRows);
  // Gradients of what is hidden are written too.
  p.causal = call.causal && (for_keys || call.behind.wants_tensor == 0);
  p.threads = attention_backward_sm80_shape::kThreads;
  p.shared_bytes = static_cast<unsigned>(shape_of(call.keys.depth, call.values.depth).shared_bytes(for_keys));
  p.blocks_of_batch = ceil_div(for_keys ? call.keys.rows : call.rows_of_batch, kTileRows);
  p.grid = static_cast<unsigned>(batches_of(call) * p.blocks_of_batch);
  return p;
}

std::string source(const warp_gradients_call& call, gradients_of which, const warp_gradients_plan& p) {
  const auto number = [](const char* name, int64 value) { return number_field(name, static_cast<int>(value)); };
  return heading(call.behind, "attention/backward_sm80") + "using line_behind = " + call.behind.line +
         ";\nstruct config_behind {\n" + fields(call.behind, p.behind) + "};\nstruct config {\n" +
         type_field("kX", call.behind.x) + number("kThreads", p.threads) +
         number("kPieces", pieces_of(call.keys.depth)) + number("kValuePieces", pieces_of(call.values.depth)) +
         number("kCausal", p.causal) + number("kWantsRows", call.to_queries != nullptr) +
         number("kWantsKeys", call.to_keys != nullptr) + number("kWantsValues", call.to_values != nullptr) +
         "  using behind = config_behind;\n};\n" +
         kernel_text(which == gradients_of::keys ? "attention_backward_keys_sm80" : "attention_backward_queries_sm80",
                     "config, line_behind", bounds(static_cast<int>(p.threads), 1),
                     "attention_backward_sm80_arguments") +
         "ONEPASS_END\n";
}

void launch_warp_gradients(const warp_gradients_call& call, int device, void* stream) {
  static known_kernels known;
  const device_facts& chip = facts(device);
  for (const gradients_of which : {gradients_of::queries, gradients_of::keys}) {
    if (which == gradients_of::keys && call.to_keys == nullptr && call.to_values == nullptr) return;
    const warp_gradients_plan p = plan_warp_gradients(call, which);
    const kernel_key key(device, which, call.behind.line, call.behind.x, call.behind.operand, call.behind.wants_tensor,
                         p.behind, p.causal, pieces_of(call.keys.depth), pieces_of(call.values.depth),
                         call.to_queries != nullptr, call.to_keys != nullptr, call.to_values != nullptr);
    const kernel& built = known.find_or_build(key, [&]() -> const kernel& {
      return load(source(call, which, p), device, stream,
                  chip.arch_name + " attention backward by warps " + call.behind.line);
    });
    const batched_rows &k = call.keys, &v = call.values;
    const attention_backward_sm80_arguments a{.queries = call.queries,
                                              .gradients = call.gradients,
                                              .result = call.result,
                                              .statistics = call.statistics,
                                              .rows_gradient = call.to_queries,
                                              .keys_gradient = call.to_keys,
                                              .values_gradient = call.to_values,
                                              .keys = {k.data, k.row_stride, k.outer_stride, k.inner_stride},
                                              .values = {v.data, v.row_stride, v.outer_stride, v.inner_stride},
                                              .inner = k.inner,
                                              .depth = k.depth,
                                              .value_depth = v.depth,
                                              .rows_of_batch = call.rows_of_batch,
                                              .blocks_of_batch = p.blocks_of_batch,
                                              .behind = {}};
    std::string packed;
    append_between(packed, &a, &a.behind);
    append_packed(packed, call.behind, call.a_behind);
    launch(built, {p.grid, 1}, {p.threads, 1}, p.shared_bytes, chip.arch >= 90, stream, packed.data());
  }
}

}  // namespace onepass::cuda
