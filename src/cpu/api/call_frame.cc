// A call of the C++ API on its way into `arguments`: what is wrong with a tensor is refused by its name.
#include "src/cpu/api/call_frame.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>

namespace onepass {
namespace {

std::string kept_name(int k) { return "kept[" + std::to_string(k) + "]"; }
std::string result_name(spec::role what, int k) { return what == spec::role::result ? "y" : kept_name(k); }

}  // namespace

void refuse(const std::string& why) { throw std::invalid_argument("onepass: " + why); }

std::string text(const sizes_of& sizes) { return spec::shape_text(sizes.data(), static_cast<int>(sizes.size())); }

void require_type(const tensor& t, dtype expected, const std::string& name) {
  if (t.type != expected) refuse(name + " must be " + torch_name_of(expected) + ", got " + torch_name_of(t.type));
}
void require_sizes(const tensor& t, const sizes_of& expected, const std::string& name) {
  if (t.sizes != expected) refuse(name + " must have shape " + text(expected) + ", got " + text(t.sizes));
}
void require_there(const tensor& t, const std::string& name) {
  if (!t.strides.empty() && t.strides.size() != t.sizes.size())
    refuse(name + " has " + std::to_string(t.sizes.size()) + " sizes and " + std::to_string(t.strides.size()) +
           " strides");
  const bool empty = std::find(t.sizes.begin(), t.sizes.end(), 0) != t.sizes.end();
  if (t.data == nullptr && !empty) refuse(name + " is missing");
}

sizes_of strides_of(const tensor& t) {
  if (!t.strides.empty()) return t.strides;
  sizes_of strides(t.sizes.size());
  std::int64_t stride = 1;
  for (std::size_t d = strides.size(); d-- > 0; stride *= t.sizes[d]) strides[d] = stride;
  return strides;
}

bool is_contiguous(const tensor& t) { return t.strides.empty() || t.strides == strides_of({t.data, t.type, t.sizes}); }

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

call_frame::call_frame(const spec::line& line, const tensor& x)
    : spec::frame(line, {static_cast<int>(x.sizes.size()), x.sizes.data()}, x.type), sizes_(x.sizes) {
  if (!is_floating(type))
    refuse(std::string("x must be float32, float64, bfloat16 or float16, got ") + torch_name_of(type));
  if (const std::string why_not = spec::why_not_shape(of, shape, "x"); !why_not.empty()) refuse(why_not);
}

void call_frame::enter_forward(const values& v, bool gives_result) {
  const auto enter_one = [&](spec::role what, int i, view& to) {
    const auto at = static_cast<std::size_t>(i);
    if (what == spec::role::x) return whole(v.x, type, to, "x");
    if (what == spec::role::operand) return operand(i, v.operands[at], true);
    const tensor& given = what == spec::role::result ? v.y : v.kept[at];
    const auto type_of_result = [&] { return of.result(what == spec::role::result ? 0 : 1 + i); };
    if (is_number(what, i)) number(given, type_of_result(), to, result_name(what, i));
    else whole(given, result_type(what, i), to, result_name(what, i));
  };
  forward_outputs(gives_result, enter_one), forward_inputs(enter_one);
  if (v.statistics.data != nullptr && spec::backward_reads(of).statistics) statistics(v.statistics);
  dropout_state(v.dropout_state);
}

void call_frame::enter_backward(const values& v, const gradients& g, const std::vector<spec::role>& elsewhere) {
  const spec::reads reads = spec::backward_reads(of);
  for (int i = 0; i < of.operands; ++i)
    if (!reads.operands[static_cast<std::size_t>(i)]) operand(i, v.operands[static_cast<std::size_t>(i)], false);
  backward_inputs(reads, [&](spec::role what, int i, view& to) {
    const auto at = static_cast<std::size_t>(i);
    if (std::find(elsewhere.begin(), elsewhere.end(), what) != elsewhere.end()) return;
    switch (what) {
      case spec::role::x: return whole(v.x, type, to, "x");
      case spec::role::operand: return operand(i, v.operands[at], true);
      case spec::role::result: return whole(v.y, type, to, "y");
      case spec::role::kept: return whole(v.kept[at], result_type(what, i), to, kept_name(i));
      case spec::role::gradient: result_gradient_ = gradient(g.y, what, i, to, "the gradient of y"); return;
      case spec::role::kept_gradient:
        gradient(at < g.kept.size() ? g.kept[at] : tensor{}, what, i, to, "the gradient of kept");
    }
  });
  if (reads.statistics) {
    statistics(v.statistics);
    if (v.statistics.data == nullptr && !empty()) refuse("backward reads the statistics that forward writes");
  }
  dropout_state(v.dropout_state);
}

std::vector<view> call_frame::enter_gradients(const spec::gradients& plan, const std::vector<const tensor*>& of_input) {
  std::vector<view> columns;
  backward_outputs(plan, [&](const spec::gradient_output& output, view* to) {
    const tensor& t = *of_input[static_cast<std::size_t>(output.input)];
    const std::string name = gradient_name(output.input);
    if (to) return enter(t, *to, name);
    view of = column(t, name);
    if (output.input > 0 && is_of_channels(output.input - 1)) {
      const auto numbers = static_cast<std::size_t>(shape.columns() / output.unit);
      of.column_stride = 1;
      channel_sums& sums = channel_sums_.emplace_back(std::vector<double>(numbers), of, t.sizes[0]);
      of = {sums.columns.data(), {}, dtype::f64, output.unit};
    }
    columns.push_back(of);
  });
  return columns;
}

void call_frame::add_channels() const {
  for (const channel_sums& of : channel_sums_) {
    std::vector<double> sums(static_cast<std::size_t>(of.channels));
    const std::size_t each = of.columns.size() / sums.size();
    for (std::size_t i = 0; i < of.columns.size(); ++i) sums[i / each] += of.columns[i];
    arguments a{};
    a.columns = of.channels, a.parts = 1, a.column_partial = sums.data();
    cpu::reduce_columns(a, 1, 1, &of.of_channels);
  }
}

void call_frame::lay_out(bool keeps_rows) {
  std::vector<bool> needs_copy;
  if (spec::frame::lay_out(keeps_rows, needs_copy) == spec::fit::rows) return;
  const auto at = std::find(needs_copy.begin(), needs_copy.end(), true) - needs_copy.begin();
  refuse(names_[static_cast<std::size_t>(at)] + " must be contiguous, or at least in its last dimension");
}

cpu::row_call call_frame::call() {
  kernels_ = cpu::kernels_for(of, boolean_masks, type);
  return {*kernels_, a, type};
}

void call_frame::whole(const tensor& t, dtype its, view& out, const std::string& name) {
  require_type(t, its, name), require_sizes(t, sizes_, name);
  enter(t, out, name);
}

sizes_of call_frame::sizes_of_numbers() const { return {sizes_.begin(), sizes_.end() - !sizes_.empty()}; }

void call_frame::number(const tensor& t, spec::result_type of_result, view& out, const std::string& name) {
  require_type(t, arithmetic(), name), require_sizes(t, spec::sizes_of_result(of_result, shape), name);
  enter_number(t, out, name, of_result.group);
}

void call_frame::enter_number(const tensor& t, view& out, const std::string& name, int group) {
  if (shape.rows() > 0) require_there(t, name);
  held_.push_back(t.sizes);
  const sizes_of& sizes = held_.back();
  held_.push_back(strides_of(t));
  names_.push_back(name);
  take_number({t.data, t.type, static_cast<int>(sizes.size()), sizes.data(), held_.back().data(), &out}, group);
}

tensor call_frame::gradient(const tensor& t, spec::role what, int i, view& out, const std::string& name) {
  tensor given = t;
  const sizes_of sizes = is_number(what, i) ? sizes_of_numbers() : sizes_;
  if (given.data == nullptr) given = {&zero_, result_type(what, i), sizes, sizes_of(sizes.size(), 0)};
  if (is_number(what, i)) number(given, {spec::result_shape::number}, out, name);
  else whole(given, result_type(what, i), out, name);
  return given;
}

void call_frame::operand(int i, const tensor& t, bool is_read) {
  const spec::word& w = of.operand_word(i);
  const std::string name = spec::operand_name(of, w, i);
  if (is_target(i)) return target(i, t, is_read, name);
  const bool is_mask = t.type == dtype::boolean && w.about->kind == word_kind::mask;
  if (!is_floating(t.type) && !is_mask)
    refuse(name + " must be of a floating point dtype" + (w.about->kind == word_kind::mask ? " or bool" : "") +
           ", got " + torch_name_of(t.type));
  operand_type(i, t.type);
  if (is_column(i)) require_column(i, t, name);
  else if (!fits(i, {t.data, t.type, static_cast<int>(t.sizes.size()), t.sizes.data(), nullptr, nullptr}))
    refuse(name + " must have x's shape " + text(sizes_) + " or broadcast to it" + rows_of(i) + ", got " +
           text(t.sizes));
  if (!is_read) return;
  if (is_column(i)) a.operand[i] = column(t, name);
  else enter(t, a.operand[i], name);
}

void call_frame::target(int i, const tensor& t, bool is_read, const std::string& name) {
  if (!is_integer(t.type)) refuse(name + " must be int64 or int32, got " + torch_name_of(t.type));
  require_sizes(t, sizes_of_numbers(), name);
  operand_type(i, t.type);
  if (is_read) enter_number(t, a.operand[i], name);
}

void call_frame::require_column(int i, const tensor& t, const std::string& name) const {
  if (!is_of_channels(i)) return require_sizes(t, {shape.columns()}, name);
  if (t.sizes.size() != 1 || t.sizes[0] < 1 || shape.columns() % t.sizes[0] != 0)
    refuse(name + " must have one number for each channel, as many as divide the " + std::to_string(shape.columns()) +
           " columns of x, got " + text(t.sizes));
}

view call_frame::column(const tensor& t, const std::string& name) const {
  if (!t.strides.empty() && t.sizes[0] > 1 && t.strides[0] != 1) refuse(name + " must be contiguous");
  if (t.data == nullptr && t.sizes[0] > 0) refuse(name + " is missing");
  return {t.data, {}, t.type, t.sizes[0] > 0 ? columns_of_channel(t.sizes[0]) : 1};
}

void call_frame::statistics(const tensor& t) {
  require_type(t, arithmetic(), "statistics");
  require_sizes(t, {of.statistics(type), shape.rows()}, "statistics");
  if (!is_contiguous(t)) refuse("statistics must be contiguous");
  a.statistics = t.data;
}

void call_frame::dropout_state(const int64* state) {
  if (of.dropouts > 0 && state == nullptr) refuse("a line with dropout needs a dropout_state");
  a.dropout_state = state;
}

void call_frame::enter(const tensor& t, view& out, const std::string& name) {
  if (!empty()) require_there(t, name);
  held_.push_back(t.sizes);
  const sizes_of& sizes = held_.back();
  held_.push_back(strides_of(t));
  names_.push_back(name);
  take({t.data, t.type, static_cast<int>(sizes.size()), sizes.data(), held_.back().data(), &out});
}

std::string gradient_name(int input) {
  return "the gradient of " + (input == 0 ? std::string("x") : "operand " + std::to_string(input - 1));
}

std::vector<const tensor*> gradients_by_input(const spec::line& of, const gradients& g) {
  std::vector<const tensor*> all{&g.x};
  for (std::size_t i = 0; i < static_cast<std::size_t>(of.operands); ++i)
    all.push_back(i < g.operands.size() ? &g.operands[i] : nullptr);
  return all;
}

std::uint64_t wanted_of(const spec::line& of, const values& v, const gradients& g, const sizes_of& x) {
  const auto require_like = [](const tensor& gradient, const tensor& value, int input) {
    require_type(gradient, value.type, gradient_name(input));
    require_sizes(gradient, value.sizes, gradient_name(input));
  };
  std::uint64_t wanted = g.x.data != nullptr;
  if (wanted) require_like(g.x, v.x, 0);
  for (int i = 0; i < of.operands; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (at >= g.operands.size() || g.operands[at].data == nullptr) continue;
    require_like(g.operands[at], v.operands[at], i + 1);
    if (of.operand_word(i).about->operand == operand_kind::tensor)
      require_sizes(v.operands[at], x, "an operand with a gradient");
    wanted |= std::uint64_t{1} << (i + 1);
  }
  return wanted;
}

std::vector<spec::operand_facts> facts_of(const values& v, const sizes_of& x) {
  std::vector<spec::operand_facts> facts;
  // A tensor of one dimension is a column, or has no gradient (see wanted_of).
  for (const tensor& t : v.operands) facts.push_back({.type = t.type, .broadcast = t.sizes.size() > 1 && t.sizes != x});
  return facts;
}

void copy_shared(const spec::gradients& plan, const tensor& upstream, const std::vector<const tensor*>& of_input) {
  for (std::size_t i = 0; i < plan.inputs.size(); ++i) {
    const int source = plan.inputs[i];
    if (source == kUnwanted) continue;
    const tensor* from = source == kUpstream
                             ? &upstream
                             : of_input[static_cast<std::size_t>(plan.outputs[static_cast<std::size_t>(source)].input)];
    if (from != of_input[i]) copy(*from, *of_input[i]);
  }
}

}  // namespace onepass
