// The tensors of one call on their way into `arguments`, checked and copied where their strides want it.
#include "src/torch/call/frame.h"

#include <algorithm>

#include "src/torch/check.h"

namespace onepass::binding {

frame::frame(const prepared_line& with, const Tensor& like, const char* name)
    : spec::frame(with.line, shape_of(like), dtype_of(like)), line(with), on(device_of(like)) {
  ONEPASS_CHECK(is_floating(type), "onepass: ", name,
                " must be torch.float32, torch.float64, torch.bfloat16 or torch.float16, got ", dtype_text(like));
  const std::string why_not = spec::why_not_shape(of, shape, name);
  ONEPASS_CHECK(why_not.empty(), "onepass: ", why_not);
  sources_.reserve(tensors_.capacity());
  held_.reserve(tensors_.capacity());
}

void frame::input(const Tensor& t, view& out) {
  take(strided_of(t, &out));
  sources_.push_back(&t);
}

void frame::row_gradient(const Tensor& t, dtype of_result, view& out) {
  ONEPASS_CHECK(of_result == type || dtype_of(t) == of_result, "onepass: the gradient of a value kept in ",
                torch_name_of(of_result), " must have that dtype, got ", dtype_text(t));
  input(t, out);
}

void frame::number(const Tensor& t, view& out) {
  const auto fits = [&] {
    return std::equal(t.sizes().begin(), t.sizes().end(), shape.sizes, shape.sizes + std::max(shape.dim - 1, 0));
  };
  ONEPASS_CHECK(dtype_of(t) == arithmetic() && fits(), "onepass: the gradient of a number a row must be a ",
                torch_name_of(arithmetic()), " tensor of shape ", shape_text(shape.sizes, std::max(shape.dim - 1, 0)),
                ", got ", dtype_text(t), " ", shape_text(t));
  take_number(strided_of(t, &out));
  sources_.push_back(&t);
}

Tensor frame::number_output(view& out, spec::role what, int i) {
  const std::vector<std::int64_t> sizes =
      spec::sizes_of_result(line.line.result(what == spec::role::result ? 0 : 1 + i), shape);
  Tensor fresh = onepass::binding::empty(sizes.data(), static_cast<int>(sizes.size()), arithmetic(), on);
  number_output_in(out, fresh, group_of(what, i));
  return fresh;
}

void frame::number_output_in(view& out, const Tensor& memory, int group) {
  take_number(strided_of(memory, &out), group);
  held_.push_back(memory);
  sources_.push_back(nullptr);
}

Tensor frame::output(view& out, dtype of_type) { return output_in(out, empty_like(shape, of_type, on)); }

Tensor frame::output_in(view& out, const Tensor& memory) {
  take(strided_of(memory, &out));
  // The sizes and strides that PyTorch lends live as long as the tensor: keep it beside them.
  held_.push_back(memory);
  sources_.push_back(nullptr);
  return memory;
}

void frame::operand(int index, const Tensor& t) {
  const spec::word& w = line.line.operand_word(index);
  const auto name = [&] { return operand_name(line.line, w, index); };
  const bool is_mask = w.about->kind == word_kind::mask;
  const dtype its = dtype_of(t);
  if (is_target(index)) return target(index, t);
  ONEPASS_CHECK(is_floating(its) || (its == dtype::boolean && is_mask), "onepass: ", name(),
                " must be a floating point tensor", is_mask ? " or bool" : "", ", got ", dtype_text(t));
  require_device(t, on, name);
  operand_type(index, its);
  view& out = a.operand[index];
  const std::int64_t columns = shape.columns();
  const bool is_tensor = w.about->operand == operand_kind::tensor;
  if (is_of_channels(index)) return channels(index, t);
  // Behind a contraction and before it, columns are for all rows.
  if (!is_tensor && spec::is_batch_of_columns(strided_of(t, &out), shape)) {
    input(t, out);
    return;
  }
  if (is_tensor) {
    ONEPASS_CHECK(fits(index, strided_of(t, &out)), "onepass: ", name(), " must have x's shape ",
                  shape_text(shape.sizes, shape.dim), " or broadcast to it", rows_of(index), ", got ", shape_text(t));
    input(t, out);
    return;
  }
  ONEPASS_CHECK(t.dim() == 1 && t.size(0) == columns, "onepass: ", name(), " must have shape [", columns,
                "], one number for each column of x, or broadcast to ", shape_text(shape.sizes, shape.dim),
                " from such rows, got ", shape_text(t));
  const bool dense = columns == 1 || t.stride(0) == 1;
  if (!dense) held_.push_back(torch::stable::contiguous(t));
  out = {(dense ? t : held_.back()).data_ptr(), {}, its, 1};
}

void frame::channels(int index, const Tensor& t) {
  view& out = a.operand[index];
  spec::strided its = strided_of(t, &out);
  ONEPASS_CHECK(spec::is_batch_of_channels(its, shape),
                "onepass: ", operand_name(line.line, line.line.operand_word(index), index),
                " must have one number for each channel, ", "as many as divide the ", shape.columns(),
                " columns of x, in rows that broadcast to ", shape_text(shape.sizes, shape.dim), ", got ",
                shape_text(t));
  its.shared_by = columns_of_channel(t.size(t.dim() - 1));
  if (t.dim() == 1 && (t.size(0) == 1 || t.stride(0) == 1)) {  // for all rows
    out = {its.data, {}, its.type, its.shared_by};
    return;
  }
  take(its);
  sources_.push_back(&t);
}

void frame::target(int index, const Tensor& t) {
  const auto name = [&] { return operand_name(line.line, line.line.operand_word(index), index); };
  const int dims = std::max(shape.dim - 1, 0);
  ONEPASS_CHECK(is_integer(dtype_of(t)), "onepass: ", name(), " must be torch.int64 or torch.int32, got ",
                dtype_text(t));
  ONEPASS_CHECK(t.dim() == dims && std::equal(t.sizes().begin(), t.sizes().end(), shape.sizes), "onepass: ", name(),
                " must have shape ", shape_text(shape.sizes, dims), ", one column for each row of x, got ",
                shape_text(t));
  require_device(t, on, name);
  operand_type(index, dtype_of(t));
  take_number(strided_of(t, &a.operand[index]));
  sources_.push_back(&t);
}

void frame::dropout_state(const std::optional<Tensor>& state) {
  if (line.line.dropouts == 0) return;
  ONEPASS_CHECK(state.has_value(), "onepass: a line with dropout needs a dropout_state");
  std::int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(state->get(), &code));
  ONEPASS_CHECK(code == aoti_torch_dtype_int64() && state->numel() == 2 && state->is_contiguous(),
                "onepass: dropout_state must be a contiguous int64 tensor {seed, offset}, got shape ",
                shape_text(*state));
  require_device(*state, on, [] { return "dropout_state"; });
  a.dropout_state = static_cast<const int64*>(static_cast<void*>(state->data_ptr()));
}

