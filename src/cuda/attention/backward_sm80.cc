// Launcher of attention's backward by warp-level mma: when it can take a call, its plan, source and launch.
#include "src/cuda/attention/backward.h"

#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/runtime/packed_arguments.h"
#include "src/cuda/attention/forward_sm80.h"
#include "src/cuda/runtime/source.h"
#include "src/cuda/attention/tuning.h"

namespace onepass::cuda {
namespace {

constexpr int kTileRows = attention_backward_sm80_shape::kTileRows;

int64 batches_of(const backward_sm80_call& call) { return call.keys.outer * call.keys.inner; }

attention_backward_sm80_shape shape_of(int64 head_dim, int64 value_head_dim) {
  return {static_cast<int>(chunks_of(head_dim)), static_cast<int>(chunks_of(value_head_dim))};
}

}  // namespace

std::string why_not_backward_sm80(const spec::contraction& of, int64 head_dim, int64 value_head_dim, dtype type,
                                  const device_facts& chip) {
  if (std::max(head_dim, value_head_dim) > kBackwardSm80Tuning.head_dim)
    return "it is for a head_dim of at most " + std::to_string(kBackwardSm80Tuning.head_dim);
  if (shape_of(head_dim, value_head_dim).shared_bytes(true) > chip.shared_per_block)
    return "shared memory has no room for its tiles";
  return why_not_attention_sm80(of, head_dim, value_head_dim, type, chip);
}

bool fits(const backward_sm80_call& call) {
  const int64 head_dim = call.keys.head_dim, value_head_dim = call.values.head_dim;
  return fits(call.keys) && fits(call.values) && is_aligned(call.queries, head_dim) &&
         is_aligned(call.grad_output, value_head_dim);
}

backward_sm80_plan plan_backward_sm80(const backward_sm80_call& call, backward_kernel which) {
  const bool for_keys = which == backward_kernel::keys;
  backward_sm80_plan p{};
  p.behind = describe(call.behind, call.a_behind);
  describe_words(p.behind, attention_backward_sm80_shape::kThreads, call.keys.rows, kTileRows);
  // Gradients of the words' tensors are written for masked scores too.
  p.causal = call.causal && (for_keys || call.behind.wants_tensor == 0);
  p.threads = attention_backward_sm80_shape::kThreads;
  p.shared_bytes = static_cast<unsigned>(shape_of(call.keys.head_dim, call.values.head_dim).shared_bytes(for_keys));
  p.blocks_of_batch = ceil_div(for_keys ? call.keys.rows : call.rows_of_batch, kTileRows);
  p.grid = static_cast<unsigned>(batches_of(call) * p.blocks_of_batch);
  return p;
}

std::string source(const backward_sm80_call& call, backward_kernel which, const backward_sm80_plan& p) {
  const auto number = [](const char* name, int64 value) { return number_field(name, static_cast<int>(value)); };
  return heading(call.behind, "attention/backward_sm80") + "using line_behind = " + call.behind.line +
         ";\nstruct config_behind {\n" + fields(call.behind, p.behind) + "};\nstruct config {\n" +
         type_field("kX", call.behind.x) + number("kThreads", p.threads) +
         number("kChunks", chunks_of(call.keys.head_dim)) + number("kValueChunks", chunks_of(call.values.head_dim)) +
         number("kCausal", p.causal) + number("kWantsQueries", call.grad_queries.data != nullptr) +
         number("kWantsKeys", call.grad_keys.data != nullptr) +
         number("kWantsValues", call.grad_values.data != nullptr) + "  using behind = config_behind;\n};\n" +
         kernel_text(
             which == backward_kernel::keys ? "attention_backward_keys_sm80" : "attention_backward_queries_sm80",
             "config, line_behind", bounds(static_cast<int>(p.threads), 1), "attention_backward_sm80_arguments") +
         "ONEPASS_END\n";
}

void launch_backward_sm80(const backward_sm80_call& call, int device, void* stream) {
  static known_kernels known;
  const device_facts& chip = facts(device);
  for (const backward_kernel which : {backward_kernel::queries, backward_kernel::keys}) {
    if (which == backward_kernel::keys && call.grad_keys.data == nullptr && call.grad_values.data == nullptr) return;
    const backward_sm80_plan p = plan_backward_sm80(call, which);
    const kernel_key key(device, which, call.behind.line, call.behind.x, call.behind.operand, call.behind.wants_tensor,
                         p.behind, p.causal, chunks_of(call.keys.head_dim), chunks_of(call.values.head_dim),
                         call.grad_queries.data != nullptr, call.grad_keys.data != nullptr,
                         call.grad_values.data != nullptr);
    const kernel& built = known.find_or_build(key, [&]() -> const kernel& {
      return load(source(call, which, p), device, stream,
                  chip.arch_name + " attention backward sm80 " + call.behind.line);
    });
    const attention_backward_sm80_arguments a{.queries = call.queries,
                                              .grad_output = call.grad_output,
                                              .statistics = call.statistics,
                                              .keys = matrices_of(call.keys),
                                              .values = matrices_of(call.values),
                                              .output = call.output,
                                              .grad_queries = call.grad_queries,
                                              .grad_keys = call.grad_keys,
                                              .grad_values = call.grad_values,
                                              .inner = call.keys.inner,
                                              .head_dim = call.keys.head_dim,
                                              .value_head_dim = call.values.head_dim,
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
