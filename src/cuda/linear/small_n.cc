// A line with `linear` of few features in one kernel (onepass/kernel/linear/small_n.cuda.h): where it serves, and its
// launches.
#include "src/cuda/linear/small_n.h"

#include <algorithm>

#include "src/cuda/row/group.h"
#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/runtime/packed_arguments.h"
#include "src/cuda/runtime/source.h"

namespace onepass::cuda {
namespace {

// The words behind have the threads of the rows.
few_features_plan behind_rows(const plan& rows, const configuration& behind) {
  few_features_plan p{rows, behind};
  configuration& c = p.behind;
  c.vector_size = c.access = 1;
  c.aligned_operand = 0, c.staged = 0, c.spare_vectors = 0;
  c.across = p.rows.with.across, c.down = p.rows.with.down, c.one_part = p.rows.with.one_part;
  c.held_vectors = c.sums_in_registers = 1;
  return p;
}

bool is_one_kernel(const std::vector<plan>& plans) { return plans.size() == 1 && plans.front().with.cluster == 1; }

const kernel& find_or_build(const few_features_call& call, const few_features_plan& p, int device, void* stream) {
  const request &before = call.before, &behind = call.behind;
  static known_kernels known;
  const kernel_key key(device, before.line, before.x, before.operand, before.backward, before.wants_column,
                       before.wants_tensor, before.wants_dx, p.rows.with, behind.line, behind.x, behind.operand,
                       behind.wants_column, behind.wants_tensor, behind.wants_dx, p.behind);
  return known.find_or_build(key, [&]() -> const kernel& {
    return load(source(call, p), device, stream,
                label(before, p.rows.with, facts(device).arch_name) + " few features " + behind.line);
  });
}

void start(const kernel& built, const few_features_plan& p, void* stream, const std::string& packed) {
  const auto threads = static_cast<unsigned>(p.rows.with.across * p.rows.with.down);
  launch(built, {p.rows.grid_x, p.rows.grid_y}, {threads, 1}, p.rows.shared_bytes, false, stream, packed.data());
}

}  // namespace

std::string why_not_few_features(const request& before, const arguments& a, const device_facts& chip) {
  return is_one_kernel(choose(before, a, chip)) ? "" : "rows are too long for a block";
}

std::string why_not_few_features(const spec::line& line, int64 columns, dtype type, const device_facts& chip) {
  constexpr std::uintptr_t kAddress = std::uintptr_t{1} << 20;
  for (const bool backward : {false, true}) {
    for (const int offset : {0, size_of(type)}) {
      constexpr int64 kRows = 16384;
      const view rows{
          reinterpret_cast<void*>(kAddress + static_cast<std::uintptr_t>(offset)), {0, 0, 0, columns}, type, 1};
      arguments a{};
      a.rows = a.size[kMaxDims - 1] = kRows, a.columns = columns;
      a.size[0] = a.size[1] = a.size[2] = 1;
      a.x = rows;
      request r(line, backward);
      r.x = type;
      for (int i = 0; i < line.operands; ++i) {
        const bool is_column = line.operand_word(i).about->operand == operand_kind::column;
        r.operand[i] = type;
        a.operand[i] = is_column ? view{rows.data, {}, type, 1} : rows;
        if (!backward) continue;
        (is_column ? r.wants_column : r.wants_tensor) |= uint64{1} << i;
        if (!is_column) a.operand_gradient[i] = rows;
      }
      for (int k = 0; k < line.keeps; ++k) (backward ? a.kept_gradient : a.kept)[k] = rows;
      if (backward) a.dx = rows, r.wants_dx = true;
      if (std::string why_not = why_not_few_features(r, a, chip); !why_not.empty()) return why_not;
    }
  }
  return "";
}

few_features_plan plan_few_features(const few_features_call& call, const device_facts& chip) {
  return behind_rows(choose(call.before, call.a_before, chip).front(), describe(call.behind, call.a_behind));
}

std::string source(const few_features_call& call, const few_features_plan& p) {
  const request &before = call.before, &behind = call.behind;
  const bool finer = result_bits(before) >= result_bits(behind);
  const std::string function = std::string("few_features_") + (before.backward ? "backward" : "forward");
  return heading(finer ? widest(before, behind) : widest(behind, before), "linear/small_n") +
         "using line_before = " + before.line + ";\nusing line_behind = " + behind.line +
         ";\nstruct config_before {\n" + fields(before, p.rows.with) + "};\nstruct config_behind {\n" +
         fields(behind, p.behind) +
         "};\nstruct config {\n  using before = config_before;\n  using behind = config_behind;\n};\n" +
         kernel_text(p.rows.with, function, "config, line_before, line_behind", "few_features_arguments",
                     "blockIdx.x") +
         "ONEPASS_END\n";
}

void launch(const few_features_call& call, const few_features_plan& p, int device, void* stream) {
  std::string packed;
  const request both = widest(call.before, call.behind);
  append_packed(packed, both, call.a_before), append_packed(packed, both, call.a_behind);
  start(find_or_build(call, p, device, stream), p, stream, packed);
}

std::vector<few_features_batch> batches(const request& before, const request& behind,
                                        const std::vector<few_features_member>& all, const device_facts& chip) {
  std::string packed;
  append_packed(packed, widest(before, behind), arguments{});
  const int64 most = chip.parameter_bytes / (2 * static_cast<int64>(packed.size()));
  std::vector<arguments*> befores, behinds;
  for (const few_features_member& m : all) befores.push_back(m.before), behinds.push_back(m.behind);
  lay_out_single_rows(befores), lay_out_single_rows(behinds);
  std::vector<configuration> described, described_behind;
  std::vector<std::string> keys;
  for (const few_features_member& m : all) {
    described.push_back(describe(before, *m.before)), described_behind.push_back(describe(behind, *m.behind));
    keys.push_back(key_of(described.back()) + key_of(described_behind.back()));
  }
  std::vector<few_features_batch> result;
  for (std::vector<int>& group : alike(keys, most)) {
    const auto first = static_cast<std::size_t>(group.front());
    configuration c = described[first], c_behind = described_behind[first];
    std::vector<const arguments*> some;
    some.reserve(group.size());
    for (const int i : group) some.push_back(all[static_cast<std::size_t>(i)].before);
    arguments a = *longest(some);
    a.rows = 0;
    for (const int i : group) {
      const auto at = static_cast<std::size_t>(i);
      a.rows += all[at].before->rows;
      c.small &= described[at].small, c_behind.small &= described_behind[at].small;
    }
    c.members = c_behind.members = room_for_members(group.size(), most);
    const std::vector<plan> rows = choose(before, a, chip, c);
    if (!is_one_kernel(rows)) return {};
    few_features_plan p = behind_rows(rows.front(), c_behind);
    std::vector<int64> steps;
    steps.reserve(group.size());
    for (const int i : group)
      steps.push_back(ceil_div(all[static_cast<std::size_t>(i)].before->rows, p.rows.with.down));
    const std::vector<unsigned> blocks = share(steps, p.rows.grid_x, (1LL << 31) - 1);
    p.rows.grid_x = 0;
    for (std::size_t i = 0; i < group.size(); ++i) {
      const few_features_member& m = all[static_cast<std::size_t>(group[i])];
      m.before->first_block = m.behind->first_block = p.rows.grid_x;
      m.before->blocks = m.behind->blocks = blocks[i];
      p.rows.grid_x += blocks[i];
    }
    result.push_back({std::move(group), p});
  }
  return result;
}

void launch(const request& before, const request& behind, const few_features_batch& of,
            const std::vector<few_features_member>& all, int device, void* stream) {
  std::string packed;
  const request both = widest(before, behind);
  const auto add = [&](const arguments& a_before, const arguments& a_behind) {
    append_packed(packed, both, a_before), append_packed(packed, both, a_behind);
  };
  for (const int i : of.members) {
    const few_features_member& m = all[static_cast<std::size_t>(i)];
    add(*m.before, *m.behind);
  }
  const arguments none = no_member();
  for (auto i = static_cast<int64>(of.members.size()); i < of.plan.rows.with.members; ++i) add(none, none);
  const few_features_member& first = all[static_cast<std::size_t>(of.members.front())];
  const few_features_call call{before, *first.before, behind, *first.behind};
  start(find_or_build(call, of.plan, device, stream), of.plan, stream, packed);
}

}  // namespace onepass::cuda