Tensor frame::fresh_statistics() {
  const std::int64_t sizes[2] = {line.line.statistics(type), shape.rows()};
  Tensor fresh = onepass::binding::empty(sizes, 2, arithmetic(), on);
  statistics(fresh);
  return fresh;
}

void frame::enter(const Tensor& x, const std::vector<Tensor>& operands, int first, const std::optional<Tensor>& state) {
  forward_inputs([&](spec::role what, int i, view& to) {
    if (what == spec::role::x) input(x, to);
    else operand(i, operands[static_cast<std::size_t>(first) + static_cast<std::size_t>(i)]);
  });
  dropout_state(state);
}

void frame::lay_out(bool keeps_rows) {
  std::vector<bool> needs_copy;
  while (spec::frame::lay_out(keeps_rows, needs_copy) == spec::fit::copies) {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      if (!needs_copy[i]) continue;
      const bool number = tensors_[i].number;
      view* const out = tensors_[i].out;
      const int shared_by = tensors_[i].shared_by;
      std::vector<std::int64_t> sizes(shape.sizes,
                                      shape.sizes + shape.dim);  // a table's rows have a length of their own
      if (const int dim = tensors_[i].dim; dim > 0 && tensors_[i].sizes[dim - 1] != 1)
        sizes.back() = tensors_[i].sizes[dim - 1];
      held_.push_back(number ? torch::stable::contiguous(*sources_[i])
                             : expanded_copy(*sources_[i], {shape.dim, sizes.data()}));
      tensors_[i] = number ? as_rows(strided_of(held_.back(), out)) : strided_of(held_.back(), out);
      tensors_[i].shared_by = shared_by;
    }
  }
}

}  // namespace onepass::binding
