// One call of a line with `linear`: prologue, GEMM and epilogue.
#include "src/torch/linear/linear.h"

#include <algorithm>

#include "src/cpu/linear.h"
#include "src/torch/attention/attention.h"
#include "src/torch/check.h"
#include "src/torch/choose.h"
#include "src/torch/linear/chunks.h"
#include "src/torch/linear/small_n.h"
#include "src/torch/call/frame.h"
#include "src/torch/matrix_product.h"
#include "src/torch/linear/cpu_panels.h"
#include "src/torch/linear/one_kernel.h"
#include "src/torch/attention/probabilities.h"

namespace onepass::binding {
void check_weight(const prepared_line& line, const Tensor& x, const Tensor& weight) {
  const spec::word& word = line.line.words[static_cast<std::size_t>(line.line.linear)];
  const auto name = [&] { return operand_name(line.line, word); };
  ONEPASS_CHECK(is_floating(dtype_of(x)),
                "onepass: x must be torch.float32, torch.float64, torch.bfloat16 or torch.float16, got ",
                dtype_text(x));
  ONEPASS_CHECK(x.dim() > 0, "onepass: 'linear' needs a tensor of at least 1 dimension, got x of shape ",
                shape_text(x));
  const std::int64_t columns = x.size(x.dim() - 1);
  ONEPASS_CHECK(weight.dim() == 2 && weight.size(1) == columns, "onepass: ", name(), " must have shape [N, ", columns,
                "] for x of shape ", shape_text(x), ", got ", shape_text(weight));
  ONEPASS_CHECK(is_floating(dtype_of(weight)), "onepass: ", name(), " must be a floating point tensor, got ",
                dtype_text(weight));
  require_device(weight, device_of(x), name);
}

namespace {

using optional_tensor = std::optional<Tensor>;

// Whether the epilogue is one bias, which the library's GEMM can add.
bool adds_bias_only(const spec::line& behind, const std::vector<Tensor>& operands, const Tensor& weight) {
  if (!spec::is_one_bias(behind)) return false;
  const Tensor& bias = operands.back();
  return bias.dim() == 1 && bias.size(0) == weight.size(0) && device_of(bias) == device_of(weight);
}

// The GEMM's input is recomputed from x or from the kept value, with the operands of c.recompute.
const optional_tensor& recompute_source(const backward_call& call, const prepared_contraction& c) {
  return c.before.reads.kept >= 0 ? call.resumed : call.x;
}
std::vector<Tensor> recompute_operands(const backward_call& call, const prepared_contraction& c) {
  given(call, recompute_source(call, c), c.before.reads.kept >= 0 ? "a kept value" : "x");
  return given_operands(call, c.parts.weight - c.recompute.line.operands, c.parts.weight);
}
Tensor recompute_input(const backward_call& call, const prepared_contraction& c) {
  const std::vector<Tensor> operands = recompute_operands(call, c);
  const Tensor& source = *recompute_source(call, c);
  if (c.recompute.line.words.empty()) return source;
  return forward({source, operands, c.recompute, call.dropout_state, false}).front();
}

// Of the row words before `linear`, then of the endings behind it.
struct statistics_of_parts {
  statistics_of_parts(const prepared_contraction& c, dtype x, const optional_tensor& all) {
    if (!all) return;
    const std::int64_t rows = all->size(1), of_before = c.before.reads.statistics ? c.before.line.statistics(x) : 0;
    if (c.before.reads.statistics) before = view_of(*all, {of_before, rows}, {rows, 1});
    if (c.behind.reads.statistics)
      behind = view_of(*all, {all->size(0) - of_before, rows}, {rows, 1}, of_before * rows);
  }
  optional_tensor before, behind;
};

// A matrix of one row for each of like's, with like's leading dimensions.
Tensor shaped_like(const Tensor& like, const Tensor& matrix) {
  std::vector<std::int64_t> sizes(like.sizes().begin(), like.sizes().end()), strides(sizes.size());
  sizes.back() = matrix.size(1);
  for (std::int64_t i = static_cast<std::int64_t>(sizes.size()) - 1, stride = 1; i >= 0; --i) {
    const auto at = static_cast<std::size_t>(i);
    strides[at] = stride, stride *= std::max<std::int64_t>(sizes[at], 1);
  }
  return view_of(matrix, sizes, strides);
}

bool passes_before(const spec::contraction_gradients& plan) { return plan.wants_input && !plan.before.outputs.empty(); }

// What backward is chosen by; nothing where only the epilogue has gradients, or what a kernel reads was not saved.
std::optional<choice::call> choice_of(const backward_call& call, const linear_saved& saved,
                                      const spec::contraction_gradients& plan) {
  const prepared_contraction& c = *call.line.contraction;
  const optional_tensor &w = call.operands[static_cast<std::size_t>(c.parts.weight)],
                        &source = recompute_source(call, c);
  if (!w || !source || !(plan.wants_input || plan.wants_weight)) return {};
  const spec::shape x = shape_of(*source);
  choice::call of{.of = c.parts, .sizes = {}, .named = call.line.line.how};
  of.sizes = {.rows = x.rows(), .depth = x.columns(), .columns = w->size(0), .type = dtype_of(*w)};
  of.backward = true, of.one_dtype = saved.x == dtype_of(*w), of.from_input = c.before.reads.result;
  of.gives_more = plan.gives_input || !passes_before(plan);
  return of;
}

// How backward computes the gradients of the prologue and of the matrix.
struct way_back {
  bool passes_before;  // the prologue has a backward pass
  bool from_result;    // which starts from the GEMM's input
  bool leaves_input;   // which stores the recomputed GEMM's input, for the gradient of the matrix
  std::int64_t panel;  // rows of a panel, or 0
  bool weight_by_panels;
};
way_back way_of(const backward_call& call, const spec::contraction_gradients& plan, const Tensor& w, bool in_panels) {
  const prepared_contraction& c = *call.line.contraction;
  way_back way{};
  way.passes_before = passes_before(plan);
  way.from_result = way.passes_before && c.before.reads.result;
  if (in_panels) {
    const std::int64_t rows = shape_of(*recompute_source(call, c)).rows();
    way.panel = cpu::backward_panel_rows(c.parts, dtype_of(w), rows, w.size(1), w.size(0));
    way.weight_by_panels = plan.wants_weight && cpu::sums_in_panels(rows, w.size(0)) && !c.recompute.line.words.empty();
  }
  // On the CPU a backward pass with kept values cannot store the input.
  const bool can_leave = !way.panel && (device_of(w).is_cuda() || c.before.line.keeps == 0);
  way.leaves_input = way.passes_before && plan.wants_weight && !way.from_result && can_leave;
  return way;
}

// Backward of the prologue, from the gradient of the GEMM's result. `input`: the GEMM's input, if it is recomputed
// already; else this stores it there where way.leaves_input. weight_gradient is filled in by panels.
std::vector<Tensor> backward_before(const backward_call& call, const spec::contraction_gradients& plan,
                                    const way_back& way, const optional_tensor& statistics,
                                    const optional_tensor& rows_gradient, const Tensor& input_gradient, const Tensor& w,
                                    optional_tensor& input, optional_tensor& weight_gradient) {
  const prepared_contraction& c = *call.line.contraction;
  std::vector<Tensor> given = part_of(call.gradients, 1, 1 + c.before.line.keeps);
  given.insert(given.begin(), input_gradient);
  const std::vector<optional_tensor> operands = part_of(call.operands, 0, c.parts.weight);
  const std::vector<std::int64_t> types = part_of(call.operand_types, 0, c.parts.weight);
  const backward_call before{given,
                             call.x,
                             operands,
                             way.from_result ? input : call.resumed,
                             statistics,
                             call.dropout_state,
                             c.before,
                             types,
                             static_cast<std::int64_t>(plan.wants_before),
                             way.leaves_input,
                             !plan.gives_input};
  if (way.weight_by_panels) {
    weight_gradient = empty_like(shape_of(w), dtype_of(w), device_of(w));
    const std::vector<Tensor> inputs = recompute_operands(call, c);
    return backward_in_panels(
        before, way.panel, *rows_gradient, w,
        {{{*recompute_source(call, c), inputs, c.recompute, call.dropout_state, false}, *weight_gradient}});
  }
  if (way.panel) return backward_in_panels(before, way.panel, *rows_gradient, w, {});
  std::vector<Tensor> results = backward(before);
  if (way.leaves_input) input = results.back(), results.pop_back();
  return results;
}

}  // namespace

std::vector<Tensor> backward_behind(const backward_call& call, const linear_saved& saved,
                                    const spec::contraction_gradients& plan, const optional_tensor& statistics,
                                    const backward_runner& runner, bool gives_shared) {
  if (plan.behind.outputs.empty()) return {};
  const prepared_contraction& c = *call.line.contraction;
  const spec::line& line = call.line.line;
  const int keeps_before = c.before.line.keeps, first = c.parts.weight + 1;
  std::vector<Tensor> given = part_of(call.gradients, 1 + keeps_before, 1 + line.keeps);
  given.insert(given.begin(), call.gradients[0]);
  const auto& shared = plan.kept_outputs;
  const bool stores = gives_shared && std::find(shared.begin(), shared.end(), plan.behind.inputs[0]) != shared.end();
  return backward({given, saved.product, part_of(call.operands, first, line.operands), saved.resumed_behind, statistics,
                   call.dropout_state, c.behind, part_of(call.operand_types, first, line.operands),
                   static_cast<std::int64_t>(plan.wants_behind), false, false, runner && !stores},
                  runner);
}

namespace {

choice::call choice_of(const forward_call& call, const Tensor& w) {
  const spec::shape x = shape_of(call.x);
  choice::call c{.of = call.line.contraction->parts, .sizes = {}, .named = call.line.line.how};
  c.sizes = {.rows = x.rows(),
             .depth = x.columns(),
             .columns = w.size(0),
             .type = dtype_of(w),
             .saves_product = call.save_statistics && call.line.reads.product};
  c.one_dtype = dtype_of(call.x) == dtype_of(w);
  return c;
}

// Statistics of the same rows, (some, rows) and (others, rows).
Tensor one_below_other(const Tensor& above, const Tensor& below) {
  const std::int64_t rows = above.size(1), sizes[2] = {above.size(0) + below.size(0), rows};
  ONEPASS_CHECK(
      dtype_of(above) == dtype_of(below),
      "onepass: expected x and the matrix of 'linear' both to be torch.float64, or neither, in a line with row "
      "words before it and endings behind it");
  const Tensor all = empty(sizes, 2, dtype_of(above), device_of(above));
  Tensor first = view_of(all, {above.size(0), rows}, {rows, 1}),
         last = view_of(all, {below.size(0), rows}, {rows, 1}, above.numel());
  torch::stable::copy_(first, above), torch::stable::copy_(last, below);
  return all;
}

}  // namespace

std::vector<Tensor> forward_with_linear(const forward_call& call) {
  const prepared_contraction& c = *call.line.contraction;
  check_operand_count(call.line, call.operands.size());
  const int weight = c.parts.weight, operands = call.line.line.operands;
  const Tensor& w = call.operands[static_cast<std::size_t>(weight)];
  check_weight(call.line, call.x, w);
  std::optional<std::vector<Tensor>> made;
  const choice::implementation by = take_way(choice_of(call, w), device_of(w), "linear", [&](const choice::way& way) {
    if (way.by == choice::implementation::chunks) return true;
    if (!device_of(w).is_cuda()) return way.by == choice::implementation::panels || has_small_n_kernels(call, w);
    made = forward_in_one_kernel(call, way);
    return made.has_value();
  });
  if (made) return *made;
  const bool small_n = by == choice::implementation::small_n, in_chunks = by == choice::implementation::chunks;
  const bool adds_bias = !small_n && adds_bias_only(c.behind.line, call.operands, w);
  const optional_tensor bias = adds_bias ? in_dtype(call.operands.back(), dtype_of(w)) : optional_tensor();
  const bool saves = call.save_statistics && c.before.reads.statistics,
             saves_behind = call.save_statistics && c.behind.reads.statistics;
  const std::vector<Tensor> operands_before = part_of(call.operands, 0, weight),
                            operands_behind = part_of(call.operands, weight + 1, operands);
  const forward_call before{call.x, operands_before, c.before, call.dropout_state, saves};
  std::vector<Tensor> kept, results, statistics;
  std::optional<Tensor> product;
  if (small_n) {
    product = empty_product(call.x, w.size(0), dtype_of(w));
    kept = forward_small_n(call, saves, w, *product);
  } else if (by == choice::implementation::panels) {
    linear_results all = forward_in_panels(call, before);
    kept = std::move(all.kept), results = std::move(all.results), product = all.product;
  } else {
    Tensor input = call.x;
    if (!c.before.line.words.empty()) {
      kept = forward(before);
      input = kept.front();
      kept.erase(kept.begin());
    }
    const Tensor rows = as_matrix(in_dtype(input, dtype_of(w)), w.size(1));
    if (in_chunks) results = numbers_in_chunks(call, rows, saves_behind);
    else product = matrix_product(rows, transposed(w), call.x, bias ? &*bias : nullptr);
  }
  if (saves) statistics.push_back(kept.back()), kept.pop_back();
  if (results.empty()) {
    if (c.behind.line.words.empty() || adds_bias) results = {*product};
    else results = forward({*product, operands_behind, c.behind, call.dropout_state, saves_behind});
  }
  if (saves_behind) statistics.push_back(results.back()), results.pop_back();
  results.insert(results.begin() + 1, kept.begin(), kept.end());
  if (call.save_statistics && call.line.reads.product) results.push_back(*product);
  if (statistics.size() == 2) statistics = {one_below_other(statistics[0], statistics[1])};
  results.insert(results.end(), statistics.begin(), statistics.end());
  return results;
}

namespace {

// The kernels of a product have columns for all rows.
void check_columns(const forward_call& call) {
  const spec::line& line = call.line.line;
  for (int i = 0; i < line.operands; ++i) {
    const spec::word& w = line.operand_word(i);
    const Tensor& t = call.operands[static_cast<std::size_t>(i)];
    ONEPASS_CHECK(w.about->operand != operand_kind::column || t.dim() == 1, "onepass: ", operand_name(line, w),
                  " must have one dimension in a line with a contraction, got shape ", shape_text(t));
  }
}

// What backward has made of the GEMM and of what stands behind it.
struct made_behind {
  std::vector<Tensor> kept;  // of plan.kept_outputs
  optional_tensor input;     // of the GEMM, where it is recomputed already
  optional_tensor rows_gradient, input_gradient, weight_gradient;
};

// The gradients of the whole line. like: has a row for each of x's.
std::vector<Tensor> gradients_of_line(const backward_call& call, dtype x, const spec::contraction_gradients& plan,
                                      const way_back& way, const Tensor& w, const Tensor& like, made_behind made) {
  const prepared_contraction& c = *call.line.contraction;
  std::vector<Tensor> results;
  if (plan.wants_input) {
    const Tensor input_gradient = way.panel
                                      ? *recompute_source(call, c)
                                      : in_dtype(made.input_gradient ? shaped_like(like, *made.input_gradient)
                                                                     : matrix_product(*made.rows_gradient, w, like),
                                                 x);
    if (plan.gives_input) results.push_back(input_gradient);
    if (way.passes_before) {
      const statistics_of_parts statistics(c, x, call.statistics);
      const std::vector<Tensor> before = backward_before(call, plan, way, statistics.before, made.rows_gradient,
                                                         input_gradient, w, made.input, made.weight_gradient);
      results.insert(results.end(), before.begin(), before.end());
    }
  }
  if (plan.wants_weight && !made.weight_gradient) {
    const Tensor of_product = as_matrix(in_dtype(*made.input, dtype_of(w)), w.size(1));
    made.weight_gradient = matrix_product(transposed(*made.rows_gradient), of_product, w);
  }
  if (made.weight_gradient) results.push_back(*made.weight_gradient);
  results.insert(results.end(), made.kept.begin(), made.kept.end());
  return results;
}

}  // namespace

std::vector<Tensor> backward_with_linear(const backward_call& call, const linear_saved& saved) {
  const prepared_contraction& c = *call.line.contraction;
  check_backward(call);
  const Tensor& dy = call.gradients[0];
  const spec::contraction_gradients plan = spec::plan_gradients(
      c.parts, saved.x, spec::operand_facts_of(call.operand_types.data(), call.operand_types.size()),
      static_cast<std::uint64_t>(call.wanted));
  const optional_tensor& w = call.operands[static_cast<std::size_t>(c.parts.weight)];
  std::optional<std::vector<Tensor>> all;
  choice::implementation by = choice::implementation::library;
  if (const auto of = choice_of(call, saved, plan)) {
    by = take_way(*of, device_of(*w), nullptr, [&](const choice::way& way) {
      if (way.by == choice::implementation::small_n) all = backward_small_n(call, saved, plan);
      return way.by == choice::implementation::panels || way.by == choice::implementation::chunks || all;
    });
  }
  if (all) return *all;
  made_behind made;
  const optional_tensor statistics = statistics_of_parts(c, saved.x, call.statistics).behind;
  const bool again = spec::gives_numbers(c.parts) && c.behind.reads.x;  // the GEMM runs again
  if (again) made.input = recompute_input(call, c);
  const Tensor like = !spec::gives_numbers(c.parts) ? dy : again ? *made.input : *saved.resumed_behind;
  if (by == choice::implementation::chunks) {
    chunked_results chunks = gradients_in_chunks(call, plan, *made.input, statistics);
    made.kept = std::move(chunks.behind), made.input_gradient = chunks.input, made.weight_gradient = chunks.weight;
    return gradients_of_line(call, saved.x, plan, way_of(call, plan, *w, false), *w, like, std::move(made));
  }
  optional_tensor product = saved.product;
  if (again) product = matrix_product(as_matrix(in_dtype(*made.input, dtype_of(*w)), w->size(1)), transposed(*w), like);
  const std::vector<Tensor> behind = backward_behind(call, {saved.x, product, saved.resumed_behind}, plan, statistics);
  for (const int output : plan.kept_outputs) made.kept.push_back(behind[static_cast<std::size_t>(output)]);
  if (!plan.wants_input && !plan.wants_weight) return made.kept;

  given_operand(call, c.parts.weight);
  const int from = plan.behind.inputs[0];
  made.rows_gradient = as_matrix(from < 0 ? dy : behind[static_cast<std::size_t>(from)], w->size(0));
  const way_back way = way_of(call, plan, *w, by == choice::implementation::panels);
  const bool wants_input = way.from_result || (plan.wants_weight && !way.leaves_input && !way.weight_by_panels);
  if (!made.input && wants_input) made.input = recompute_input(call, c);
  return gradients_of_line(call, saved.x, plan, way, *w, like, std::move(made));
}

std::vector<Tensor> forward_with_gradients(const forward_call& call, const std::vector<Tensor>& gradients,
                                           const std::vector<std::int64_t>& types, std::int64_t wanted) {
  const prepared_line& line = call.line;
  ONEPASS_CHECK(line.contraction && spec::why_not_chunked(line.contraction->parts).empty() &&
                    line.contraction->before.line.keeps == 0,
                "onepass: gradients beside forward are for lines whose results are all numbers behind 'linear', got \"",
                line.line.text, "\"");
  const prepared_contraction& c = *line.contraction;
  check_operand_count(line, call.operands.size());
  const Tensor& w = call.operands[static_cast<std::size_t>(c.parts.weight)];
  check_weight(line, call.x, w);
  const spec::contraction_gradients plan =
      spec::plan_gradients(c.parts, dtype_of(call.x), spec::operand_facts_of(types.data(), types.size()),
                           static_cast<std::uint64_t>(wanted));
  check_columns(call);
  const bool saves = c.before.reads.statistics;
  std::vector<Tensor> before{call.x};
  if (!c.before.line.words.empty())
    before = forward({call.x, part_of(call.operands, 0, c.parts.weight), c.before, call.dropout_state, saves});
  const optional_tensor x = call.x, none, statistics = saves ? before.back() : none;
  const std::vector<optional_tensor> operands(call.operands.begin(), call.operands.end());
  const backward_call back{gradients, x, operands, none, statistics, call.dropout_state, line, types, wanted};
  check_backward(back);
  made_behind made;
  made.input = before.front();
  chunked_results chunks = numbers_and_gradients_in_chunks(call, back, plan, before.front());
  made.kept = std::move(chunks.behind), made.input_gradient = chunks.input, made.weight_gradient = chunks.weight;
  std::vector<Tensor> results = std::move(chunks.numbers);
  const std::vector<Tensor> all =
      gradients_of_line(back, dtype_of(call.x), plan, way_of(back, plan, w, false), w, before.front(), std::move(made));
  results.insert(results.end(), all.begin(), all.end());
  return results;
}

std::vector<Tensor> forward_of_contraction(const forward_call& call) {
  const prepared_line& line = call.line;
  check_operand_count(line, call.operands.size());
  check_columns(call);
  if (line.attention) return forward_with_attention(call);
  if (!line.line.scores()) return forward_with_linear(call);
  return forward_with_scores(
      {call.x, call.operands, line, call.dropout_state, call.save_statistics && line.reads.statistics});
}

std::vector<Tensor> backward_of_contraction(const backward_call& call, const linear_saved& saved) {
  if (call.line.attention) return backward_with_attention(call, saved);
  return call.line.line.scores() ? backward_with_scores(call, saved) : backward_with_linear(call, saved);
}

}  // namespace onepass::binding
