// One call of a line without `linear` for several tensors of one row length, dtype and device: those that are alike
// share a launch.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "src/torch/call/call.h"

namespace onepass::binding {

// How a call's tensors come. What there is one of for each of them is in a list, behind those of what came before it;
// or, where they are stacked, in one tensor with a dimension more in front. Operands are one for all, or where their
// bit is in `own`, one for each.
struct group_of {
  std::int64_t count;
  std::uint64_t own;
  bool stacked;

  Tensor pick(const std::vector<Tensor>& all, std::int64_t kind, std::int64_t member) const;
  bool has_own(int operand) const { return (own >> operand & 1) != 0; }
  std::size_t operand_at(int operand, std::int64_t member) const;
  std::size_t operand_count(int operands) const { return operand_at(operands, 0); }
  std::int64_t lists(std::int64_t kinds) const { return kinds * (stacked ? 1 : count); }
};

struct group_forward {
  const std::vector<Tensor>& xs;
  const std::vector<Tensor>& operands;
  const prepared_line& line;
  const std::optional<Tensor>& dropout_state;
  bool save_statistics;
  group_of of;
};
using frames = std::deque<frame>;  // they stay where they are
// The result, the kept values, and the statistics where asked for, each tensor's [statistics, rows] behind the other's.
std::vector<Tensor> forward(const group_forward&);

struct group_backward {
  const std::vector<Tensor>& gradients;  // of the results, then of the kept values
  const std::vector<Tensor>& xs;         // none where backward does not read them; and so `resumed`
  const std::vector<std::optional<Tensor>>& operands;
  const std::vector<Tensor>& resumed;
  const std::optional<Tensor>& statistics;
  const std::optional<Tensor>& dropout_state;
  const prepared_line& line;
  const std::vector<std::int64_t>& operand_types;
  std::int64_t wanted;
  group_of of;
};
// Where column gradients go: of each wanted operand one for all, or one for each tensor.
using column_views = std::vector<std::vector<view>>;
// Of each of spec::plan_gradients(...).outputs the tensors: of rows one for each, of columns as operands come.
std::vector<std::vector<Tensor>> backward(const group_backward&);

void run_forward(frames&);
void run_backward(frames&, const spec::gradients&, const column_views&);

}  // namespace onepass::binding
