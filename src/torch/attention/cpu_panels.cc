// src/cpu/attention.h for tensors: allocates results, and says which calls take panels.
#include "src/torch/attention/cpu_panels.h"

#include "src/cpu/attention.h"
#include "src/torch/attention/batches.h"
#include "src/torch/attention/order.h"
#include "src/torch/check.h"
#include "src/torch/matrix_product.h"
#include "src/torch/call/run.h"

namespace onepass::binding {
namespace {

using optional_tensor = std::optional<Tensor>;

std::optional<cpu::score_panels> panels_of(const prepared_contraction& c, const Tensor& x, const Tensor& keys,
                                           bool backward) {
  if (c.behind.line.words.empty() || device_of(x).is_cuda()) return {};
  const batches of(x, keys);
  const std::optional<cpu::score_panels> by = cpu::cut_scores(c.behind.line, dtype_of(keys), of.count(), of.row_count(),
                                                              keys.size(keys.dim() - 2), x.size(x.dim() - 2));
  return by && cpu::has_many_tasks(*by, backward) ? by : std::nullopt;
}

// Tensors as GEMMs take them. It holds the copies of those that are copied.
class batches_on_cpu {
 public:
  explicit batches_on_cpu(const Tensor& keys) : own_(own_batch_sizes(keys)), type_(dtype_of(keys)) {}
  cpu::batched_matrices operator()(const Tensor& t) {
    held_.push_back(in_dtype(t, type_));
    if (const auto found = cpu::batched_matrices::of(strided_of(held_.back(), nullptr), own_)) return *found;
    held_.back() = torch::stable::contiguous(held_.back());
    return *cpu::batched_matrices::of(strided_of(held_.back(), nullptr), own_);
  }
  // A fresh result in like's order of dimensions, where GEMMs can write that; else contiguous.
  Tensor fresh(const Tensor& like, std::int64_t columns) const {
    const Tensor result = empty_in_order(like, columns, type_);
    return cpu::batched_matrices::of(strided_of(result, nullptr), own_) ? result : empty_product(like, columns, type_);
  }

