// onepass from C++, without PyTorch: a line on arrays of the CPU, forward and backward.
#include "onepass/core.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>

#include "src/cpu/run.h"
#include "src/settings.h"
#include "src/plan/layout.h"
#include "src/plan/plan.h"

namespace onepass {
namespace {

using sizes_of = std::vector<std::int64_t>;

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument("onepass: " + why); }

std::string text(const sizes_of& sizes) {
  std::string all = "[";
  for (const std::int64_t size : sizes) all += (all.size() > 1 ? ", " : "") + std::to_string(size);
  return all + "]";
}

void require_type(const tensor& t, dtype expected, const std::string& name) {
  if (t.type != expected) refuse(name + " must be " + torch_name_of(expected) + ", got " + torch_name_of(t.type));
}
void require_sizes(const tensor& t, const sizes_of& expected, const std::string& name) {
  if (t.sizes != expected) refuse(name + " must have shape " + text(expected) + ", got " + text(t.sizes));
}
void require_count(std::size_t got, int expected, const char* what, const spec::line& of) {
  if (static_cast<int>(got) != expected)
    refuse("the line \"" + of.text + "\" takes " + std::to_string(expected) + " " + what + ", got " +
           std::to_string(got));
}

sizes_of strides_of(const tensor& t) {
  if (!t.strides.empty()) return t.strides;
  sizes_of strides(t.sizes.size());
  std::int64_t stride = 1;
  for (std::size_t d = strides.size(); d-- > 0; stride *= t.sizes[d]) strides[d] = stride;
  return strides;
}

// Between tensors of one shape and dtype.
void copy(const tensor& from, const tensor& to) {
  const sizes_of from_strides = strides_of(from), to_strides = strides_of(to);
  const std::int64_t bytes = size_of(from.type);
  const std::function<void(std::size_t, const char*, char*)> copy_from = [&](std::size_t d, const char* in, char* out) {
    if (d == from.sizes.size()) {
      std::memcpy(out, in, static_cast<std::size_t>(bytes));
      return;
    }
    for (std::int64_t i = 0; i < from.sizes[d]; ++i)
      copy_from(d + 1, in + i * from_strides[d] * bytes, out + i * to_strides[d] * bytes);
  };
  copy_from(0, static_cast<const char*>(from.data), static_cast<char*>(to.data));
}

// The tensors of one call on their way into `arguments`, as src/torch/frame.h has it for PyTorch's.
class frame {
 public:
  frame(const spec::line& line, const tensor& x) : line_(line), sizes_(x.sizes), type_(x.type) {
    if (!is_floating(type_))
      refuse(std::string("x must be float32, float64, bfloat16 or float16, got ") + torch_name_of(type_));
    if (shape().dim < line.least_dim())
      refuse("'causal' needs a tensor of at least 2 dimensions, got x of shape " + text(sizes_));
    if (line.turns() && (sizes_.empty() || sizes_.back() % 2 != 0))
      refuse("'rope' needs rows of an even length, got x of shape " + text(sizes_));
    spec::fill_parameters(line, type_, a);
  }

  arguments a{};
  std::uint64_t boolean_masks = 0;

  spec::shape shape() const { return {static_cast<int>(sizes_.size()), sizes_.data()}; }
  bool empty() const { return shape().rows() == 0 || shape().columns() == 0; }

  // Of x's shape and dtype.
  void whole(const tensor& t, view& out, const std::string& name) {
    require_type(t, type_, name), require_sizes(t, sizes_, name);
    enter(t, out, name);
  }
  // A result's gradient: zeros where there is none.
  tensor gradient(const tensor& t, view& out, const std::string& name) {
    tensor given = t;
    if (given.data == nullptr) given = {&zero_, type_, sizes_, sizes_of(sizes_.size(), 0)};
    whole(given, out, name);
    return given;
  }
  void operand(int i, const tensor& t, bool is_read) {
    const spec::word& w = line_.operand_word(i);
    const std::string name = spec::operand_name(line_, w, i);
    const bool is_mask = t.type == dtype::boolean && w.about->kind == word_kind::mask;
    if (t.type == dtype::none || (t.type == dtype::boolean && !is_mask))
      refuse(name + " must be of a floating point dtype" + (w.about->kind == word_kind::mask ? " or bool" : "") +
             ", got " + torch_name_of(t.type));
    boolean_masks |= std::uint64_t{is_mask} << i;
    if (w.about->operand == operand_kind::column) require_sizes(t, {shape().columns()}, name);
    else if (!spec::broadcasts({t.data, t.type, static_cast<int>(t.sizes.size()), t.sizes.data(), nullptr, nullptr},
                               shape()))
      refuse(name + " must have x's shape " + text(sizes_) + " or broadcast to it, got " + text(t.sizes));
    if (!is_read) return;
    if (w.about->operand == operand_kind::column) a.operand[i] = column(t, name);
    else enter(t, a.operand[i], name);
  }
  view column(const tensor& t, const std::string& name) const {
    if (!t.strides.empty() && t.sizes[0] > 1 && t.strides[0] != 1) refuse(name + " must be contiguous");
    if (t.data == nullptr && t.sizes[0] > 0) refuse(name + " is missing");
    return {t.data, {}, t.type, 1};
  }
  // Where the tensor of row statistics is wanted.
  void statistics(const tensor& t) {
    require_type(t, type_ == dtype::f64 ? dtype::f64 : dtype::f32, "statistics");
    require_sizes(t, {line_.statistics(type_), shape().rows()}, "statistics");
    if (!t.strides.empty() && t.strides != strides_of({t.data, t.type, t.sizes}))
      refuse("statistics must be contiguous");
    a.statistics = t.data;
  }
  void dropout_state(const int64* state) {
    if (line_.dropouts > 0 && state == nullptr) refuse("a line with dropout needs a dropout_state");
    a.dropout_state = state;
  }

