// Lines that begin with `scores` in one kernel (onepass/kernel/attention/forward_sm80.cuda.h): where it serves, and its
// launch.
#include "src/cuda/attention/forward_sm80.h"

#include <algorithm>

#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/runtime/packed_arguments.h"
#include "src/cuda/runtime/source.h"
#include "src/cuda/attention/tuning.h"

namespace onepass::cuda {
namespace {

// Rows of a thread: where there is room in its registers, each key that is read serves four.
int rows_of_thread(int64 depth, int64 value_depth = 0) {
  return std::max(depth, value_depth) <= kScoresTuning.depth_of_four ? 4 : 2;
}

int threads_of_block(int64 value_depth) {
  return value_depth > 0 ? kScoresTuning.threads_with_values : kScoresTuning.threads;
}

int tile_of(int64 depth, int64 value_depth = 0) {
  return std::max(depth, value_depth) <= 128 ? kScoresTuning.tile : kScoresTuning.tile_of_deep;
}

// With values of so many numbers, or 0.
scores_plan plan_for(const scores_call& call, int64 value_depth, const device_facts& chip) {
  scores_plan p{};
  p.pitch = pitch_of(call.k);
  p.rows_of_thread = rows_of_thread(call.k, value_depth);
  p.threads = static_cast<unsigned>(threads_of_block(value_depth));
  p.tile = tile_of(call.k, value_depth);
  const int value_pitch = swizzled_pitch(static_cast<int>(pieces_of(value_depth)));
  const auto bytes = [&] { return kScoresTuning.stages * p.tile * (p.pitch + value_pitch); };
  while (p.tile > 32 && bytes() > chip.shared_per_block) p.tile /= 2;
  p.shared_bytes = static_cast<unsigned>(bytes());
  const int most = chip.shared_per_block / static_cast<int>(p.shared_bytes);
  p.blocks_per_sm =
      std::clamp(most, 1, value_depth > 0 ? kScoresTuning.blocks_with_values : kScoresTuning.blocks_per_sm);

  describe_rows(call, kThreadsOfRow, p);
  describe_words(p.behind, static_cast<int>(p.threads), call.a_behind.columns, p.tile);

  const int64 batches = call.outer * call.inner, rows = int64{p.before.down} * p.rows_of_thread;
  p.blocks_of_batch = ceil_div(call.a_behind.rows / batches, rows);
  p.grid = static_cast<unsigned>(batches * p.blocks_of_batch);
  return p;
}

// `more` are members of the kernel's Config.
std::string source_of(const scores_call& call, const scores_plan& p, const std::string& more,
                      const std::string& arguments, const std::string& function) {
  return heading(widest(call.behind, call.before), "attention/forward_sm80") +
         "using line_behind = " + call.behind.line + ";\nstruct config_before {\n" + fields(call.before, p.before) +
         number_field("kAtOnce", p.rows_of_thread) + number_field("kAllExist", 0) + "};\nstruct config_behind {\n" +
         fields(call.behind, p.behind) + "};\nstruct config {\n" + type_field("kX", call.behind.x) +
         number_field("kPitch", p.pitch) + number_field("kThreads", static_cast<int>(p.threads)) +
         number_field("kTile", p.tile) + number_field("kStages", kScoresTuning.stages) + more +
         "  using before = config_before;\n  using behind = config_behind;\n};\n" +
         kernel_text(function, "config, line_behind", bounds(static_cast<int>(p.threads), p.blocks_per_sm), arguments) +
         "ONEPASS_END\n";
}

void append_scores(std::string& packed, const scores_call& call, const scores_plan& p) {
  const probabilities_sm80_arguments a{.keys = call.matrix,
                                       .stride = call.matrix_stride,
                                       .outer_stride = call.outer_stride,
                                       .inner_stride = call.inner_stride,
                                       .inner = call.inner,
                                       .depth = call.k,
                                       .rows_of_batch = call.a_behind.rows / (call.outer * call.inner),
                                       .blocks_of_batch = p.blocks_of_batch,
                                       .behind = {},
                                       .before = {}};
  append_between(packed, &a, &a.behind);
  const request both = widest(call.behind, call.before);
  append_packed(packed, both, call.a_behind), append_packed(packed, both, call.a_before);
}

// With values of so many pieces, or 0; more: what the kernel's argument has behind that of scores.
template <class Call>
void launch_planned(const Call& call, const scores_plan& p, int64 value_pieces, bool causal, const char* name,
                    const std::string& more, int device, void* stream) {
  const device_facts& chip = facts(device);
  const request &before = call.before, &behind = call.behind;
  static known_kernels known;
  const kernel_key key(device, before.x, p.before, behind.line, behind.x, behind.operand, p.behind, p.pitch,
                       p.blocks_per_sm, p.rows_of_thread, p.tile, value_pieces, causal);
  const kernel& built = known.find_or_build(key, [&]() -> const kernel& {
    return load(source(call, p), device, stream, chip.arch_name + name + behind.line);
  });
  std::string packed;
  append_scores(packed, call, p);
  packed += more;
  launch(built, {p.grid, 1}, {p.threads, 1}, p.shared_bytes, chip.arch >= 90, stream, packed.data());
}

}  // namespace

void describe_words(configuration& c, int threads, int64 keys, int tile) {
  c.threads = threads, c.across = kThreadsOfRow, c.down = threads / kThreadsOfRow;
  c.vector_size = kTileLanes, c.staged = 0, c.aligned_operand = 0;
  c.exact = keys % tile == 0;
}

std::string why_not_scores(const spec::contraction& of, int64 depth, dtype type, const device_facts& chip) {
  if (!spec::has_softmax(of.behind)) return "it is for lines with softmax";
  if (chip.arch < 80) return "it needs compute capability 8.0";
  if (size_of(type) != 2) return "it is for bfloat16 and float16";
  if (depth % kTileLanes != 0 || depth == 0) return "rows must be multiples of 8 numbers";
  if (depth > kScoresTuning.depth)
    return "it is for rows of at most " + std::to_string(kScoresTuning.depth) + " numbers";
  return "";
}

int rows_of_block(int64 depth, int64 value_depth) {
  return threads_of_block(value_depth) / kThreadsOfRow * rows_of_thread(depth, value_depth);
}

bool fits(const scores_call& call) {
  const auto aligned = [](int64 stride) { return stride % kTileLanes == 0; };
  return is_aligned(call.matrix, call.matrix_stride) && aligned(call.outer_stride) && aligned(call.inner_stride) &&
         describe(call.before, call.a_before).access == kTileLanes;
}

scores_plan plan_scores(const scores_call& call, const device_facts& chip) { return plan_for(call, 0, chip); }

std::string source(const scores_call& call, const scores_plan& p) {
  return source_of(call, p, "", "probabilities_sm80_arguments", "probabilities_forward_sm80");
}

void launch_scores(const scores_call& call, int device, void* stream) {
  launch_planned(call, plan_scores(call, facts(device)), 0, false, " scores ", "", device, stream);
}

std::string why_not_warp_attention(const spec::contraction& of, int64 depth, int64 value_depth, dtype type,
                                   const device_facts& chip) {
  if (!spec::is_linear(of.behind)) return "behind softmax it is for words that multiply";
  if (value_depth % kTileLanes != 0 || value_depth == 0) return "values' rows must be multiples of 8 numbers";
  if (value_depth > kScoresTuning.depth)
    return "it is for values of at most " + std::to_string(kScoresTuning.depth) + " numbers";
  return why_not_scores(of, depth, type, chip);
}

bool fits(const warp_attention_call& call) {
  return fits(static_cast<const scores_call&>(call)) && is_aligned(call.values, call.value_stride) &&
         call.value_outer_stride % kTileLanes == 0 && call.value_inner_stride % kTileLanes == 0;
}

scores_plan plan_warp_attention(const warp_attention_call& call, const device_facts& chip) {
  return plan_for(call, call.value_depth, chip);
}

std::string source(const warp_attention_call& call, const scores_plan& p) {
  return source_of(call, p,
                   number_field("kValuePieces", static_cast<int>(pieces_of(call.value_depth))) +
                       number_field("kCausal", call.causal),
                   "attention_sm80_arguments", "attention_forward_sm80");
}

void launch_warp_attention(const warp_attention_call& call, int device, void* stream) {
  const attention_sm80_arguments a{.of = {},
                                   .values = call.values,
                                   .stride = call.value_stride,
                                   .outer_stride = call.value_outer_stride,
                                   .inner_stride = call.value_inner_stride,
                                   .value_depth = call.value_depth,
                                   .y = call.y};
  std::string more;
  append_between(more, &a.values, &a + 1);
  launch_planned(call, plan_warp_attention(call, facts(device)), pieces_of(call.value_depth), call.causal,
                 " attention by warps ", more, device, stream);
}

}  // namespace onepass::cuda
