// A line with `linear` of few features in one kernel (onepass/skeleton/few_features.cuda.h): where it serves, and its
// launches.
#include "src/cuda/few_features.h"

#include <algorithm>

#include "src/cuda/known_kernels.h"
#include "src/cuda/linear.h"
#include "src/cuda/packed_arguments.h"
#include "src/cuda/source.h"

namespace onepass::cuda {

std::string why_not_few_features(const request& before, const arguments& a, const device_facts& chip) {
  const std::vector<plan> plans = choose(before, a, chip);
  return plans.size() == 1 && plans.front().with.cluster == 1 ? "" : "rows are too long for a block";
}

few_features_plan plan_few_features(const few_features_call& call, const device_facts& chip) {
  few_features_plan p{};
  p.rows = choose(call.before, call.a_before, chip).front();
  configuration& c = p.behind = describe(call.behind, call.a_behind);
  c.lanes = c.access = 1;
  c.aligned_operand = 0, c.staged = 0, c.spare_lanes = 0;
  c.across = p.rows.with.across, c.down = p.rows.with.down, c.one_part = p.rows.with.one_part;
  c.held_lanes = c.sums_in_registers = 1;
  return p;
}

std::string source(const few_features_call& call, const few_features_plan& p) {
  const request &before = call.before, &behind = call.behind;
  const bool finer = result_bits(before) >= result_bits(behind);
  return heading(finer ? widest(before, behind) : widest(behind, before), "few_features") +
         "using line_before = " + before.line + ";\nusing line_behind = " + behind.line +
         ";\nstruct config_before {\n" + fields(before, p.rows.with) + "};\nstruct config_behind {\n" +
         fields(behind, p.behind) +
         "};\nstruct config {\n  using before = config_before;\n  using behind = config_behind;\n};\nextern \"C\" "
         "__global__ void __launch_bounds__(" +
         std::to_string(p.rows.with.across * p.rows.with.down) + ", " +
         std::to_string(std::max(p.rows.with.blocks_per_sm, 1)) + ") " + kKernelName +
         "(const __grid_constant__ few_features_arguments a) {\n  few_features_" +
         (before.backward ? "backward" : "forward") + "<config, line_before, line_behind>(a);\n}\nONEPASS_END\n";
}

void launch(const few_features_call& call, const few_features_plan& p, int device, void* stream) {
  const request &before = call.before, &behind = call.behind;
  static known_kernels known;
  const kernel_key key(device, before.line, before.x, before.operand, before.backward, before.wants_column,
                       before.wants_tensor, before.wants_dx, p.rows.with, behind.line, behind.x, behind.operand,
                       behind.wants_column, behind.wants_tensor, behind.wants_dx, p.behind);
  const kernel& built = known.find_or_build(key, [&]() -> const kernel& {
    return load(source(call, p), kKernelName, device, stream,
                label(before, p.rows.with, facts(device).arch_name) + " few features " + behind.line);
  });
  std::string packed;
  const request both = widest(before, behind);
  append_packed(packed, both, call.a_before), append_packed(packed, both, call.a_behind);
  const auto threads = static_cast<unsigned>(p.rows.with.across * p.rows.with.down);
  launch(built, {p.rows.grid_x, p.rows.grid_y}, {threads, 1}, p.rows.shared_bytes, false, stream, packed.data());
}

}  // namespace onepass::cuda
