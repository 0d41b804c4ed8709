// One call of a line that begins with `scores`, without `values`, forward and backward.
#include "src/torch/attention/probabilities.h"

#include "src/torch/attention/batches.h"
#include "src/torch/attention/cpu_panels.h"
#include "src/torch/attention/cuda_kernels.h"
#include "src/torch/check.h"
#include "src/torch/choose.h"
#include "src/torch/call/frame.h"
#include "src/torch/matrix_product.h"
#include "src/torch/call/run.h"

namespace onepass::binding {
namespace {

Tensor scores_of(const Tensor& x, const Tensor& keys) {
  const batches of(x, keys);
  Tensor result = empty_product(x, keys.size(keys.dim() - 2), dtype_of(keys));
  multiply_batches(of.rows(result), of.rows(x), transposed(of.keys(keys)));
  return result;
}

// As cuda::count_key_masks.
int count_key_masks(const forward_call& call) {
  const Tensor& keys = call.operands[0];
  int count = 0;
  for (const int i : spec::leading_masks(call.line.contraction->parts.behind)) {
    const Tensor& mask = call.operands[static_cast<std::size_t>(i) + 1];
    const int dim = static_cast<int>(mask.dim());
    if (dtype_of(mask) != dtype::boolean) break;
    count += dim > 0 && mask.size(dim - 1) == keys.size(keys.dim() - 2) && mask.stride(dim - 1) == 1 &&
             (dim == 1 || mask.size(dim - 2) == 1 || mask.stride(dim - 2) == 0);
  }
  return count;
}

// Forward in one kernel on CUDA; none where the tensors do not suit it.
std::optional<std::vector<Tensor>> forward_in_one_kernel(const forward_call& call, choice::implementation by) {
  const prepared_contraction& c = *call.line.contraction;
  const Tensor& keys = call.operands[0];
  const device on = device_of(keys);
  const Tensor result = empty_product(call.x, keys.size(keys.dim() - 2), dtype_of(keys));
  frame behind(c.behind, result, "x");
  behind.enter(result, call.operands, 1, call.dropout_state);
  behind.input(result, behind.a.y);
  std::vector<Tensor> results{result};
  for (int k = 0; k < behind.line.line.keeps; ++k) results.push_back(behind.output(behind.a.kept[k], behind.type));
  if (call.save_statistics) results.push_back(behind.fresh_statistics());
  behind.lay_out(true);
  const cuda::request leaving = request_of(behind, false);
  const torch::stable::accelerator::DeviceGuard guard(on.index);
  const bool launched =
      by == choice::implementation::warps
          ? launch_forward_sm80(c, leaving, behind.a, call.x, keys, {})
          : launch_forward_sm90(c.parts, by, {.behind = leaving, .a_behind = behind.a}, call.x, keys, {});
  if (!launched) return {};
  return results;
}

// Whether forward's statistics may be those of scores that were not rounded to 16 bits, as the library's are. Where one
// key has almost all of a row's probability, such statistics do not fit rounded scores.
bool were_of_unrounded_scores(const backward_call& call, const Tensor& product) {
  return call.line.line.how != spec::strategy::unfused && device_of(product).is_cuda() &&
         size_of(dtype_of(product)) == 2;
}
Tensor recompute_statistics(const backward_call& call, const Tensor& product) {
  frame behind(call.line.contraction->behind, product, "x");
  behind.input(product, behind.a.x);
  for (int i = 0; i < behind.line.line.operands; ++i) {
    const auto at = static_cast<std::size_t>(i) + 1;
    if (call.operands[at]) behind.operand(i, *call.operands[at]);
    else behind.operand_type(i, spec::operand_facts_of(&call.operand_types[at], 1)[0].type);
  }
  behind.dropout_state(call.dropout_state);
  Tensor statistics = behind.fresh_statistics();
  behind.lay_out(true);
  run_statistics(behind);
  return statistics;
}

// dQ and dK from the probabilities and their gradient alone, in one kernel on CUDA, where it is chosen.
std::optional<std::vector<Tensor>> gradients_in_one_kernel(const backward_call& call, const linear_saved& saved,
                                                           const spec::contraction_gradients& plan) {
  if (!call.x || !call.operands[0] || !device_of(*call.operands[0]).is_cuda()) return {};
  const Tensor &x = *call.x, &keys = *call.operands[0];
  choice::call of = choice_of_scores(call.line, x, keys);
  of.backward = true, of.one_dtype = saved.x == dtype_of(keys);
  of.gives_more = !plan.wants_input || !plan.wants_weight || !plan.kept_outputs.empty() || !saved.resumed_behind;
  std::optional<std::vector<Tensor>> results;
  take_way(of, device_of(keys), nullptr, [&](const choice::way&) {
    const torch::stable::accelerator::DeviceGuard guard(device_of(keys).index);
    std::vector<Tensor> made{empty_like(shape_of(x), saved.x, device_of(x)),
                             empty_like(shape_of(keys), dtype_of(keys), device_of(keys))};
    const double scale = *spec::softmax_scale(call.line.contraction->behind.line);
    const bool launched = launch_probabilities_backward(static_cast<float>(scale), x, keys, *saved.resumed_behind,
                                                        call.gradients[0], {made[0], made[1]});
    if (launched) results = std::move(made);
    return launched;
  });
  return results;
}

}  // namespace

choice::call choice_of_scores(const prepared_line& line, const Tensor& x, const Tensor& keys) {
  const batches of(x, keys);
  const spec::shape rows = shape_of(x);
  choice::call c{.of = line.contraction->parts, .sizes = {}, .named = line.line.how};
  c.sizes = {.rows = rows.rows(),
             .depth = rows.columns(),
             .columns = keys.size(keys.dim() - 2),
             .type = dtype_of(keys),
             .matrices = of.count(),
             .group = of.row_count() / std::max<std::int64_t>(x.size(x.dim() - 2), 1)};
  c.one_dtype = dtype_of(x) == dtype_of(keys);
  return c;
}

void check_keys(const prepared_line& line, const Tensor& x, const Tensor& keys) {
  const auto name = [&] { return operand_name(line.line, line.line.words[0]); };
  const int dim = static_cast<int>(x.dim());
  ONEPASS_CHECK(dim >= 2, "onepass: 'scores' needs a tensor of at least 2 dimensions, got x of shape ", shape_text(x));
  bool fits = keys.dim() == dim && keys.size(dim - 1) == x.size(dim - 1);
  for (int i = fits ? own_batch_sizes(keys) - 1 : -1; i >= 0; --i) fits = fits && keys.size(i) == x.size(i);
  ONEPASS_CHECK(fits, "onepass: ", name(), " must have shape [..., S, ", x.size(dim - 1),
                "] with the batch sizes of x, the last of which may be 1, for x of shape ", shape_text(x), ", got ",
                shape_text(keys));
  ONEPASS_CHECK(is_floating(dtype_of(keys)), "onepass: ", name(), " must be a floating point tensor, got ",
                dtype_text(keys));
  require_device(keys, device_of(x), name);
}

std::vector<Tensor> forward_with_scores(const forward_call& call) {
  const prepared_contraction& c = *call.line.contraction;
  check_operand_count(call.line, call.operands.size());
  const Tensor& keys = call.operands[0];
  check_keys(call.line, call.x, keys);
  choice::call of = choice_of_scores(call.line, call.x, keys);
  of.sizes.key_masks = count_key_masks(call);
  std::optional<std::vector<Tensor>> made;
  take_way(of, device_of(keys), "scores", [&](const choice::way& way) {
    made = way.by == choice::implementation::panels ? forward_in_panels(call, {}) : forward_in_one_kernel(call, way.by);
    return made.has_value();
  });
  if (made) return *made;
  const Tensor product = scores_of(call.x, keys);
  if (c.behind.line.words.empty()) return {product};
  const std::vector<Tensor> behind(call.operands.begin() + 1, call.operands.end());
  return forward({product, behind, c.behind, call.dropout_state, call.save_statistics});
}

std::vector<Tensor> backward_with_scores(const backward_call& call, const linear_saved& saved) {
  const prepared_contraction& c = *call.line.contraction;
  check_backward(call);
  const spec::contraction_gradients plan = spec::plan_gradients(
      c.parts, saved.x, spec::operand_facts_of(call.operand_types.data(), call.operand_types.size()),
      static_cast<std::uint64_t>(call.wanted));
  if (call.line.line.how != spec::strategy::unfused) {
    if (std::optional<std::vector<Tensor>> results = backward_in_panels(call, saved, plan)) return *results;
    if (std::optional<std::vector<Tensor>> results = gradients_in_one_kernel(call, saved, plan)) return *results;
  }
  const Tensor& keys = given(call, call.operands[0], "its keys");
  std::optional<Tensor> product, statistics = call.statistics;
  if (c.behind.reads.x) {
    product = scores_of(given(call, call.x, "x"), keys);
    if (c.behind.reads.statistics && were_of_unrounded_scores(call, *product))
      statistics = recompute_statistics(call, *product);
  }
  const std::vector<Tensor> behind = backward_behind(call, {saved.x, product, saved.resumed_behind}, plan, statistics);
  std::vector<Tensor> results;
  if (plan.wants_input || plan.wants_weight) {
    const int from = plan.behind.inputs[0];
    const Tensor& gradient = from < 0 ? call.gradients[0] : behind[static_cast<std::size_t>(from)];
    const batches of(gradient, keys);
    const Tensor rows = of.rows(gradient);
    if (plan.wants_input) {
      const Tensor dx = empty_product(gradient, keys.size(keys.dim() - 1), dtype_of(keys));
      multiply_batches(of.rows(dx), rows, of.keys(keys));
      results.push_back(in_dtype(dx, saved.x));
    }
    if (plan.wants_weight) {
      results.push_back(empty_like(shape_of(keys), dtype_of(keys), device_of(keys)));
      multiply_batches(of.keys(results.back()), transposed(rows), of.rows(given(call, call.x, "x")));
    }
  }
  for (const int output : plan.kept_outputs) results.push_back(behind[static_cast<std::size_t>(output)]);
  return results;
}

}  // namespace onepass::binding
