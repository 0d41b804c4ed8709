// Lines with `linear` in one kernel whose warps multiply (mma): what small_m and small_k share.
#include "src/cuda/linear/warp_gemm.h"

#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/runtime/packed_arguments.h"
#include "src/cuda/runtime/source.h"

namespace onepass::cuda {

bool fits(const warp_linear_call& call) {
  return call.before.row_words <= 1 && is_aligned(call.matrix, call.matrix_stride) &&
         describe(call.behind, call.a_behind).access == kTileLanes &&
         describe(call.before, call.a_before).access == kTileLanes;
}

void describe_rows(const warp_linear_call& call, int threads_of_row, warp_linear_plan& p) {
  p.behind = describe(call.behind, call.a_behind);
  p.behind.threads = static_cast<int>(p.threads);
  p.before = describe(call.before, call.a_before);
  p.before.across = threads_of_row;
  p.before.down = static_cast<int>(p.threads) / threads_of_row;
  const int64 each = int64{threads_of_row} * kTileLanes;
  p.before.held_vectors = static_cast<int>(ceil_div(call.k, each));
  p.before.exact = call.k % each == 0;
  p.before.whole_vectors = static_cast<int>(call.k / each);
}

int pitch_of(int64 k) { return static_cast<int>(ceil_div(k, 64) * 128 + 64); }

std::string source(const warp_linear_call& call, const warp_linear_plan& p, const std::string& header,
                   const std::string& function, const std::string& of_before, const std::string& of_all) {
  return heading(widest(call.behind, call.before), "linear/" + header) + "using line_before = " + call.before.line +
         ";\nusing line_behind = " + call.behind.line + ";\nstruct config_before {\n" + fields(call.before, p.before) +
         of_before + "};\nstruct config_behind {\n" + fields(call.behind, p.behind) + "};\nstruct config {\n" +
         type_field("kX", call.behind.x) + of_all +
         "  using before = config_before;\n  using behind = config_behind;\n};\n" +
         kernel_text(function, "config, line_before, line_behind", bounds(static_cast<int>(p.threads), 1),
                     "warp_linear_arguments") +
         "ONEPASS_END\n";
}

void launch(const warp_linear_call& call, const warp_linear_plan& p, const std::string& header,
            std::initializer_list<int> members, const std::function<std::string()>& source, int device, void* stream) {
  const device_facts& chip = facts(device);
  const request &before = call.before, &behind = call.behind;
  std::string further;
  for (const int value : members) append_value(further, value);
  static known_kernels known;
  const kernel_key key(device, header, before.line, before.x, before.operand, p.before, behind.line, behind.x,
                       behind.operand, p.behind, further);
  const kernel& built = known.find_or_build(key, [&]() -> const kernel& {
    return load(source(), device, stream, chip.arch_name + " linear " + header + " " + behind.line);
  });
  std::string packed;
  append_value(packed, call.matrix), append_value(packed, call.matrix_stride), append_value(packed, call.k);
  const request both = widest(behind, before);
  append_packed(packed, both, call.a_behind), append_packed(packed, both, call.a_before);
  launch(built, {p.grid, 1}, {p.threads, 1}, p.shared_bytes, chip.arch >= 90, stream, packed.data());
}

}  // namespace onepass::cuda