  // Laid out with the others; its shape is right.
  void enter(const tensor& t, view& out, const std::string& name) {
    if (!t.strides.empty() && t.strides.size() != t.sizes.size())
      refuse(name + " has " + std::to_string(t.sizes.size()) + " sizes and " + std::to_string(t.strides.size()) +
             " strides");
    if (t.data == nullptr && !empty()) refuse(name + " is missing");
    held_.push_back(t.sizes), held_.push_back(strides_of(t)), names_.push_back(name);
    tensors_.push_back(
        {t.data, t.type, static_cast<int>(t.sizes.size()), held_[held_.size() - 2].data(), held_.back().data(), &out});
  }

  void lay_out() {
    std::vector<bool> needs_copy;
    const bool flatten = !line_.rowwise() && !line_.depends_on_column();
    if (spec::lay_out(shape(), tensors_, flatten, a, needs_copy) == spec::fit::rows) return;
    const auto at = std::find(needs_copy.begin(), needs_copy.end(), true) - needs_copy.begin();
    refuse(names_[static_cast<std::size_t>(at)] + " must be contiguous, or at least in its last dimension");
  }

 private:
  const spec::line& line_;
  const sizes_of sizes_;
  const dtype type_;
  double zero_ = 0;
  std::vector<sizes_of> held_;  // what tensors_ points to: a vector that moves keeps its numbers where they are
  std::vector<spec::strided> tensors_;
  std::vector<std::string> names_;
};

void kept_values(frame& f, const values& v, view* out) {
  for (std::size_t k = 0; k < v.kept.size(); ++k) f.whole(v.kept[k], out[k], "kept[" + std::to_string(k) + "]");
}

// What backward reads.
void enter_backward(frame& f, const spec::line& of, const values& v) {
  const spec::reads reads = spec::backward_reads(of);
  if (reads.x) f.whole(v.x, f.a.x, "x");
  if (reads.result) f.whole(v.y, f.a.x, "y");
  if (reads.kept >= 0) {
    const auto k = static_cast<std::size_t>(reads.kept);
    f.whole(v.kept[k], f.a.kept[k], "kept[" + std::to_string(k) + "]");
  }
  for (std::size_t i = 0; i < v.operands.size(); ++i) f.operand(static_cast<int>(i), v.operands[i], reads.operands[i]);
  if (reads.statistics) {
    f.statistics(v.statistics);
    if (v.statistics.data == nullptr && !f.empty()) refuse("backward reads the statistics that forward writes");
  }
  f.dropout_state(v.dropout_state);
}

// Input 0 is x, the others are the operands.
std::string gradient_name(int input) {
  return "the gradient of " + (input == 0 ? std::string("x") : "operand " + std::to_string(input - 1));
}
void require_like(const tensor& gradient, const tensor& value, int input) {
  require_type(gradient, value.type, gradient_name(input));
  require_sizes(gradient, value.sizes, gradient_name(input));
}

std::uint64_t wanted_of(const spec::line& of, const values& v, const gradients& g) {
  std::uint64_t wanted = g.x.data != nullptr;
  if (wanted) require_like(g.x, v.x, 0);
  for (int i = 0; i < of.operands; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (at >= g.operands.size() || g.operands[at].data == nullptr) continue;
    require_like(g.operands[at], v.operands[at], i + 1);
    if (of.operand_word(i).about->operand == operand_kind::tensor)
      require_sizes(v.operands[at], v.x.sizes, "an operand with a gradient");
    wanted |= std::uint64_t{1} << (i + 1);
  }
  return wanted;
}

// What the plan says of the tensors to be written; columns come back apart.
std::vector<view> enter_gradients(frame& f, const spec::gradients& plan, const std::vector<const tensor*>& of_input) {
  std::vector<view> columns;
  for (const spec::gradient_output& output : plan.outputs) {
    const tensor& t = *of_input[static_cast<std::size_t>(output.input)];
    const std::string name = gradient_name(output.input);
    if (output.column) columns.push_back(f.column(t, name));
    else f.enter(t, output.input == 0 ? f.a.dx : f.a.operand_gradient[output.input - 1], name);
  }
  return columns;
}

void run_backward(frame& f, const spec::line& of, dtype x, const std::vector<view>& columns) {
  if (f.empty()) {
    for (const view& v : columns)
      std::memset(v.data, 0, static_cast<std::size_t>(f.shape().columns() * size_of(v.type)));
    return;
  }
  f.lay_out();
  const int64 parts = cpu::partition(f.a, of.by_rows());
  std::vector<double> partial(columns.size() * static_cast<std::size_t>(parts * f.a.columns));
  f.a.column_partial = partial.data();
  cpu::run_backward(*cpu::kernels_for(of, f.boolean_masks), f.a, x);
  if (!columns.empty()) cpu::reduce_columns(f.a, parts, static_cast<int>(columns.size()), columns.data());
}

}  // namespace

