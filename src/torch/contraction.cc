// One call of a line with `linear`: what stands before it, the matrix product, what stands behind it.
#include "src/torch/contraction.h"

#include "src/torch/check.h"
#include "src/torch/frame.h"
#include "src/torch/matrix_product.h"
#include "src/torch/panels.h"
#include "src/torch/tiled_linear.h"

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

// What makes what `linear` took: x or the kept value, and the operands of c.again.
const optional_tensor& source_again(const backward_call& call, const prepared_contraction& c) {
  return c.before.reads.kept >= 0 ? call.resumed : call.x;
}
std::vector<Tensor> operands_again(const backward_call& call, const prepared_contraction& c) {
  const std::string& text = call.line.line.text;
  ONEPASS_CHECK(source_again(call, c).has_value(), "onepass: backward of \"", text, "\" reads ",
                c.before.reads.kept >= 0 ? "a kept value" : "x");
  std::vector<Tensor> operands;
  for (int i = c.parts.weight - c.again.line.operands; i < c.parts.weight; ++i) {
    const optional_tensor& o = call.operands[static_cast<std::size_t>(i)];
    ONEPASS_CHECK(o.has_value(), "onepass: backward of \"", text, "\" reads operand ", i);
    operands.push_back(*o);
  }
  return operands;
}
Tensor input_again(const backward_call& call, const prepared_contraction& c) {
  const std::vector<Tensor> operands = operands_again(call, c);
  const Tensor& source = *source_again(call, c);
  if (c.again.line.words.empty()) return source;
  return forward({source, operands, c.again, call.dropout_state, false}).front();
}

}  // namespace

std::vector<Tensor> forward_with_linear(const forward_call& call) {
  const prepared_contraction& c = *call.line.contraction;
  check_operand_count(call.line, call.operands.size());
  const int weight = c.parts.weight, operands = call.line.line.operands;
  const Tensor& w = call.operands[static_cast<std::size_t>(weight)];
  check_weight(call.line, call.x, w);
  if (const std::optional<std::vector<Tensor>> results = forward_tiled(call)) return *results;
  const bool adds_bias = adds_bias_only(c.behind.line, call.operands, w);
  const optional_tensor bias = adds_bias ? in_dtype(call.operands.back(), dtype_of(w)) : optional_tensor();
  const bool saves = call.save_statistics && c.before.reads.statistics;
  const std::vector<Tensor> operands_before = part_of(call.operands, 0, weight);
  const forward_call before{call.x, operands_before, c.before, call.dropout_state, saves};
  std::vector<Tensor> kept, statistics;
  Tensor product = call.x;
  if (const std::int64_t rows = panel_rows(c.parts, call.line.line.how, call.x, w)) {
    product = empty_product(call.x, w.size(0), dtype_of(w));
    kept = forward_in_panels(before, rows, w, bias ? &*bias : nullptr, as_matrix(product, w.size(0)));
  } else {
    Tensor input = call.x;
    if (!c.before.line.words.empty()) {
      kept = forward(before);
      input = kept.front();
      kept.erase(kept.begin());
    }
    product = matrix_product(as_matrix(in_dtype(input, dtype_of(w)), w.size(1)), transposed(w), call.x,
                             bias ? &*bias : nullptr);
  }
  if (saves) statistics.push_back(kept.back()), kept.pop_back();
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
  const int from = plan.behind.inputs[0];
  const Tensor& product_gradient = from < 0 ? dy : behind[static_cast<std::size_t>(from)];
  const Tensor rows_gradient = as_matrix(product_gradient, w->size(0));
  const bool from_result = plan.wants_input && c.before.reads.result && !plan.before.outputs.empty();

  const optional_tensor& source = source_again(call, c);
  const bool by_panels =
      plan.wants_input && !plan.gives_input && !plan.before.outputs.empty() && !from_result && source;
  const std::int64_t panel = by_panels ? panel_rows(c.parts, line.how, *source, *w) : 0;
  const bool weight_by_panels =
      panel && plan.wants_weight && sums_in_panels(*source, *w) && !c.again.line.words.empty();

  const optional_tensor input = (plan.wants_weight && !weight_by_panels) || from_result ? input_again(call, c) : none;
  optional_tensor weight_gradient;
  if (weight_by_panels) weight_gradient = empty_like(shape_of(*w), dtype_of(*w), device_of(*w));
  if (plan.wants_input) {
    const Tensor input_gradient = panel ? *source : in_dtype(matrix_product(rows_gradient, *w, dy), saved.x);
    if (plan.gives_input) results.push_back(input_gradient);
    if (!plan.before.outputs.empty()) {
      std::vector<Tensor> given = part_of(call.gradients, 1, 1 + keeps_before);
      given.insert(given.begin(), input_gradient);
      const std::vector<optional_tensor> operands = part_of(call.operands, 0, weight);
      const std::vector<std::int64_t> types = part_of(call.operand_types, 0, weight);
      const backward_call of_before{given,
                                    c.before.reads.x ? call.x : none,
                                    operands,
                                    from_result ? input : call.resumed,
                                    call.statistics,
                                    call.dropout_state,
                                    c.before,
                                    types,
                                    static_cast<std::int64_t>(plan.wants_before)};
      std::vector<Tensor> before;
      if (weight_by_panels) {
        const std::vector<Tensor> again = operands_again(call, c);
        before = backward_in_panels(of_before, panel, rows_gradient, *w,
                                    {{{*source, again, c.again, call.dropout_state, false}, *weight_gradient}});
      } else {
        before = panel ? backward_in_panels(of_before, panel, rows_gradient, *w, {}) : backward(of_before);
      }
      results.insert(results.end(), before.begin(), before.end());
    }
  }
  if (plan.wants_weight && !weight_gradient) {
    const Tensor of_product = as_matrix(in_dtype(*input, dtype_of(*w)), w->size(1));
    weight_gradient = matrix_product(transposed(rows_gradient), of_product, *w);
  }
  if (weight_gradient) results.push_back(*weight_gradient);
  kept_behind(results);
  return results;
}

}  // namespace onepass::binding
