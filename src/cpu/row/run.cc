// Runs a line's kernels on the CPU: finds or compiles them, cuts the work into tasks, and sums column gradients.
#include "src/cpu/row/run.h"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <span>
#include <stdexcept>
#include <unordered_map>

#include "src/compiler.h"
#include "src/cpu/row/reduce.h"
#include "src/cpu/row/table.h"
#include "src/cpu/simd.h"
#include "src/cpu/threads.h"
#include "src/cache/recently_used.h"
#include "src/line/defined.h"
#include "src/plan/plan.h"

namespace onepass::cpu {
namespace {

using kernel_table = std::unordered_map<std::string, cpu_kernels>;

const kernel_table& table() {
  static const kernel_table all = [] {
    require_simd();
    static kernel_table filling;
    fill_table([](const char* structure, const cpu_kernels& kernels) {
      if (kernels.f32.forward != nullptr) filling.emplace(structure, kernels);
    });
    return std::move(filling);
  }();
  return all;
}

// As CMakeLists.txt compiles the table, for this CPU alone.
const std::vector<std::string> kCompilerOptions = {
    "-O2",        "-march=native",     "-ffp-contract=off",         "-fno-math-errno",
    "-Wno-psabi", "-DONEPASS_HIGHWAY", "-DHWY_COMPILE_ONLY_STATIC", "-DHWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_AVX3_DL)"};

constexpr std::size_t kMostCompiled = 512;  // some 50 KB each, and seconds of a compiler's

constexpr int64 kTaskElements = 16384;   // 64 KB of floats: well under a level-two cache, well over a call's cost
constexpr int64 kGrainElements = 16384;  // below this a second thread costs more than it brings
constexpr int64 kPartElements = 32768;   // a part of the column sums: they cost more than a task's start
constexpr int64 kColumnParts = 64;       // enough tasks for the threads, and little to sum afterwards

}  // namespace

bool ahead_of_time(const spec::line& line, std::uint64_t boolean_masks) {
  return table().contains(spec::structure(line, boolean_masks));
}

namespace {

constexpr const char* kHeaders = "#include <hwy/highway.h>\n#include \"onepass/kernel/row/kernels.cpu.h\"\n";

struct compiled_pair {
  const char* name;
  const char* of;  // arguments of pair_of
  cpu_kernel_pair cpu_kernels::*member;
};
constexpr compiled_pair kPairs[] = {
    {"onepass_all_bf16", "float, forward_line, backward_line, dtype::bf16", &cpu_kernels::all_bf16},
    {"onepass_f32", "float, forward_line, backward_line", &cpu_kernels::f32},
    {"onepass_all_f32", "float, forward_line, backward_line, dtype::f32", &cpu_kernels::all_f32},
    {"onepass_f64", "double, forward_line, backward_line", &cpu_kernels::f64}};

// Those that `choose` may choose for x of a dtype; all for none, and for what has no kernels.
std::span<const compiled_pair> pairs_for(dtype x) {
  const std::span<const compiled_pair> all = kPairs;
  if (!is_floating(x)) return all;
  if (x == dtype::f64) return all.subspan(3, 1);
  if (x == dtype::f32) return all.subspan(1, 2);
  return x == dtype::bf16 ? all.subspan(0, 2) : all.subspan(1, 1);
}

// Of some of the pairs, without what users have defined.
std::string plain_source(const spec::line& line, std::uint64_t boolean_masks, std::span<const compiled_pair> pairs) {
  std::string text = std::string(kHeaders) +
                     "ONEPASS_BEGIN\nusing forward_line = " + spec::type_text(line, boolean_masks, false) +
                     ";\nusing backward_line = " + spec::type_text(line, boolean_masks, true) + ";\n";
  for (const compiled_pair& pair : pairs)
    text += std::string("extern \"C\" __attribute__((visibility(\"default\"))) const cpu_kernel_pair ") + pair.name +
            " =\n    pair_of<" + pair.of + ">();\n";
  return text + "ONEPASS_END\n";
}

// The same in as many pieces as there may be compilers at once; none where that is one. A pair takes each as long.
std::vector<std::string> pieces(const spec::line& line, std::uint64_t boolean_masks,
                                std::span<const compiled_pair> pairs) {
  const std::size_t count = std::bit_floor(std::min(compilers_at_once(), pairs.size())), each = pairs.size() / count;
  std::vector<std::string> made;
  for (std::size_t i = 0; count > 1 && i < count; ++i)
    made.push_back(plain_source(line, boolean_masks, pairs.subspan(i * each, each)));
  return made;
}

}  // namespace

std::string source(const spec::line& line, std::uint64_t boolean_masks, dtype x) {
  return spec::with_definitions(plain_source(line, boolean_masks, pairs_for(x)));
}

namespace {

// What was compiled, closed when nobody has it any more, or why that was not to be had.
struct compiled_line {
  std::shared_ptr<const cpu_kernels> kernels;
  std::string why_not = {};
};

std::shared_ptr<const compiled_line> compiled(const spec::line& line, std::uint64_t boolean_masks, dtype x,
                                              const std::string& label) {
  const std::span<const compiled_pair> pairs = pairs_for(x);
  const std::string plain = plain_source(line, boolean_masks, pairs);
  program what{spec::with_definitions(plain), label, kCompilerOptions};
  if (what.source != plain) what.probe = kHeaders;
  else what.pieces = pieces(line, boolean_masks, pairs);
  try {
    void* library = compile_and_open(what);
    const std::shared_ptr<cpu_kernels> kernels(new cpu_kernels{}, [library](const cpu_kernels* all) {
      delete all;
      dlclose(library);
    });
    for (const compiled_pair& pair : pairs)
      (*kernels).*pair.member = *static_cast<const cpu_kernel_pair*>(symbol(library, pair.name));
    if (((*kernels).*pairs.front().member).forward == nullptr)
      throw cannot_compile("this processor has no SIMD instructions that Highway knows");
    return std::make_shared<compiled_line>(compiled_line{kernels});
  } catch (const cannot_compile& e) {
    return std::make_shared<compiled_line>(compiled_line{nullptr, e.what()});
  }
}

std::string label_of(const std::string& structure, dtype x) {
  return x == dtype::none ? structure : structure + ", " + torch_name_of(x);
}

recently_used<const compiled_line>& compiled_lines() {
  static auto* const all = new recently_used<const compiled_line>(kMostCompiled);  // threads may run at the very end
  return *all;
}

}  // namespace

std::shared_ptr<const cpu_kernels> find_kernels(const spec::line& line, std::uint64_t boolean_masks, dtype x) {
  const std::string structure = spec::structure(line, boolean_masks);
  if (const auto found = table().find(structure); found != table().end())
    return {std::shared_ptr<void>(), &found->second};
  for (const dtype of : {x, dtype::none}) {
    const std::shared_ptr<const compiled_line> found = compiled_lines().find(label_of(structure, of));
    if (found && found->kernels) return found->kernels;
  }
  return nullptr;
}

std::shared_ptr<const cpu_kernels> kernels_for(const spec::line& line, std::uint64_t boolean_masks, dtype x) {
  if (std::shared_ptr<const cpu_kernels> there = find_kernels(line, boolean_masks, x)) return there;
  const std::string label = label_of(spec::structure(line, boolean_masks), x);
  std::shared_ptr<const compiled_line> found = compiled_lines().find(label);
  if (!found) found = compiled_lines().keep(label, compiled(line, boolean_masks, x, label));
  if (!found->kernels) throw cannot_compile(found->why_not);
  return found->kernels;
}

// So many tasks of at least `elements` that a few threads get equal shares of a small tensor too.
int64 task_count(int64 all, int64 elements) {
  return static_cast<int64>(std::bit_ceil(static_cast<uint64>((all + elements - 1) / elements)));
}

namespace {

// A task has some rows of one group, or some groups.
int64 partition_groups(row_groups& groups, int64 parts, int64& task_rows) {
  groups.blocks = groups.each = 1;
  if (groups.count < parts) {
    task_rows = (groups.rows + parts / groups.count - 1) / (parts / groups.count);
    groups.blocks = (groups.rows + task_rows - 1) / task_rows;
    return groups.count * groups.blocks;
  }
  groups.each = (groups.count + parts - 1) / parts;
  task_rows = groups.each * groups.rows;
  return (groups.count + groups.each - 1) / groups.each;
}

}  // namespace

int64 partition(arguments& a, bool rowwise) {
  const int64 rows = std::max<int64>(a.rows, 1), columns = std::max<int64>(a.columns, 1);
  if (a.wants_column != 0) {
    a.task_columns = rowwise ? columns : std::min<int64>(columns, 4096);
    const int64 across = (columns + a.task_columns - 1) / a.task_columns,
                tasks = std::min(task_count(rows * columns, kPartElements), kColumnParts),
                parts = (tasks + across - 1) / across;
    if (a.groups.operands != 0) return a.parts = partition_groups(a.groups, parts, a.task_rows);
    a.task_rows = (rows + parts - 1) / parts;
    return a.parts = (rows + a.task_rows - 1) / a.task_rows;
  }
  a.task_columns = rowwise ? columns : std::min(columns, kTaskElements);
  const int64 tasks = task_count(rows * a.task_columns, kTaskElements);
  a.task_rows = (rows + tasks - 1) / tasks;
  return 0;
}

cpu_kernel choose(const cpu_kernels& kernels, const arguments& a, dtype x, bool backward) {
  const auto of = [backward](const cpu_kernel_pair& pair) { return backward ? pair.backward : pair.forward; };
  if (x == dtype::f64) return of(kernels.f64);
  auto all_store = [&a](dtype type) {
    auto fits = [&a, type](const view& v) {
      if (v.data == nullptr) return true;
      if ((a.numbers & 1) != 0 && &v == &a.y) return true;  // numbers are not lanes of rows
      for (int k = 0; k < kMaxKeeps; ++k)
        if ((a.numbers >> (1 + k) & 1) != 0 && (&v == &a.kept[k] || &v == &a.kept_gradient[k])) return true;
      return v.type == type && v.column_stride != 0;
    };
    return fits(a.x) && fits(a.y) && fits(a.dx) && std::all_of(a.operand, a.operand + kMaxOperands, fits) &&
           std::all_of(a.operand_gradient, a.operand_gradient + kMaxOperands, fits) &&
           std::all_of(a.kept, a.kept + kMaxKeeps, fits) &&
           std::all_of(a.kept_gradient, a.kept_gradient + kMaxKeeps, fits);
  };
  if (x == dtype::f32 && all_store(x)) return of(kernels.all_f32);
  if (x == dtype::bf16 && all_store(x)) return of(kernels.all_bf16);
  return of(kernels.f32);
}

void require_targets(const spec::line& of, const arguments& a) {
  for (const int index : of.row_words) {
    const spec::word& w = of.words[static_cast<std::size_t>(index)];
    if (w.about->operand != operand_kind::target) continue;
    const view& target = a.operand[w.operand];
    const auto ignored = static_cast<int64>(w.parameters.back());
    for (int64 row = 0; row < a.rows; ++row) {
      const int64 column = integer_of(a, target, row);
      if ((column < 0 || column >= a.columns) && column != ignored)
        throw std::out_of_range("Target " + std::to_string(column) + " is out of bounds.");
    }
  }
}

// Calls body(begin, end) for ranges of the partition's tasks.
template <class Body>
void each_task(const arguments& a, Body body) {
  const int64 down = a.groups.operands != 0 ? a.parts : (a.rows + a.task_rows - 1) / a.task_rows,
              across = (a.columns + a.task_columns - 1) / a.task_columns;
  const int64 grain = std::max<int64>(kGrainElements / (a.task_rows * a.task_columns), 1);
  in_threads(down * across, grain, body);
}

void run(cpu_kernel kernel, const arguments& a) {
  each_task(a, [&](int64 begin, int64 end) { kernel(a, begin, end); });
}

void run_backward(const cpu_kernels& kernels, const arguments& a, dtype x) {
  const cpu_kernel backward = choose(kernels, a, x, true);
  if (a.recomputed.data == nullptr) {
    run(backward, a);
    return;
  }
  arguments result = a;
  result.y = a.recomputed;
  result.dx = {};
  std::fill(result.operand_gradient, result.operand_gradient + kMaxOperands, view{});
  result.statistics = nullptr;
  const cpu_kernel forward = choose(kernels, result, x, false);
  each_task(a, [&](int64 begin, int64 end) {
    for (int64 task = begin; task < end; ++task) {
      backward(a, task, task + 1);
      forward(result, task, task + 1);
    }
  });
}

void reduce_columns(const arguments& a, int64 parts, int slots, const view* outputs) {
  in_threads(a.columns, std::max<int64>(kGrainElements / std::max<int64>(parts, 1), 1), [&](int64 begin, int64 end) {
    const auto* partial = static_cast<const double*>(a.column_partial);
    for (int s = 0; s < slots; ++s) {
      const int64 last = std::min(end, a.columns / std::max(outputs[s].column_stride, 1));
      if (outputs[s].data && begin < last)
        sum_parts(partial + s * a.parts * a.columns, parts, a.columns, begin, last, outputs[s]);
    }
  });
}

void reduce_groups(const arguments& a, int slot, const view& output) {
  const auto* partial = static_cast<const double*>(a.column_partial) + slot * a.parts * a.columns;
  const int64 grain = std::max<int64>(kGrainElements / (a.groups.blocks * a.columns), 1);
  const int64 numbers = a.columns / std::max(output.column_stride, 1);
  in_threads(a.groups.count, grain, [&](int64 begin, int64 end) {
    for (int64 g = begin; g < end; ++g) {
      view row = output;
      row.data = static_cast<char*>(output.data) + g * numbers * size_of(output.type);
      sum_parts(partial + g * a.groups.blocks * a.columns, a.groups.blocks, a.columns, 0, numbers, row);
    }
  });
}

}  // namespace onepass::cpu
