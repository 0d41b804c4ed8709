// One call of a line without `linear`, forward or backward, on either device: checks, layout, outputs, launch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/torch/prepared.h"
#include "src/torch/tensor.h"

namespace onepass::binding {

struct forward_call {
  const Tensor& x;
  const std::vector<Tensor>& operands;
  const prepared_line& line;
  const std::optional<Tensor>& dropout_state;
  bool save_statistics;
};
void check_operand_count(const prepared_line&, std::size_t got);

// The result, the kept values, and the statistics [statistics, rows] where asked for.
std::vector<Tensor> forward(const forward_call&);

struct backward_call {
  const std::vector<Tensor>& gradients;  // of the result, then of the kept values
  const std::optional<Tensor>& x;        // where backward reads it
  const std::vector<std::optional<Tensor>>& operands;
  const std::optional<Tensor>& resumed;  // the kept tensor, or the result, that the line resumes from
  const std::optional<Tensor>& statistics;
  const std::optional<Tensor>& dropout_state;
  const prepared_line& line;
  const std::vector<std::int64_t>& operand_types;  // dtype, plus 16 where the operand broadcasts
  std::int64_t wanted;                             // bit 0 for x, bit i + 1 for operand i
  bool wants_again = false;                        // the line's result too; never where it resumes at the result
};
void check_backward(const backward_call&);  // how many gradients and operands there are

// The tensors of spec::plan_gradients(...).outputs, which are not none; then the result, where it is wanted again.
std::vector<Tensor> backward(const backward_call&);

}  // namespace onepass::binding
