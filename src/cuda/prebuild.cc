// Compiles a line's kernels into the cache on disk for a chip that need not be here.
#include "src/cuda/prebuild.h"

#include <algorithm>
#include <stdexcept>

#include "src/cuda/row/configuration.h"
#include "src/cuda/runtime/source.h"
#include "src/plan/contraction.h"
#include "src/plan/layout.h"

namespace onepass::cuda {
namespace {

constexpr int64 kManyRows = 16384, kFewRows = 16;  // few: where threads of elementwise lines have less to do each

// The arguments of a call without its memory: addresses that are as aligned as torch's are.
class imagined_call {
 public:
  imagined_call(const spec::line& line, dtype x, dtype operand, int64 rows, int64 columns)
      : line_(line), sizes_{rows, columns}, strides_{columns, 1}, x_(x) {
    for (int i = 0; i < line.operands; ++i) {
      const descriptor& about = *line.operand_word(i).about;
      const bool is_mask = about.kind == word_kind::mask;
      if (is_mask) boolean_masks_ |= std::uint64_t{1} << i;
      types_[i] = is_mask ? dtype::boolean : about.operand == operand_kind::column ? operand : x;
    }
  }

  void forward(const std::string& arch_name, bool saves_statistics) {
    arguments a{};
    request r = request_for(false);
    add(a.x, x_), add(a.y, x_);
    for (int k = 0; k < line_.keeps; ++k) add(a.kept[k], x_);
    add_operands(a, [](int) { return true; });
    if (saves_statistics) a.statistics = kAddress;
    build_one(r, a, arch_name);
  }

  void backward(const std::string& arch_name, bool again, bool in_place) {
    arguments a{};
    request r = request_for(true);
    const spec::reads reads = spec::backward_reads(line_, again);
    std::vector<spec::operand_facts> facts;
    facts.reserve(static_cast<std::size_t>(line_.operands));
    for (int i = 0; i < line_.operands; ++i) facts.push_back({types_[i], false});
    std::uint64_t wanted = 1;
    for (int i = 0; i < line_.operands; ++i) wanted |= std::uint64_t{types_[i] != dtype::boolean} << (i + 1);
    const spec::gradients plan = spec::plan_gradients(line_, x_, facts, wanted);
    if (plan.outputs.empty()) return;  // the upstream gradient is the gradient: no kernel
    r.wants_column = a.wants_column = plan.wants_column;
    r.wants_tensor = plan.wants_tensor;
    r.wants_dx = plan.wants_dx;
    r.wants_again = again;
    r.in_place = in_place && may_be_in_place(x_, sizes_[1]);
    if (again) add(a.again, x_);
    if (reads.x || reads.result) add(a.x, x_);
    add(a.y, x_);
    for (int k = 0; k < line_.keeps; ++k) add(a.kept_gradient[k], x_);
    if (reads.kept >= 0) add(a.kept[reads.kept], x_);
    add_operands(a, [&](int i) { return bool{reads.operands[static_cast<std::size_t>(i)]}; });
    for (const spec::gradient_output& output : plan.outputs) {
      if (!output.column) add(output.input == 0 ? a.dx : a.operand_gradient[output.input - 1], output.type);
    }
    a.statistics = kAddress;
    build_one(r, a, arch_name);
  }

  const std::vector<std::string>& labels() const { return labels_; }

 private:
  static inline void* const kAddress = reinterpret_cast<void*>(std::uintptr_t{1} << 20);

  request request_for(bool backward) const {
    request r(line_, backward);
    r.line = spec::type_text(line_, boolean_masks_, backward);
    r.x = x_;
    std::copy(types_, types_ + kMaxOperands, r.operand);
    return r;
  }
  void add(view& out, dtype type) { tensors_.push_back({kAddress, type, 2, sizes_, strides_, &out}); }
  template <class Reads>
  void add_operands(arguments& a, const Reads& reads) {
    for (int i = 0; i < line_.operands; ++i) {
      if (!reads(i)) continue;
      if (line_.operand_word(i).about->operand == operand_kind::column) a.operand[i] = {kAddress, {}, types_[i], 1};
      else add(a.operand[i], types_[i]);
    }
  }
  void build_one(const request& r, arguments& a, const std::string& arch_name) {
    std::vector<bool> needs_copy;
    spec::lay_out({2, sizes_}, tensors_, !line_.rowwise() && !line_.depends_on_column(), a, needs_copy);
    tensors_.clear();
    for (const plan& p : choose(r, a, facts_of(arch_name))) {
      labels_.push_back(label(r, p.with, arch_name));
      build(source(r, p.with), arch_name, labels_.back());
    }
  }

  const spec::line& line_;
  std::int64_t sizes_[2], strides_[2];
  dtype x_, types_[kMaxOperands] = {};
  std::uint64_t boolean_masks_ = 0;
  std::vector<spec::strided> tensors_;
  std::vector<std::string> labels_;
};

// before_linear: backward makes the result again, and its gradient is given away.
std::vector<std::string> build_line(const spec::line& line, const std::string& arch_name, dtype x, dtype operand,
                                    int64 rows, int64 columns, bool before_linear) {
  imagined_call call(line, x, operand, rows, columns);
  call.forward(arch_name, line.rowwise());
  if (line.rowwise()) call.forward(arch_name, false);
  call.backward(arch_name, before_linear && !spec::backward_reads(line).result, before_linear);
  return call.labels();
}

}  // namespace

std::vector<std::string> prebuild(const spec::line& line, const std::string& arch_name, dtype x, dtype operand,
                                  int64 columns) {
  constexpr int64 kMostColumns = int64{1} << 40;
  if (columns < 1 || columns > kMostColumns)
    throw std::invalid_argument("onepass: columns must be from 1 to 2^40, got " + std::to_string(columns));
  if (line.turns() && columns % 2 != 0)
    throw std::invalid_argument("onepass: 'rope' needs rows of an even length, got " + std::to_string(columns));
  facts_of(arch_name);  // throws for what is none
  std::vector<std::string> labels;
  const auto build_all = [&](const spec::line& of, bool before_linear) {
    if (of.words.empty()) return;
    for (const int64 count : {kManyRows, kFewRows}) {
      if (count == kFewRows && of.rowwise()) continue;  // whose rows have one kernel, however many there are
      const std::vector<std::string> built = build_line(of, arch_name, x, operand, count, columns, before_linear);
      labels.insert(labels.end(), built.begin(), built.end());
    }
  };
  if (line.linear >= 0) {
    const spec::contraction parts(line);
    build_all(parts.before, true), build_all(parts.behind, false);
  } else {
    build_all(line, false);
  }
  labels.push_back(arch_name + " column sum");
  build(column_sum_source(x == dtype::f64 ? dtype::f64 : dtype::f32, kFewSums), arch_name, labels.back());
  return labels;
}

}  // namespace onepass::cuda
