// The C++ API's lines without products, forward and backward.
#include <cstring>

#include "src/cpu/api/call_frame.h"

namespace onepass {

namespace {

// Results that are numbers, of rows without elements.
void fill_numbers_of_nothing(const spec::line& of, const values& v) {
  for (const int i : of.row_words) {
    const spec::word& w = of.words[static_cast<std::size_t>(i)];
    if (!w.about->gives_number) continue;
    if (w.about->needs_elements) refuse(std::string(w.about->name) + " needs rows with at least one element");
    const tensor& t = w.ordinal < 0 ? v.y : v.kept[static_cast<std::size_t>(w.ordinal)];
    double number = w.about->of_nothing;
    auto narrow = static_cast<float>(number);
    void* const from = t.type == dtype::f64 ? static_cast<void*>(&number) : &narrow;
    copy({from, t.type, t.sizes, sizes_of(t.sizes.size(), 0)}, t);
  }
}

}  // namespace

void forward_of_rows(const spec::line& of, const values& v) {
  call_frame f(of, v.x);
  f.enter_forward(v, true);
  if (f.shape.columns() == 0) fill_numbers_of_nothing(of, v);
  if (f.empty()) return;
  f.lay_out();
  const cpu::row_call call = f.call();
  cpu::require_targets(of, f.a);
  cpu::partition(f.a, of.takes_whole_rows());
  cpu::run(cpu::choose(call.kernels, f.a, f.type, false), f.a);
}

namespace {

void run_backward(call_frame& f, const spec::line& of, const std::vector<view>& columns) {
  if (f.empty()) {
    for (const view& v : columns) std::memset(v.data, 0, static_cast<std::size_t>(f.shape.columns() * size_of(v.type)));
    f.add_channels();
    return;
  }
  f.lay_out();
  const int64 parts = cpu::partition(f.a, of.takes_whole_rows());
  std::vector<double> partial(columns.size() * static_cast<std::size_t>(parts * f.a.columns));
  f.a.column_partial = partial.data();
  cpu::run_backward(f.call().kernels, f.a, f.type);
  if (!columns.empty()) cpu::reduce_columns(f.a, parts, static_cast<int>(columns.size()), columns.data());
  f.add_channels();
}

// Of a line that gives codes, which have no gradient.
void backward_of_part(const spec::line& part, values v, gradients g) {
  const auto operands = static_cast<std::size_t>(part.operands);
  for (std::size_t i = operands; i < g.operands.size(); ++i)
    if (g.operands[i].data != nullptr) refuse(gradient_name(static_cast<int>(i) + 1) + ": nothing behind it has one");
  v.operands.resize(operands), g.operands.resize(std::min(g.operands.size(), operands));
  if (v.statistics.data != nullptr) v.statistics.sizes[0] = part.statistics(v.x.type);
  if (part.words.empty() && g.x.data != nullptr) refuse("the gradient of x: codes have none, and no value is kept");
  g.y = {};
  if (!part.words.empty()) backward_of_rows(part, v, g);
}

}  // namespace

void backward_of_rows(const spec::line& of, const values& v, const gradients& g) {
  if (of.gives_codes()) return backward_of_part(spec::differentiable_part(of), v, g);
  call_frame f(of, v.x);
  f.enter_backward(v, g);
  const std::vector<const tensor*> of_input = gradients_by_input(of, g);
  const spec::gradients plan =
      spec::plan_gradients(of, v.x.type, facts_of(v, v.x.sizes), wanted_of(of, v, g, v.x.sizes));
  const std::vector<view> columns = f.enter_gradients(plan, of_input);
  if (!plan.outputs.empty()) run_backward(f, of, columns);
  copy_shared(plan, f.result_gradient(), of_input);
}

}  // namespace onepass
