// One call of a line with `scores` and `values`, forward and backward.
#include "src/torch/attention/attention.h"

#include "src/torch/attention/batches.h"
#include "src/torch/attention/cpu_panels.h"
#include "src/torch/attention/cuda_kernels.h"
#include "src/torch/attention/order.h"
#include "src/torch/attention/probabilities.h"
#include "src/torch/check.h"
#include "src/torch/choose.h"
#include "src/torch/call/frame.h"
#include "src/torch/matrix_product.h"
#include "src/torch/call/run.h"

namespace onepass::binding {
namespace {

using optional_tensor = std::optional<Tensor>;

void check_values(const prepared_line& line, const Tensor& keys, const Tensor& values) {
  const auto name = [&] { return operand_name(line.line, line.line.words.back()); };
  const int dim = static_cast<int>(keys.dim());
  bool fits = values.dim() == dim;
  for (int i = 0; fits && i < dim - 1; ++i) fits = values.size(i) == keys.size(i);
  ONEPASS_CHECK(fits, "onepass: ", name(), " must have the keys' shape ", shape_text(keys),
                " but for the last size, got ", shape_text(values));
  ONEPASS_CHECK(dtype_of(values) == dtype_of(keys), "onepass: ", name(), " must have the keys' dtype ",
                dtype_text(keys), ", got ", dtype_text(values));
  require_device(values, device_of(keys), name);
}

choice::call choice_of(const prepared_line& line, const Tensor& x, const Tensor& keys, const Tensor& values) {
  choice::call c = choice_of_scores(line.attention->scores, x, keys);
  c.named = line.line.how;
  c.values = true, c.value_depth = values.size(values.dim() - 1);
  c.gives_more = line.line.keeps > 0;
  return c;
}

// A result in like's order of dimensions, where the kernels can write that; else contiguous.
Tensor fresh_for_kernels(const Tensor& like, std::int64_t columns, const Tensor& keys) {
  const Tensor result = empty_in_order(like, columns, dtype_of(keys));
  return are_batched_rows(result, keys) ? result : empty_product(like, columns, dtype_of(keys));
}

// Forward in one kernel on CUDA; none where the tensors do not suit it.
std::optional<std::vector<Tensor>> forward_in_one_kernel(const forward_call& call, choice::implementation by) {
  const prepared_contraction& c = *call.line.attention->scores.contraction;
  const Tensor &keys = call.operands.front(), &values = call.operands.back();
  const device on = device_of(keys);
  const Tensor scores = shape_of_product(call.x, keys);
  frame behind(c.behind, scores, "x");
  behind.enter(scores, call.operands, 1, call.dropout_state);
  std::vector<Tensor> results{fresh_for_kernels(call.x, values.size(values.dim() - 1), keys)};
  if (call.save_statistics) results.push_back(behind.fresh_statistics());
  behind.lay_out(true);
  const cuda::request leaving = request_of(behind, false);
  const torch::stable::accelerator::DeviceGuard guard(on.index);
  const values_and_output to{&values, &results[0]};
  const bool launched =
      by == choice::implementation::warps
          ? launch_forward_sm80(c, leaving, behind.a, call.x, keys, to)
          : launch_forward_sm90(c.parts, by, {.behind = leaving, .a_behind = behind.a}, call.x, keys, to);
  if (!launched) return {};
  return results;
}

// Backward in kernels that write nothing of the scores' size, where they serve; gives the tensors of the plan.
class backward_kernels {
 public:
  backward_kernels(const backward_call& call, dtype of_x, const spec::attention_gradients& wanted)
      : call_(call), of_x_(of_x), wanted_(wanted), c_(*call.line.attention->scores.contraction) {}

  std::optional<std::vector<Tensor>> run() const {
    const Tensor &x = given(call_, call_.x, "x"), &keys = given(call_, call_.operands.front(), "its keys"),
                 &values = given(call_, call_.operands.back(), "its values");
    const device on = device_of(keys);
    if (!on.is_cuda() || wanted_.wants_scores == 0) return {};
    const std::vector<std::int64_t> types = part_of(call_.operand_types, 0, call_.line.attention->parts.values);
    const spec::contraction_gradients plan =
        spec::plan_gradients(c_.parts, of_x_, spec::operand_facts_of(types.data(), types.size()), wanted_.wants_scores);
    choice::call of = choice_of(call_.line, x, keys, values);
    of.backward = true, of.one_dtype = of_x_ == dtype_of(keys);
    of.gives_more = of.gives_more || gives_more(plan);
    std::optional<std::vector<Tensor>> results;
    take_way(of, on, nullptr, [&](const choice::way& way) {
      results = launched(way.by, plan);
      return results.has_value();
    });
    return results;
  }