 private:
  const int own_;
  const dtype type_;
  std::vector<Tensor> held_;
};

// Tensors of backward with values, beside those of scores.
struct values_backward {
  const Tensor &values, &grad_output;
  optional_tensor probabilities;       // where they were kept
  optional_tensor grad_probabilities;  // where they were kept
  bool wants_values;                   // their gradient
};

// The tensors of backward_with_scores, then the gradient of the values.
std::optional<std::vector<Tensor>> backward_of_panels(const backward_call& call, const linear_saved& saved,
                                                      const spec::contraction_gradients& plan,
                                                      const values_backward* values) {
  if (!call.x || !call.operands[0]) return {};  // not saved, since the other has no gradient
  const prepared_contraction& c = *call.line.contraction;
  const Tensor &x = *call.x, &keys = *call.operands[0];
  std::optional<cpu::score_panels> by = panels_of(c, x, keys, true);
  if (!by || !cpu::panels_go_back(c.parts, plan, values != nullptr)) return {};
  if (!plan.kept_outputs.empty()) by->period = 0;
  batches_on_cpu batched(keys);
  std::vector<Tensor> results;
  std::optional<cpu::batched_matrices> grad_queries, grad_keys;
  if (plan.wants_input) {
    const std::int64_t columns = keys.size(keys.dim() - 1);
    results.push_back(values ? batched.fresh(x, columns) : empty_product(x, columns, by->type));
    grad_queries = batched(results.back());
  }
  if (plan.wants_weight) {
    results.push_back(values ? batched.fresh(keys, keys.size(keys.dim() - 1))
                             : empty_like(shape_of(keys), by->type, device_of(keys)));
    grad_keys = batched(results.back());
  }
  optional_tensor grad_values;
  if (values && values->wants_values)
    grad_values = batched.fresh(values->values, values->values.size(values->values.dim() - 1));
  const Tensor shape = shape_of_product(x, keys);
  std::vector<Tensor> behind;
  const auto backward_with = [&](const cpu::row_call* recompute) {
    const optional_tensor resumed = values ? shape : saved.resumed_behind;
    behind = backward_behind(call, {saved.x, shape, resumed}, plan, call.statistics,
                             [&](frame& f, const spec::gradients&, const std::vector<view>&) {
                               cpu::scores_backward panels{.by = *by,
                                                           .behind = row_call_of(f),
                                                           .reads_scores = c.behind.reads.x,
                                                           .recompute = recompute,
                                                           .queries = batched(x),
                                                           .keys = batched(keys),
                                                           .grad_queries = grad_queries,
                                                           .grad_keys = grad_keys};
                               if (values) {
                                 panels.values = batched(values->values);
                                 panels.grad_output = batched(values->grad_output);
                                 if (values->probabilities) panels.probabilities = values->probabilities->data_ptr();
                                 if (values->grad_probabilities)
                                   panels.grad_probabilities = batched(*values->grad_probabilities);
                                 if (grad_values) panels.grad_values = batched(*grad_values);
                               }
                               cpu::backward_in_panels(panels);
                             });
  };
  if (values && !values->probabilities) {
    const std::vector<Tensor> operands = given_operands(call, 1, call.line.line.operands);
    forward({shape, operands, c.behind, call.dropout_state, false}, [&](frame& f) {
      const cpu::row_call recompute = row_call_of(f);
      backward_with(&recompute);
    });
  } else {
    backward_with(nullptr);
  }
  if (plan.wants_input) results.front() = in_dtype(results.front(), saved.x);
  for (const int output : plan.kept_outputs) results.push_back(behind[static_cast<std::size_t>(output)]);
  if (grad_values) results.push_back(*grad_values);
  return results;
}

}  // namespace

std::vector<Tensor> forward_in_panels(const forward_call& call, const std::optional<values_of_scores>& with) {
  const prepared_contraction& c = *call.line.contraction;
  const Tensor& keys = call.operands[0];
  const std::optional<cpu::score_panels> by = panels_of(c, call.x, keys, false);
  ONEPASS_CHECK(by, "onepass: panels were chosen for a call that they do not serve");
  const Tensor shape = shape_of_product(call.x, keys);
  batches_on_cpu batched(keys);
  std::optional<cpu::batched_matrices> values, result;
  optional_tensor probabilities, product;
  if (!with || with->keeps_probabilities) probabilities = empty_like(shape_of(shape), by->type, device_of(keys));
  if (with) {
    values = batched(with->values);
    product = batched.fresh(call.x, with->values.size(with->values.dim() - 1));
    result = batched(*product);
  }
  const std::vector<Tensor> operands(call.operands.begin() + 1, call.operands.end());
  std::vector<Tensor> results =
      forward({shape, operands, c.behind, call.dropout_state, call.save_statistics}, [&](frame& f) {
        if (!with) f.a.stream_stores = stream_stores(f, 1);
        cpu::forward_in_panels({.by = *by,
                                .behind = row_call_of(f),
                                .queries = batched(call.x),
                                .keys = batched(keys),
                                .probabilities = probabilities ? probabilities->data_ptr() : nullptr,
                                .values = values,
                                .result = result});
      });
  if (with && probabilities) results.insert(results.begin() + call.line.line.keeps, *probabilities);
  results.insert(results.begin(), with ? *product : *probabilities);
  return results;
}

std::optional<std::vector<Tensor>> backward_in_panels(const backward_call& call, const linear_saved& saved,
                                                      const spec::contraction_gradients& plan) {
  return backward_of_panels(call, saved, plan, nullptr);
}

std::optional<std::vector<Tensor>> backward_in_panels(const backward_call& call, dtype of_x,
                                                      const spec::attention_gradients& wanted,
                                                      const optional_tensor& probabilities) {
  const prepared_attention& a = *call.line.attention;
  const prepared_contraction& c = *a.scores.contraction;
  if (wanted.gives_weights || wanted.wants_scores == 0) return {};
  const Tensor &x = given(call, call.x, "x"), &keys = given(call, call.operands.front(), "its keys"),
               &values = given(call, call.operands.back(), "its values");
  const std::vector<optional_tensor> operands = part_of(call.operands, 0, a.parts.values);
  const std::vector<std::int64_t> types = part_of(call.operand_types, 0, a.parts.values);
  const spec::contraction_gradients plan =
      spec::plan_gradients(c.parts, of_x, spec::operand_facts_of(types.data(), types.size()), wanted.wants_scores);
  values_backward with{values, call.gradients[0], probabilities, {}, wanted.wants_values};
  if (a.parts.keeps_weights) with.grad_probabilities = call.gradients.back();
  const std::vector<Tensor> gradients{shape_of_product(x, keys)};
  return backward_of_panels({gradients, call.x, operands, std::nullopt, call.statistics, call.dropout_state, a.scores,
                             types, static_cast<std::int64_t>(wanted.wants_scores)},
                            {of_x, std::nullopt, std::nullopt}, plan, &with);
}

}  // namespace onepass::binding
