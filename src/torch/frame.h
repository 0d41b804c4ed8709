// The tensors of one call on their way into `arguments`: checked, broadcast, laid out as rows.
#pragma once

#include <string>
#include <vector>

#include "src/torch/prepared.h"
#include "src/torch/tensor.h"

namespace onepass::binding {

class frame;
// Bits by operand: which are booleans. type_of(i): an operand's dtype.
template <class TypeOf>
std::uint64_t boolean_masks_of(int operands, const TypeOf& type_of) {
  std::uint64_t boolean = 0;
  for (int i = 0; i < operands; ++i) boolean |= std::uint64_t{type_of(i) == dtype::boolean} << i;
  return boolean;
}
std::uint64_t boolean_masks_of(const frame&);

class frame {
 public:
  // like: x, or the result's gradient. Its shape and dtype are those of the result, the kept values and their
  // gradients.
  frame(const prepared_line& with, const Tensor& like, const char* name);

  arguments a{};
  const prepared_line& line;
  const spec::shape shape;
  const dtype type;
  const device on;
  std::uint64_t boolean_masks = 0;
  dtype operand_types[kMaxOperands] = {};  // known even where the value is not read

  dtype arithmetic() const { return type == dtype::f64 ? dtype::f64 : dtype::f32; }
  bool empty() const { return shape.rows() == 0 || shape.columns() == 0; }

  void input(const Tensor& t, view& out);      // of x's shape, or broadcasting to it
  Tensor output(view& out, dtype of_type);     // fresh, of x's shape
  Tensor output_in(view& out, const Tensor&);  // of x's shape and dense
  void operand(int index, const Tensor& t);    // a column or a tensor, checked against its word
  void dropout_state(const std::optional<Tensor>& state);
  void statistics(const Tensor& t) { a.statistics = t.data_ptr(); }
  Tensor fresh_statistics();

  // Forward: x, of the call's operands those from `first` on, and the dropout state.
  void enter(const Tensor& x, const std::vector<Tensor>& operands, int first, const std::optional<Tensor>& state);

  // After every tensor is in: fills in rows, columns and strides. One long row where nothing depends on columns, unless
  // `keeps_rows`.
  void lay_out(bool keeps_rows = false);
  bool is_flat() const { return flat_; }  // one long row, after that

 private:
  static constexpr std::size_t kTensors = 8;  // more than most lines have

  bool flat_ = false;
  std::vector<Tensor> held_;  // copies that must outlive the kernel's launch
  std::vector<spec::strided> tensors_;
  std::vector<const Tensor*> sources_;  // beside tensors_; null for outputs
};

}  // namespace onepass::binding