 private:
  // Whether the plan asks for gradients that these kernels do not compute, or lacks an input of theirs.
  bool gives_more(const spec::contraction_gradients& plan) const {
    if (wanted_.gives_weights || !call_.resumed) return true;
    const std::vector<spec::gradient_output>& outputs = plan.behind.outputs;
    const auto of_column = [](const spec::gradient_output& output) { return output.column; };
    return std::count(plan.kept_outputs.begin(), plan.kept_outputs.end(), plan.behind.inputs[0]) > 0 ||
           std::any_of(outputs.begin(), outputs.end(), of_column);
  }

  std::optional<std::vector<Tensor>> launched(choice::implementation by,
                                              const spec::contraction_gradients& plan) const {
    const Tensor &x = *call_.x, &keys = *call_.operands.front(), &values = *call_.operands.back();
    const Tensor scores = shape_of_product(x, keys);
    const std::vector<Tensor> operands = given_operands(call_, 1, call_.line.attention->parts.values);
    frame behind(c_.behind, scores, "x");
    behind.enter(scores, operands, 0, call_.dropout_state);
    behind.statistics(given(call_, call_.statistics, "the row statistics"));
    std::vector<Tensor> results;
    const auto fresh = [&](const Tensor& like) {
      results.push_back(fresh_for_kernels(like, like.size(like.dim() - 1), keys));
      return results.back();
    };
    std::optional<Tensor> grad_queries, grad_keys, grad_values;
    if (plan.wants_input) grad_queries = fresh(x);
    if (plan.wants_weight) grad_keys = fresh(keys);
    for (const int output : plan.kept_outputs) {
      const spec::gradient_output& of = plan.behind.outputs[static_cast<std::size_t>(output)];
      results.push_back(behind.output(behind.a.operand_gradient[of.input - 1], of.type));
    }
    if (wanted_.wants_values) grad_values = fresh(values);
    behind.lay_out(true);
    cuda::request request = request_of(behind, false);
    request.wants_tensor = plan.behind.wants_tensor;
    const torch::stable::accelerator::DeviceGuard guard(behind.on.index);
    const auto to = [](const optional_tensor& t) { return t ? &*t : nullptr; };
    const auto launch = [&](const auto& kernels) {
      return kernels(c_.parts, cuda::attention_call{.behind = request, .a_behind = behind.a}, x, keys, values,
                     *call_.resumed, call_.gradients[0],
                     attention_gradient_tensors{to(grad_queries), to(grad_keys), to(grad_values)});
    };
    if (by == choice::implementation::warps ? launch(launch_backward_sm80) : launch(launch_backward_sm90))
      return results;
    return {};
  }

