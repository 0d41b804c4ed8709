// Calls of tensors without memory: what they launch, and their kernels compiled.
#include "src/cuda/prebuild.h"

#include <stdexcept>

#include "src/cuda/row/tuned.h"
#include "src/cuda/runtime/source.h"
#include "src/plan/attention.h"
#include "src/plan/frame.h"

namespace onepass::cuda {
namespace {

constexpr int64 kManyRows = 16384, kFewRows = 16;  // few: where threads of elementwise lines have less to do each

// Calls of a line whose addresses are as aligned as torch's are, and their kernels.
class prebuilt_line {
 public:
  prebuilt_line(const spec::line& line, const device_facts& chip, dtype x, dtype operand, int64 rows, int64 columns)
      : line_(line), chip_(chip), x_(x), operand_(operand), sizes_{rows, columns} {}

  void forward(bool saves_statistics) {
    spec::imagined_frame call = imagined();
    call.forward(saves_statistics, false);
    build_all(request_of(call, false, text(call, false)), call.a);
  }

  std::vector<launched> launches(bool saves_statistics) const {
    spec::imagined_frame call = imagined();
    call.forward(saves_statistics, false);
    const request r = request_of(call, false, text(call, false));
    std::vector<launched> all;
    std::vector<plan> plans = choose_tuned(r, call.a, chip_, describe(r, call.a, true));
    if (plans.empty()) plans = choose(r, call.a, chip_, describe(r, call.a, true));
    for (const plan& p : plans) {
      const configuration& c = p.with;
      const bool rows = has_whole_rows(r, c);
      const int threads = rows ? c.across : std::max(c.threads, c.across * c.down);
      all.push_back(
          {function_of(r, c), std::max(c.cluster, 1), threads, rows ? c.down : 1, std::int64_t{p.grid_x} * p.grid_y});
    }
    return all;
  }

  void backward(bool recomputes, bool in_place) {
    if (line_.gives_codes()) {
      const spec::line part = spec::differentiable_part(line_);
      if (part.words.empty()) return;
      prebuilt_line of_part(part, chip_, x_, operand_, sizes_[0], sizes_[1]);
      of_part.backward(recomputes, in_place);
      labels_.insert(labels_.end(), of_part.labels_.begin(), of_part.labels_.end());
      return;
    }
    spec::imagined_frame call = imagined();
    std::uint64_t wanted = 1;
    for (int i = 0; i < line_.operands; ++i)
      wanted |= std::uint64_t{call.operand_types[i] != dtype::boolean} << (i + 1);
    const spec::gradients plan = spec::plan_gradients(line_, x_, call.facts(), wanted);
    if (plan.outputs.empty()) return;  // the upstream gradient is the gradient: no kernel
    call.backward(plan, recomputes, false);
    request r = request_of(call, plan, text(call, true));
    r.in_place = in_place && may_be_in_place(x_, sizes_[1]);
    build_all(r, call.a);
  }

  const std::vector<std::string>& labels() const { return labels_; }

 private:
  spec::imagined_frame imagined() const {
    void* const address = reinterpret_cast<void*>(std::uintptr_t{1} << 20);
    return {line_, sizes_, x_, operand_, dtype::boolean, {address, address, sizes_[1]}};
  }
  std::string text(const spec::frame& call, bool backward) const {
    return spec::type_text(line_, call.boolean_masks, backward);
  }
  void build_all(const request& r, const arguments& a) {
    for (const plan& p : choose(r, a, chip_, describe(r, a, true))) {
      labels_.push_back(label(r, p.with, chip_.arch_name));
      build(source(r, p.with), chip_.arch_name, labels_.back());
    }
  }

  const spec::line& line_;
  const device_facts& chip_;
  const dtype x_, operand_;
  const std::int64_t sizes_[2];
  std::vector<std::string> labels_;
};

// before_linear: backward recomputes the result too, and may store dx in place of dy.
std::vector<std::string> build_line(const spec::line& line, const device_facts& chip, dtype x, dtype operand,
                                    int64 rows, int64 columns, bool before_linear) {
  prebuilt_line of(line, chip, x, operand, rows, columns);
  of.forward(line.rowwise());
  if (line.rowwise()) of.forward(false);
  of.backward(before_linear && !spec::backward_reads(line).result, before_linear);
  return of.labels();
}

}  // namespace

std::vector<std::string> prebuild(const spec::line& line, const std::string& arch_name, dtype x, dtype operand,
                                  int64 columns) {
  constexpr int64 kMostColumns = int64{1} << 40;
  if (columns < 1 || columns > kMostColumns)
    throw std::invalid_argument("onepass: columns must be from 1 to 2^40, got " + std::to_string(columns));
  const std::int64_t sizes[2] = {1, columns};
  if (const std::string why = spec::why_not_shape(line, {2, sizes}, "x"); !why.empty())
    throw std::invalid_argument("onepass: " + why);
  const device_facts chip = facts_of(arch_name);
  std::vector<std::string> labels;
  const auto build_all = [&](const spec::line& of, bool before_linear) {
    if (of.words.empty()) return;
    for (const int64 count : {kManyRows, kFewRows}) {
      if (count == kFewRows && of.rowwise()) continue;  // whose rows have one kernel, however many there are
      const std::vector<std::string> built = build_line(of, chip, x, operand, count, columns, before_linear);
      labels.insert(labels.end(), built.begin(), built.end());
    }
  };
  if (line.linear >= 0) {
    const spec::contraction parts(line.values >= 0 ? spec::attention(line).scores : line);
    build_all(parts.before, true), build_all(parts.behind, false);
  } else {
    build_all(line, false);
  }
  labels.push_back(arch_name + " column sum");
  build(column_sum_source(x == dtype::f64 ? dtype::f64 : dtype::f32, kFewSums), arch_name, labels.back());
  return labels;
}

std::vector<launched> forward_launches(const spec::line& line, const device_facts& chip, dtype x, int64 rows,
                                       int64 columns, bool saves) {
  return prebuilt_line(line, chip, x, x, rows, columns).launches(saves && line.rowwise());
}

}  // namespace onepass::cuda
