// The tensors of one call become `arguments`: which ones a kernel gets, and how they are laid out.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "src/plan/layout.h"
#include "src/plan/plan.h"

namespace onepass::spec {

enum class role { x, operand, result, kept, gradient, kept_gradient };

// Of a result of a line without a contraction.
std::vector<std::int64_t> sizes_of_result(result_type, const shape& x);

// The reason why a line cannot take such an x; empty where it can.
std::string why_not_shape(const line&, const shape& x, const char* name);

class frame {
 public:
  // x's shape is that of the results that are rows, and of their gradients; see line::result.
  frame(const line&, const spec::shape& x, dtype);
  frame(const frame&) = delete;  // what is entered points here
  frame& operator=(const frame&) = delete;

  const line& of;
  const spec::shape shape;
  const dtype type;
  arguments a{};
  dtype operand_types[kMaxOperands] = {};  // known even where the value is not read
  std::uint64_t boolean_masks = 0;         // bits by operand

  dtype arithmetic() const { return type == dtype::f64 ? dtype::f64 : dtype::f32; }
  bool empty() const { return shape.rows() == 0 || shape.columns() == 0; }
  bool is_number(role what, int i) const { return result_of(what, i).is_number(); }
  dtype result_type(role what, int i) const { return result_of(what, i).type(type); }  // x's of x, too
  bool is_column(int operand) const { return of.operand_word(operand).about->operand == operand_kind::column; }
  bool is_of_channels(int operand) const { return of.operand_word(operand).about->by_channels; }
  bool is_table(int operand) const { return is_rotary(of.operand_word(operand)); }
  bool is_target(int operand) const { return of.operand_word(operand).about->operand == operand_kind::target; }
  void operand_type(int operand, dtype);
  // Of an operand that is rows: whether it broadcasts to x's shape. Rows of tables have an element for each column that
  // is turned, or for each two.
  bool fits(int operand, const strided&) const;
  std::string rows_of(int operand) const;  // in messages: what rows of a table have

  // enter(role, its number, where it goes) for each tensor that a kernel reads or writes.
  template <class Enter>
  void forward_inputs(const Enter& enter) {
    enter(role::x, 0, a.x);
    for (int i = 0; i < of.operands; ++i) enter(role::operand, i, a.operand[i]);
  }
  // gives_result: false where a runner writes the result.
  template <class Enter>
  void forward_outputs(bool gives_result, const Enter& enter) {
    if (gives_result) enter(role::result, 0, a.y);
    for (int k = 0; k < of.keeps; ++k) enter(role::kept, k, a.kept[k]);
  }
  template <class Enter>
  void backward_inputs(const reads& read, const Enter& enter) {
    enter(role::gradient, 0, a.y);
    for (int k = 0; k < of.keeps; ++k) enter(role::kept_gradient, k, a.kept_gradient[k]);
    if (read.x) enter(role::x, 0, a.x);
    for (int i = 0; i < of.operands; ++i)
      if (read.operands[static_cast<std::size_t>(i)]) enter(role::operand, i, a.operand[i]);
    if (read.result) enter(role::result, 0, a.x);
    if (read.kept >= 0) enter(role::kept, read.kept, a.kept[read.kept]);
  }
  // enter(output, where it goes). Gradients of columns are summed after the kernel and are not entered.
  template <class Enter>
  void backward_outputs(const gradients& plan, const Enter& enter) {
    a.wants_column = plan.wants_column, a.unit = plan.unit;
    if (plan.grouped != 0) a.groups = groups_of(shape, plan.has), a.groups.operands = plan.grouped;
    for (const gradient_output& output : plan.outputs)
      enter(output, output.column ? nullptr : output.input == 0 ? &a.dx : &a.operand_gradient[output.input - 1]);
  }

  // Of channels, so many: how many columns each has.
  int columns_of_channel(std::int64_t channels) const { return static_cast<int>(shape.columns() / channels); }

  // Enters a tensor that broadcasts to x's shape. Its sizes and strides must outlive the frame.
  void take(const strided& tensor) { tensors_.push_back(tensor); }
  // One number a row, of x's leading dimensions (or a last one of 1 behind them), as a row of one; or scales of groups.
  void take_number(const strided& tensor, int group = 0) { take(as_rows(tensor, group)); }
  strided as_rows(const strided& numbers, int group = 0);
  int group_of(role what, int i) const { return result_of(what, i).group; }
  // After every tensor is in: fills in rows, columns and strides. One long row where nothing depends on columns,
  // unless `keeps_rows`.
  fit lay_out(bool keeps_rows, std::vector<bool>& needs_copy);
  // Bits of the operands that are columns with leading dimensions.
  std::uint64_t columns_of_batches() const;
  bool is_flat() const { return flat_; }  // one long row, after that

 protected:
  std::vector<strided> tensors_;

 private:
  spec::result_type result_of(role what, int i) const {
    const bool first = what == role::result || what == role::gradient;
    const bool other = what == role::kept || what == role::kept_gradient;
    return first || other ? of.result(first ? 0 : 1 + i) : spec::result_type();
  }

  bool flat_ = false;
  std::deque<std::vector<std::int64_t>> sizes_of_numbers_;  // what their tensors_ point to
};

// The arguments of an imagined call, by which kernels are chosen: all tensors have one address and one row stride.
class imagined_frame : public frame {
 public:
  struct memory {
    void *rows, *columns;  // where tensors and columns begin
    std::int64_t row_stride;
  };
  imagined_frame(const line&, const std::int64_t (&sizes)[2], dtype x, dtype column, dtype mask, const memory&);
  // keeps_rows: the call is laid out as rows; else as the binding does it.
  void forward(bool saves_statistics, bool keeps_rows);
  void backward(const gradients&, bool recomputes, bool keeps_rows);
  std::vector<operand_facts> facts() const;

 private:
  void enter(dtype of, view& out) { take({memory_.rows, of, 2, shape.sizes, strides_, &out}); }
  void enter_number(view& out, int group);
  void enter_operand(int i, view& out);
  void finish(bool keeps_rows);

  static constexpr std::int64_t kOne = 1;

  const memory memory_;
  const std::int64_t strides_[2], sizes_of_table_[2], sizes_of_scales_[2], strides_of_scales_[2];
};

}  // namespace onepass::spec