  const backward_call& call_;
  const dtype of_x_;
  const spec::attention_gradients& wanted_;
  const prepared_contraction& c_;
};

// Recomputes the probabilities before `values`, and the kept values.
std::vector<Tensor> recompute_probabilities(const backward_call& call) {
  const prepared_attention& a = *call.line.attention;
  const std::vector<Tensor> operands = given_operands(call, 0, a.parts.values);
  return forward_with_scores({given(call, call.x, "x"), operands, a.scores, call.dropout_state, false});
}

std::vector<Tensor> forward_by_choice(const forward_call& call) {
  const prepared_attention& a = *call.line.attention;
  check_operand_count(call.line, call.operands.size());
  const Tensor &keys = call.operands.front(), &values = call.operands.back();
  check_keys(a.scores, call.x, keys);
  check_values(call.line, keys, values);
  const std::vector<Tensor> operands = part_of(call.operands, 0, a.parts.values);
  const forward_call scores{call.x, operands, a.scores, call.dropout_state,
                            call.save_statistics && call.line.reads.statistics};
  std::optional<std::vector<Tensor>> made;
  take_way(choice_of(call.line, call.x, keys, values), device_of(keys), "scores", [&](const choice::way& way) {
    if (way.by == choice::implementation::panels)
      made = forward_in_panels(scores, values_of_scores{values, a.parts.keeps_weights});
    else made = forward_in_one_kernel(call, way.by);
    return made.has_value();
  });
  if (made) return *made;
  std::vector<Tensor> results = forward_with_scores(scores);
  const Tensor weights = results[0];
  const batches of(call.x, keys);
  results[0] = empty_product(call.x, values.size(values.dim() - 1), dtype_of(keys));
  multiply_batches(of.rows(results[0]), of.rows(weights), of.keys(values));
  if (a.parts.keeps_weights) results.insert(results.begin() + 1 + a.scores.line.keeps, weights);
  return results;
}

std::vector<Tensor> backward_by_choice(const backward_call& call, const linear_saved& saved,
                                       const spec::attention_gradients& plan) {
  const prepared_attention& a = *call.line.attention;
  const Tensor &keys = given(call, call.operands.front(), "its keys"),
               &values = given(call, call.operands.back(), "its values");
  if (std::optional<std::vector<Tensor>> made = backward_kernels(call, saved.x, plan).run()) return *made;
  const batches of(call.gradients[0], keys);
  const Tensor rows = of.rows(call.gradients[0]);
  const spec::reads& reads = a.scores.reads;
  const bool has_weights = a.parts.keeps_weights && reads.kept_behind < 0;
  if (call.line.line.how != spec::strategy::unfused) {
    const optional_tensor weights = has_weights ? saved.resumed_behind : std::nullopt;
    if (std::optional<std::vector<Tensor>> results = backward_in_panels(call, saved.x, plan, weights)) return *results;
  }
  std::vector<Tensor> recomputed;
  if (has_weights) recomputed.push_back(*saved.resumed_behind);
  else recomputed = recompute_probabilities(call);
  std::vector<Tensor> results;
  if (plan.wants_scores != 0) {
    std::vector<Tensor> gradients{empty_like(shape_of(recomputed[0]), dtype_of(keys), device_of(keys))};
    optional_tensor kept;
    if (a.parts.keeps_weights) kept = of.rows(call.gradients.back());
    multiply_batches(of.rows(gradients[0]), rows, transposed(of.keys(values)), kept ? &*kept : nullptr);
    gradients.insert(gradients.end(), call.gradients.begin() + 1, call.gradients.begin() + 1 + a.scores.line.keeps);
    optional_tensor resumed;
    if (reads.result_behind) resumed = recomputed[0];
    if (reads.kept_behind >= 0) resumed = recomputed[1 + static_cast<std::size_t>(reads.kept_behind)];
    const std::vector<optional_tensor> operands = part_of(call.operands, 0, a.parts.values);
    const std::vector<std::int64_t> types = part_of(call.operand_types, 0, a.parts.values);
    results = backward_with_scores({gradients, call.x, operands, std::nullopt, call.statistics, call.dropout_state,
                                    a.scores, types, static_cast<std::int64_t>(plan.wants_scores)},
                                   {saved.x, std::nullopt, resumed});
    if (plan.gives_weights) results.push_back(gradients[0]);
  }
  if (plan.wants_values) {
    results.push_back(empty_like(shape_of(values), dtype_of(values), device_of(values)));
    multiply_batches(of.keys(results.back()), transposed(of.rows(recomputed[0])), rows);
  }
  return results;
}

// What the input is, counted from x on, if its gradient lies in its order of dimensions.
const optional_tensor* ordered_input(const backward_call& call, int input) {
  if (input == 0) return &call.x;
  const bool keeps_rows = input == 1 || input == static_cast<int>(call.operands.size());  // keys, values
  return keeps_rows ? &call.operands[static_cast<std::size_t>(input) - 1] : nullptr;
}

}  // namespace

std::vector<Tensor> forward_with_attention(const forward_call& call) {
  std::vector<Tensor> results = forward_by_choice(call);
  results[0] = in_order(call.x, results[0]);
  return results;
}

std::vector<Tensor> backward_with_attention(const backward_call& call, const linear_saved& saved) {
  check_backward(call);
  const spec::attention_gradients plan = spec::plan_gradients(
      call.line.attention->parts, saved.x, spec::operand_facts_of(call.operand_types.data(), call.operand_types.size()),
      static_cast<std::uint64_t>(call.wanted));
  std::vector<Tensor> results = backward_by_choice(call, saved, plan);
  for (std::size_t i = 0; i < results.size(); ++i) {
    const optional_tensor* like = ordered_input(call, plan.all.outputs[i].input);
    if (like && *like) results[i] = in_order(**like, results[i]);
  }
  return results;
}

}  // namespace onepass::binding