line::line(std::string_view text) : parsed_(std::make_shared<const spec::line>(spec::parse(text))) {
  if (parsed_->linear >= 0)
    refuse("\"" + parsed_->text + "\" has a product, which is a library's work: give the words before and behind it");
}

int line::operands() const { return parsed_->operands; }
int line::keeps() const { return parsed_->keeps; }
int line::statistics(dtype x) const { return spec::backward_reads(*parsed_).statistics ? parsed_->statistics(x) : 0; }

void line::forward(const values& v) const {
  const spec::line& of = *parsed_;
  require_count(v.operands.size(), of.operands, "operands", of);
  require_count(v.kept.size(), of.keeps, "kept values", of);
  frame f(of, v.x);
  f.whole(v.x, f.a.x, "x"), f.whole(v.y, f.a.y, "y"), kept_values(f, v, f.a.kept);
  for (int i = 0; i < of.operands; ++i) f.operand(i, v.operands[static_cast<std::size_t>(i)], true);
  if (v.statistics.data != nullptr && statistics(v.x.type) > 0) f.statistics(v.statistics);
  f.dropout_state(v.dropout_state);
  if (f.empty()) return;
  f.lay_out();
  const std::shared_ptr<const cpu_kernels> kernels = cpu::kernels_for(of, f.boolean_masks);
  cpu::partition(f.a, of.by_rows());
  cpu::run(cpu::choose(*kernels, f.a, v.x.type, false), f.a);
}

void line::backward(const values& v, const gradients& g) const {
  const spec::line& of = *parsed_;
  require_count(v.operands.size(), of.operands, "operands", of);
  require_count(v.kept.size(), of.keeps, "kept values", of);
  frame f(of, v.x);
  const tensor dy = f.gradient(g.y, f.a.y, "the gradient of y");
  for (std::size_t k = 0; k < v.kept.size(); ++k)
    f.gradient(k < g.kept.size() ? g.kept[k] : tensor{}, f.a.kept_gradient[k], "the gradient of kept");
  enter_backward(f, of, v);
  std::vector<spec::operand_facts> facts;
  std::vector<const tensor*> of_input{&g.x};
  for (std::size_t i = 0; i < v.operands.size(); ++i) {
    facts.push_back({v.operands[i].type, v.operands[i].sizes != v.x.sizes});
    of_input.push_back(i < g.operands.size() ? &g.operands[i] : nullptr);
  }
  const spec::gradients plan = spec::plan_gradients(of, v.x.type, facts, wanted_of(of, v, g));
  f.a.wants_column = plan.wants_column;
  const std::vector<view> columns = enter_gradients(f, plan, of_input);
  if (!plan.outputs.empty()) run_backward(f, of, v.x.type, columns);
  for (std::size_t i = 0; i < plan.inputs.size(); ++i) {
    const int source = plan.inputs[i];
    if (source == kUnwanted) continue;
    const tensor* from = source == kUpstream
                             ? &dy
                             : of_input[static_cast<std::size_t>(plan.outputs[static_cast<std::size_t>(source)].input)];
    if (from != of_input[i]) copy(*from, *of_input[i]);
  }
}

void set_include_dir(const std::string& path) { settings_now().include_dir = path; }
void set_parallel_for(parallel_for with) { cpu::set_parallel_for(with); }

}  // namespace onepass
