// Launcher of forward by warp-level mma (onepass/kernel/attention/forward_sm80.cuda.h): when it can take a call, its
// plan, source and launch.
#include "src/cuda/attention/forward_sm80.h"

#include <algorithm>

#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/runtime/packed_arguments.h"
#include "src/cuda/runtime/source.h"
#include "src/cuda/attention/tuning.h"

namespace onepass::cuda {
namespace {

// Rows of a thread: four where its registers have room, so that each key that is read serves four rows.
int rows_of_thread(int64 head_dim, int64 value_head_dim = 0) {
  return std::max(head_dim, value_head_dim) <= kForwardSm80Tuning.head_dim_of_four_rows ? 4 : 2;
}

int threads_of_block(int64 value_head_dim) {
  return value_head_dim > 0 ? kForwardSm80Tuning.threads_with_values : kForwardSm80Tuning.threads;
}

int tile_of(int64 head_dim, int64 value_head_dim = 0) {
  return std::max(head_dim, value_head_dim) <= 128 ? kForwardSm80Tuning.tile
                                                   : kForwardSm80Tuning.tile_of_large_head_dim;
}

// value_head_dim 0: without values.
forward_sm80_plan plan_for(const probabilities_sm80_call& call, int64 value_head_dim, const device_facts& chip) {
  forward_sm80_plan p{};
  p.pitch = pitch_of(call.k);
  p.rows_of_thread = rows_of_thread(call.k, value_head_dim);
  p.threads = static_cast<unsigned>(threads_of_block(value_head_dim));
  p.tile = tile_of(call.k, value_head_dim);
  const int value_pitch = swizzled_pitch(static_cast<int>(chunks_of(value_head_dim)));
  const auto bytes = [&] { return kForwardSm80Tuning.stages * p.tile * (p.pitch + value_pitch); };
  while (p.tile > 32 && bytes() > chip.shared_per_block) p.tile /= 2;
  p.shared_bytes = static_cast<unsigned>(bytes());
  const int most = chip.shared_per_block / static_cast<int>(p.shared_bytes);
  p.blocks_per_sm = std::clamp(
      most, 1, value_head_dim > 0 ? kForwardSm80Tuning.blocks_with_values : kForwardSm80Tuning.blocks_per_sm);

  describe_rows(call, kThreadsOfRow, p);
  describe_words(p.behind, static_cast<int>(p.threads), call.a_behind.columns, p.tile);

  const int64 batches = call.outer * call.inner, rows = int64{p.before.down} * p.rows_of_thread;
  p.blocks_of_batch = ceil_div(call.a_behind.rows / batches, rows);
  p.grid = static_cast<unsigned>(batches * p.blocks_of_batch);
  return p;
}

// `more` are members of the kernel's Config.
std::string source_of(const probabilities_sm80_call& call, const forward_sm80_plan& p, const std::string& more,
                      const std::string& arguments, const std::string& function) {
  return heading(widest(call.behind, call.before), "attention/forward_sm80") +
         "using line_behind = " + call.behind.line + ";\nstruct config_before {\n" + fields(call.before, p.before) +
         number_field("kAtOnce", p.rows_of_thread) + number_field("kAllExist", 0) + "};\nstruct config_behind {\n" +
         fields(call.behind, p.behind) + "};\nstruct config {\n" + type_field("kX", call.behind.x) +
         number_field("kPitch", p.pitch) + number_field("kThreads", static_cast<int>(p.threads)) +
         number_field("kTile", p.tile) + number_field("kStages", kForwardSm80Tuning.stages) + more +
         "  using before = config_before;\n  using behind = config_behind;\n};\n" +
         kernel_text(function, "config, line_behind", bounds(static_cast<int>(p.threads), p.blocks_per_sm), arguments) +
         "ONEPASS_END\n";
}

void append_probabilities(std::string& packed, const probabilities_sm80_call& call, const forward_sm80_plan& p) {
  const probabilities_sm80_arguments a{.keys = call.matrix,
                                       .stride = call.matrix_stride,
                                       .outer_stride = call.outer_stride,
                                       .inner_stride = call.inner_stride,
                                       .inner = call.inner,
                                       .head_dim = call.k,
                                       .rows_of_batch = call.a_behind.rows / (call.outer * call.inner),
                                       .blocks_of_batch = p.blocks_of_batch,
                                       .behind = {},
                                       .before = {}};
  append_between(packed, &a, &a.behind);
  const request both = widest(call.behind, call.before);
  append_packed(packed, both, call.a_behind), append_packed(packed, both, call.a_before);
}

// value_chunks 0: without values. more: the kernel's arguments after probabilities_sm80_arguments.
template <class Call>
void launch_planned(const Call& call, const forward_sm80_plan& p, int64 value_chunks, bool causal, const char* name,
                    const std::string& more, int device, void* stream) {
  const device_facts& chip = facts(device);
  const request &before = call.before, &behind = call.behind;
  static known_kernels known;
  const kernel_key key(device, before.x, p.before, behind.line, behind.x, behind.operand, p.behind, p.pitch,
                       p.blocks_per_sm, p.rows_of_thread, p.tile, value_chunks, causal);
  const kernel& built = known.find_or_build(key, [&]() -> const kernel& {
    return load(source(call, p), device, stream, chip.arch_name + name + behind.line);
  });
  std::string packed;
  append_probabilities(packed, call, p);
  packed += more;
  launch(built, {p.grid, 1}, {p.threads, 1}, p.shared_bytes, chip.arch >= 90, stream, packed.data());
}

}  // namespace

void describe_words(configuration& c, int threads, int64 keys, int tile) {
  c.threads = threads, c.across = kThreadsOfRow, c.down = threads / kThreadsOfRow;
  c.vector_size = kTileLanes, c.staged = 0, c.aligned_operand = 0;
  c.exact = keys % tile == 0;
}

std::string why_not_probabilities_sm80(const spec::contraction& of, int64 head_dim, dtype type,
                                       const device_facts& chip) {
  if (!spec::has_softmax(of.behind)) return "it is for lines with softmax";
  if (chip.arch < 80) return "it needs compute capability 8.0";
  if (size_of(type) != 2) return "it is for bfloat16 and float16";
  if (head_dim % kTileLanes != 0 || head_dim == 0) return "head_dim must be a multiple of 8";
  if (head_dim > kForwardSm80Tuning.head_dim)
    return "it is for a head_dim of at most " + std::to_string(kForwardSm80Tuning.head_dim);
  return "";
}

int block_rows_sm80(int64 head_dim, int64 value_head_dim) {
  return threads_of_block(value_head_dim) / kThreadsOfRow * rows_of_thread(head_dim, value_head_dim);
}

bool fits(const probabilities_sm80_call& call) {
  const auto aligned = [](int64 stride) { return stride % kTileLanes == 0; };
  return is_aligned(call.matrix, call.matrix_stride) && aligned(call.outer_stride) && aligned(call.inner_stride) &&
         describe(call.before, call.a_before).access == kTileLanes;
}

forward_sm80_plan plan_probabilities_sm80(const probabilities_sm80_call& call, const device_facts& chip) {
  return plan_for(call, 0, chip);
}

std::string source(const probabilities_sm80_call& call, const forward_sm80_plan& p) {
  return source_of(call, p, "", "probabilities_sm80_arguments", "probabilities_forward_sm80");
}

void launch_probabilities_sm80(const probabilities_sm80_call& call, int device, void* stream) {
  launch_planned(call, plan_probabilities_sm80(call, facts(device)), 0, false, " probabilities sm80 ", "", device,
                 stream);
}

std::string why_not_attention_sm80(const spec::contraction& of, int64 head_dim, int64 value_head_dim, dtype type,
                                   const device_facts& chip) {
  if (!spec::is_linear(of.behind)) return "behind softmax it is for words that multiply";
  if (value_head_dim % kTileLanes != 0 || value_head_dim == 0) return "the values' head_dim must be a multiple of 8";
  if (value_head_dim > kForwardSm80Tuning.head_dim)
    return "it is for a head_dim of values of at most " + std::to_string(kForwardSm80Tuning.head_dim);
  return why_not_probabilities_sm80(of, head_dim, type, chip);
}

bool fits(const attention_sm80_call& call) {
  return fits(static_cast<const probabilities_sm80_call&>(call)) && is_aligned(call.values, call.value_stride) &&
         call.value_outer_stride % kTileLanes == 0 && call.value_inner_stride % kTileLanes == 0;
}

forward_sm80_plan plan_attention_sm80(const attention_sm80_call& call, const device_facts& chip) {
  return plan_for(call, call.value_head_dim, chip);
}

std::string source(const attention_sm80_call& call, const forward_sm80_plan& p) {
  return source_of(call, p,
                   number_field("kValueChunks", static_cast<int>(chunks_of(call.value_head_dim))) +
                       number_field("kCausal", call.causal),
                   "attention_sm80_arguments", "attention_forward_sm80");
}

void launch_attention_sm80(const attention_sm80_call& call, int device, void* stream) {
  const attention_sm80_arguments a{.probabilities = {},
                                   .values = call.values,
                                   .stride = call.value_stride,
                                   .outer_stride = call.value_outer_stride,
                                   .inner_stride = call.value_inner_stride,
                                   .value_head_dim = call.value_head_dim,
                                   .y = call.y};
  std::string more;
  append_between(more, &a.values, &a + 1);
  launch_planned(call, plan_attention_sm80(call, facts(device)), chunks_of(call.value_head_dim), call.causal,
                 " attention sm80 ", more, device, stream);
}

}  // namespace onepass::cuda
