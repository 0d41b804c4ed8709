// One call of a line with `linear`: what stands before it, the matrix product, what stands behind it.
#include "src/torch/contraction.h"

#include "src/torch/check.h"
#include "src/torch/frame.h"
#include "src/torch/matrix_product.h"

namespace onepass::binding {
namespace {

using optional_tensor = std::optional<Tensor>;

template <class T>
std::vector<T> part_of(const std::vector<T>& all, int begin, int end) {
  return {all.begin() + begin, all.begin() + end};
}

void check_weight(const prepared_line& line, const Tensor& x, const Tensor& weight) {
  const spec::word& word = line.line.words[static_cast<std::size_t>(line.line.linear)];
  const auto name = [&] { return operand_name(line.line, word); };
  ONEPASS_CHECK(x.dim() > 0, "onepass: 'linear' needs a tensor of at least 1 dimension, got x of shape ",
                shape_text(x));
  const std::int64_t columns = x.size(x.dim() - 1);
  ONEPASS_CHECK(weight.dim() == 2 && weight.size(1) == columns, "onepass: ", name(), " must have shape [N, ", columns,
                "] for x of shape ", shape_text(x), ", got ", shape_text(weight));
  ONEPASS_CHECK(dtype_of(weight) != dtype::none && dtype_of(weight) != dtype::boolean, "onepass: ", name(),
                " must be a floating point tensor, got ", dtype_text(weight));
  ONEPASS_CHECK(device_of(weight) == device_of(x),
                "onepass: expected all tensors to be on the same device, but x is on ", device_of(x).text(), " and ",
                name(), " is on ", device_of(weight).text());
}

// Whether all that stands behind `linear` is a bias that the product itself can add.
bool adds_bias_only(const spec::line& behind, const std::vector<Tensor>& operands, const Tensor& weight) {
  if (behind.words.size() != 1 || std::string_view(behind.words[0].about->name) != "bias") return false;
  const Tensor& bias = operands.back();
  return bias.dim() == 1 && bias.size(0) == weight.size(0) && device_of(bias) == device_of(weight);
}

// What `linear` took, from x or the kept value.
Tensor input_again(const backward_call& call, const prepared_contraction& c) {
  const bool from_kept = c.before.reads.kept >= 0;
  const optional_tensor& from = from_kept ? call.resumed : call.x;
  const std::string& text = call.line.line.text;
  ONEPASS_CHECK(from.has_value(), "onepass: backward of \"", text, "\" reads ", from_kept ? "a kept value" : "x");
  if (c.again.line.words.empty()) return *from;
  std::vector<Tensor> operands;
  for (int i = c.parts.weight - c.again.line.operands; i < c.parts.weight; ++i) {
    const optional_tensor& o = call.operands[static_cast<std::size_t>(i)];
    ONEPASS_CHECK(o.has_value(), "onepass: backward of \"", text, "\" reads operand ", i);
    operands.push_back(*o);
  }
  return forward({*from, operands, c.again, call.dropout_state, false}).front();
}

}  // namespace

std::vector<Tensor> forward_with_linear(const forward_call& call) {
  const prepared_contraction& c = *call.line.contraction;
  check_operand_count(call.line, call.operands.size());
  const int weight = c.parts.weight, operands = call.line.line.operands;
  const Tensor& w = call.operands[static_cast<std::size_t>(weight)];
  check_weight(call.line, call.x, w);
  std::vector<Tensor> kept, statistics;
  Tensor input = call.x;
  if (!c.before.line.words.empty()) {
    const bool saves = call.save_statistics && c.before.reads.statistics;
    std::vector<Tensor> before =
        forward({call.x, part_of(call.operands, 0, weight), c.before, call.dropout_state, saves});
    if (saves) statistics.push_back(before.back()), before.pop_back();
    input = before.front();
    kept.assign(before.begin() + 1, before.end());
  }
  const bool adds_bias = adds_bias_only(c.behind.line, call.operands, w);
  const optional_tensor bias = adds_bias ? in_dtype(call.operands.back(), dtype_of(w)) : optional_tensor();
  const Tensor product = matrix_product(as_matrix(in_dtype(input, dtype_of(w)), w.size(1)),
                                        torch::stable::transpose(w, 0, 1), call.x, bias ? &*bias : nullptr);
  std::vector<Tensor> results{product};
  if (!c.behind.line.words.empty() && !adds_bias)
    results = forward({product, part_of(call.operands, weight + 1, operands), c.behind, call.dropout_state, false});
  results.insert(results.begin() + 1, kept.begin(), kept.end());
  if (call.save_statistics && call.line.reads.product) results.push_back(product);
  results.insert(results.end(), statistics.begin(), statistics.end());
  return results;
}

std::vector<Tensor> backward_with_linear(const backward_call& call, const linear_saved& saved) {
  const prepared_contraction& c = *call.line.contraction;
  const spec::line& line = call.line.line;
  const int weight = c.parts.weight, keeps_before = c.before.line.keeps;
  check_backward(call);
  const Tensor& dy = call.gradients[0];
  const spec::contraction_gradients plan = spec::plan_gradients(
      c.parts, saved.x, spec::operand_facts_of(call.operand_types.data(), call.operand_types.size()),
      static_cast<std::uint64_t>(call.wanted));
  const optional_tensor none;

  std::vector<Tensor> behind;
  if (!plan.behind.outputs.empty()) {
    std::vector<Tensor> given = part_of(call.gradients, 1 + keeps_before, 1 + line.keeps);
    given.insert(given.begin(), dy);
    behind = backward({given, saved.product, part_of(call.operands, weight + 1, line.operands), saved.resumed_behind,
                       none, call.dropout_state, c.behind, part_of(call.operand_types, weight + 1, line.operands),
                       static_cast<std::int64_t>(plan.wants_behind)});
  }
  const auto kept_behind = [&](std::vector<Tensor>& results) {
    for (const int output : plan.kept_outputs) results.push_back(behind[static_cast<std::size_t>(output)]);
  };
  std::vector<Tensor> results;
  if (!plan.wants_input && !plan.wants_weight) {
    kept_behind(results);
    return results;
  }

  const optional_tensor& w = call.operands[static_cast<std::size_t>(weight)];
  ONEPASS_CHECK(w.has_value(), "onepass: backward of \"", line.text, "\" reads operand ", weight);
  const int source = plan.behind.inputs[0];
  const Tensor& product_gradient = source < 0 ? dy : behind[static_cast<std::size_t>(source)];
  const Tensor rows_gradient = as_matrix(product_gradient, w->size(0));
  const bool passes_before = plan.wants_input && !plan.before.outputs.empty();
  const bool from_result = passes_before && c.before.reads.result;
  // The backward pass of what stands before can leave what `linear` read; on the CPU not where it keeps a value.
  const bool can_leave = device_of(dy).is_cuda() || keeps_before == 0;
  const bool leaves_input = passes_before && plan.wants_weight && !from_result && can_leave;

  optional_tensor input;
  if (from_result || (plan.wants_weight && !leaves_input)) input = input_again(call, c);
  if (plan.wants_input) {
    const Tensor input_gradient = in_dtype(matrix_product(rows_gradient, *w, dy), saved.x);
    if (plan.gives_input) results.push_back(input_gradient);
    if (passes_before) {
      std::vector<Tensor> given = part_of(call.gradients, 1, 1 + keeps_before);
      given.insert(given.begin(), input_gradient);
      std::vector<Tensor> before =
          backward({given, call.x, part_of(call.operands, 0, weight), from_result ? input : call.resumed,
                    call.statistics, call.dropout_state, c.before, part_of(call.operand_types, 0, weight),
                    static_cast<std::int64_t>(plan.wants_before), leaves_input});
      if (leaves_input) input = before.back(), before.pop_back();
      results.insert(results.end(), before.begin(), before.end());
    }
  }
  if (plan.wants_weight) {
    const Tensor of_product = as_matrix(in_dtype(*input, dtype_of(*w)), w->size(1));
    results.push_back(matrix_product(transposed(rows_gradient), of_product, *w));
  }
  kept_behind(results);
  return results;
}

}  // namespace onepass::binding
