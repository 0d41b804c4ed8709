// The tensors of one call on their way into `arguments`, checked and copied where their strides want it.
#pragma once

#include <string>
#include <vector>

#include "src/plan/frame.h"
#include "src/torch/call/prepared.h"
#include "src/torch/tensor.h"

namespace onepass::binding {

// Bits by operand: which are booleans. type_of(i): an operand's dtype.
template <class TypeOf>
std::uint64_t boolean_masks_of(int operands, const TypeOf& type_of) {
  std::uint64_t boolean = 0;
  for (int i = 0; i < operands; ++i) boolean |= std::uint64_t{type_of(i) == dtype::boolean} << i;
  return boolean;
}

class frame : public spec::frame {
 public:
  // like: x, or what has its shape and dtype: a result's gradient, say.
  frame(const prepared_line& with, const Tensor& like, const char* name);

  const prepared_line& line;
  const device on;

  void input(const Tensor& t, view& out);   // of x's shape, or broadcasting to it
  Tensor output(view& out, dtype of_type);  // fresh, of x's shape
  void row_gradient(const Tensor& t, dtype of_result, view& out);
  void number(const Tensor& t, view& out);                  // one a row: the gradient of an ending's result
  Tensor number_output(view& out, spec::role what, int i);  // fresh
  void number_output_in(view& out, const Tensor&, int group);
  Tensor output_in(view& out, const Tensor&);  // of x's shape and dense
  void operand(int index, const Tensor& t);    // checked against its word
  void channels(int index, const Tensor& t);   // some numbers, each for as many columns
  void target(int index, const Tensor& t);     // one integer a row
  void dropout_state(const std::optional<Tensor>& state);
  void statistics(const Tensor& t) { a.statistics = t.data_ptr(); }
  Tensor fresh_statistics();

  // Forward: x, of the call's operands those from `first` on, and the dropout state.
  void enter(const Tensor& x, const std::vector<Tensor>& operands, int first, const std::optional<Tensor>& state);

  // After every tensor is in: fills in rows, columns and strides. One long row where nothing depends on columns, unless
  // `keeps_rows`.
  void lay_out(bool keeps_rows = false);

 private:
  std::vector<Tensor> held_;            // copies that must outlive the kernel's launch
  std::vector<const Tensor*> sources_;  // beside tensors_; null for outputs
};

}  // namespace onepass::binding
