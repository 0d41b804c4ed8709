// `linear` with few out_features in one kernel (onepass/kernel/linear/small_n.cuda.h): when it serves, and its
// launches.
#include "src/cuda/linear/small_n.h"

#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/runtime/packed_arguments.h"
#include "src/cuda/runtime/source.h"

namespace onepass::cuda {
namespace {

// The epilogue runs in the threads of the rows.
small_n_plan behind_rows(const plan& rows, const configuration& behind) {
  small_n_plan p{rows, behind};
  configuration& c = p.behind;
  c.vector_size = c.access = 1;
  c.aligned_operand = 0, c.staged = 0, c.spare_vectors = 0;
  c.across = p.rows.with.across, c.down = p.rows.with.down, c.one_part = p.rows.with.one_part;
  c.held_vectors = c.sums_in_registers = 1;
  return p;
}

bool is_one_kernel(const std::vector<plan>& plans) { return plans.size() == 1 && plans.front().with.cluster == 1; }

const kernel& find_or_build(const small_n_call& call, const small_n_plan& p, int device, void* stream) {
  const request &before = call.before, &behind = call.behind;
  static known_kernels known;
  const kernel_key key(device, before.line, before.x, before.operand, before.backward, before.wants_column,
                       before.wants_tensor, before.wants_dx, p.rows.with, behind.line, behind.x, behind.operand,
                       behind.wants_column, behind.wants_tensor, behind.wants_dx, p.behind);
  return known.find_or_build(key, [&]() -> const kernel& {
    return load(source(call, p), device, stream,
                label(before, p.rows.with, facts(device).arch_name) + " small_n " + behind.line);
  });
}

}  // namespace

std::string why_not_small_n(const request& before, const arguments& a, const device_facts& chip) {
  return is_one_kernel(choose(before, a, chip)) ? "" : "rows are too long for a block";
}

small_n_plan plan_small_n(const small_n_call& call, const device_facts& chip) {
  return behind_rows(choose(call.before, call.a_before, chip).front(), describe(call.behind, call.a_behind));
}

std::string source(const small_n_call& call, const small_n_plan& p) {
  const request &before = call.before, &behind = call.behind;
  const bool before_is_finer = result_bits(before) >= result_bits(behind);
  const std::string function = std::string("small_n_") + (before.backward ? "backward" : "forward");
  return heading(before_is_finer ? widest(before, behind) : widest(behind, before), "linear/small_n") +
         "using line_before = " + before.line + ";\nusing line_behind = " + behind.line +
         ";\nstruct config_before {\n" + fields(before, p.rows.with) + "};\nstruct config_behind {\n" +
         fields(behind, p.behind) +
         "};\nstruct config {\n  using before = config_before;\n  using behind = config_behind;\n};\n" +
         kernel_text(function, "config, line_before, line_behind", bounds(p.rows.with), "small_n_arguments") +
         "ONEPASS_END\n";
}

void launch(const small_n_call& call, const small_n_plan& p, int device, void* stream) {
  std::string packed;
  const request both = widest(call.before, call.behind);
  append_packed(packed, both, call.a_before), append_packed(packed, both, call.a_behind);
  const auto threads = static_cast<unsigned>(p.rows.with.across * p.rows.with.down);
  launch(find_or_build(call, p, device, stream), {p.rows.grid_x, p.rows.grid_y}, {threads, 1}, p.rows.shared_bytes,
         false, stream, packed.data());
}

}  // namespace onepass::cuda
