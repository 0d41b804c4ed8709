// The tensors of one call become `arguments`: which ones a kernel gets, and how they are laid out.
#include "src/plan/frame.h"

namespace onepass::spec {

namespace {

std::int64_t last_size(const strided& t) { return t.dim > 0 ? t.sizes[t.dim - 1] : 1; }

}  // namespace

std::vector<std::int64_t> sizes_of_result(result_type of, const shape& x) {
  std::vector<std::int64_t> sizes(x.sizes, x.sizes + x.dim);
  if (sizes.empty()) return sizes;
  if (of.shape == result_shape::number) sizes.pop_back();
  if (of.shape == result_shape::scale) sizes.back() = of.group > 0 ? sizes.back() / of.group : 1;
  return sizes;
}

std::string why_not_shape(const line& of, const shape& x, const char* name) {
  const auto got = [&] { return std::string(", got ") + name + " of shape " + shape_text(x.sizes, x.dim); };
  if (const int group = of.group(); group > 0 && x.columns() % group != 0) {
    const word& w = of.words.back();
    return "'" + std::string(w.about->name) + "(" + std::string(name_in_lines(w.stored)) + ", " +
           std::to_string(group) + ")' needs rows whose length is a multiple of " + std::to_string(group) + got();
  }
  if (x.dim < of.least_dim()) return "'causal' needs a tensor of at least 2 dimensions" + got();
  if (of.rotary() == nullptr) return {};
  if (x.dim == 0 || x.columns() % 2 != 0) return "'rope' needs rows of an even length" + got();
  const std::int64_t turned = of.turned(x.columns());
  if (turned > x.columns()) return "'rope(" + std::to_string(turned) + ")' needs rows of that length at least" + got();
  return {};
}

frame::frame(const line& of, const spec::shape& x, dtype type) : of(of), shape(x), type(type) {
  constexpr std::size_t kTensors = 8;  // more than most lines have
  tensors_.reserve(kTensors);
  fill_parameters(of, type, a);
  a.x.type = a.y.type = type;  // known even where they are not there
  for (int k = 0; k < of.keeps; ++k) a.kept[k].type = result_type(role::kept, k);
  a.numbers = static_cast<int>(of.numbers() | std::uint64_t{of.gives_codes()});
}

void frame::operand_type(int operand, dtype its) {
  operand_types[operand] = its;
  boolean_masks |= std::uint64_t{its == dtype::boolean} << operand;
}

bool frame::fits(int operand, const strided& t) const {
  if (!is_table(operand)) return broadcasts(t, shape);
  const std::int64_t turned = of.turned(shape.columns()), own = last_size(t);
  return leading_broadcast(t, shape) && (own == 1 || own == turned || own == turned / 2);
}

std::string frame::rows_of(int operand) const {
  if (!is_table(operand)) return {};
  const std::int64_t turned = of.turned(shape.columns());
  return " (with " + std::to_string(turned) + " or " + std::to_string(turned / 2) + " numbers a row)";
}

strided frame::as_rows(const strided& numbers, int group) {
  const auto with_one = [&](const std::int64_t* from) {
    std::vector<std::int64_t>& all = sizes_of_numbers_.emplace_back(from, from + numbers.dim);
    all.push_back(1);
    return all.data();
  };
  strided rows = numbers;
  if (group > 0) {
    rows.shared_by = group;
    return rows;
  }
  rows.number = true;
  if (numbers.dim == shape.dim && shape.dim > 0) return rows;  // they are
  rows.dim = shape.dim == 0 ? 0 : numbers.dim + 1;             // a tensor without dimensions is one row
  rows.sizes = with_one(numbers.sizes), rows.strides = with_one(numbers.strides);
  return rows;
}

std::uint64_t frame::columns_of_batches() const {
  std::uint64_t operands = 0;
  for (const strided& t : tensors_)
    for (int i = 0; i < of.operands; ++i)
      operands |= std::uint64_t{t.out == a.operand + i && is_column(i) && t.dim > 1} << i;
  return operands;
}

fit frame::lay_out(bool keeps_rows, std::vector<bool>& needs_copy) {
  if (const word* const rope = of.rotary(); rope != nullptr) {
    for (strided& t : tensors_) {
      const bool is_table = t.out == a.operand + rope->operand || t.out == a.operand + rope->operand + 1;
      if (is_table && last_size(t) != 1 && last_size(t) == of.turned(shape.columns()) / 2) t.shared_by = kOneForTwo;
    }
  }
  const bool flatten = !keeps_rows && !of.rowwise() && !of.depends_on_column() && a.wants_column == 0;
  const fit done = spec::lay_out(shape, tensors_, flatten, a, needs_copy);
  flat_ = done == fit::rows && flatten && a.rows == 1;
  return done;
}

imagined_frame::imagined_frame(const line& of, const std::int64_t (&sizes)[2], dtype x, dtype column, dtype mask,
                               const memory& at)
    : frame(of, {2, sizes}, x),
      memory_(at),
      strides_{at.row_stride, 1},
      sizes_of_table_{sizes[0], of.turned(sizes[1])},
      sizes_of_scales_{sizes[0], of.group() > 0 ? sizes[1] / of.group() : 1},
      strides_of_scales_{sizes_of_scales_[1], 1} {
  for (int i = 0; i < of.operands; ++i) {
    const bool is_mask = of.operand_word(i).about->kind == word_kind::mask;
    operand_type(i, is_target(i) ? dtype::i64 : is_mask ? mask : is_column(i) ? column : of.likely_type(i, x));
  }
}

std::vector<operand_facts> imagined_frame::facts() const {
  std::vector<operand_facts> all;
  for (int i = 0; i < of.operands; ++i) all.push_back({operand_types[i], false});
  return all;
}

void imagined_frame::enter_operand(int i, view& out) {
  if (is_target(i)) take_number({memory_.rows, operand_types[i], 1, shape.sizes, &kOne, &out});
  else if (is_table(i)) take({memory_.rows, operand_types[i], 2, sizes_of_table_, strides_, &out});
  else if (is_column(i)) out = {memory_.columns, {}, operand_types[i], 1};
  else enter(operand_types[i], out);
}

void imagined_frame::enter_number(view& out, int group) {
  if (group > 0) take_number({memory_.rows, arithmetic(), 2, sizes_of_scales_, strides_of_scales_, &out}, group);
  else take_number({memory_.rows, arithmetic(), 1, shape.sizes, &kOne, &out});
}

void imagined_frame::forward(bool saves_statistics, bool keeps_rows) {
  const auto any = [&](role what, int i, view& to) {
    if (what == role::operand) enter_operand(i, to);
    else if (is_number(what, i)) enter_number(to, group_of(what, i));
    else enter(result_type(what, i), to);
  };
  forward_inputs(any), forward_outputs(true, any);
  if (saves_statistics) a.statistics = memory_.columns;
  finish(keeps_rows);
}

void imagined_frame::backward(const gradients& plan, bool recomputes, bool keeps_rows) {
  backward_inputs(backward_reads(of, recomputes), [&](role what, int i, view& to) {
    if (what == role::operand) enter_operand(i, to);
    else if (is_number(what, i)) enter_number(to, group_of(what, i));
    else enter(result_type(what, i), to);
  });
  if (recomputes) enter(type, a.recomputed);
  backward_outputs(plan, [&](const gradient_output& output, view* to) {
    if (to) enter(output.type, *to);
  });
  a.statistics = memory_.columns;
  finish(keeps_rows);
}

void imagined_frame::finish(bool keeps_rows) {
  std::vector<bool> needs_copy;
  lay_out(keeps_rows, needs_copy);
}

}  // namespace onepass::spec
