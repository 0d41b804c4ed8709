// One call of a line without `linear`, forward or backward, on either device: checks, layout, outputs, launch.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "src/torch/call/frame.h"

namespace onepass::binding {

// Launches the kernels of a call itself, for example block by block, from a frame that is laid out as rows. It must
// write forward's result. Tensors that a call passes in place of what the runner has carry only shape and dtype.
using forward_runner = std::function<void(frame&)>;
using backward_runner = std::function<void(frame&, const spec::gradients&, const std::vector<view>& column_outputs)>;

struct forward_call {
  const Tensor& x;
  const std::vector<Tensor>& operands;
  const prepared_line& line;
  const std::optional<Tensor>& dropout_state;
  bool save_statistics;
};
template <class T>
std::vector<T> part_of(const std::vector<T>& all, int begin, int end) {
  return {all.begin() + begin, all.begin() + end};
}

// Beside a line without operands x may stand: a traced graph has no empty list (python/onepass/_operators/fake.py).
inline bool operand_count_fits(std::size_t got, std::size_t wanted) {
  return got == wanted || (wanted == 0 && got == 1);
}
void check_operand_count(const prepared_line&, std::size_t got);

// The result (not from a runner), the kept values, and the statistics [statistics, rows] where asked for.
std::vector<Tensor> forward(const forward_call&, const forward_runner& = {});

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
  bool wants_recompute = false;                    // the line's result too; never where it resumes at the result
  bool in_place = false;                           // on CUDA: no one else reads the result's gradient, which is dense
  bool runner_has_dx = false;                      // the runner stores x's gradient; dy is passed in its place
  // Of a line with features, where their columns' gradients are wanted: its rows are those, and they are no results.
  const Tensor* feature_gradients = nullptr;
  // Where x's gradient goes, dense; x itself, perhaps, of a line of which no gradient needs a sum over the row.
  const Tensor* dx = nullptr;
};
// Results that are numbers, of rows without elements.
void fill_numbers_of_nothing(const spec::line&, const std::vector<Tensor>& results);
// A tensor of backward with x's shape and dtype.
const Tensor& like_x(const backward_call&);
// Backward's frame gets what the kernel reads.
void enter_backward(frame&, const backward_call&, const std::vector<spec::operand_facts>&);
void check_backward(const backward_call&);  // how many gradients and operands there are
// Tensors that backward reads.
const Tensor& given(const backward_call&, const std::optional<Tensor>&, const char* what);
const Tensor& given_operand(const backward_call&, int);
std::vector<Tensor> given_operands(const backward_call&, int begin, int end);

// The tensors of spec::plan_gradients(...).outputs, which are not none; then the recomputed result, where it is wanted.
std::vector<Tensor> backward(const backward_call&, const backward_runner& = {});

}  // namespace onepass::binding
