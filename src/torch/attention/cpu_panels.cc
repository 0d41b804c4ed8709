// On the CPU: scores, what stands behind them and their product with values, a panel of one batch's rows at a time.
#include "src/torch/attention/cpu_panels.h"

#include <algorithm>

#include "src/choose/ways.h"
#include "src/cpu/panel_product.h"
#include "src/torch/check.h"
#include "src/torch/attention/matrices.h"
#include "src/torch/matrix_product.h"
#include "src/torch/panel.h"
#include "src/torch/run.h"

namespace onepass::binding {
namespace {

using optional_tensor = std::optional<Tensor>;

// How a call is cut. A function of shapes and dtypes only.
struct cut {
  std::int64_t batches, rows, columns;  // scores: rows of one batch, which share keys
  std::int64_t panel;                   // rows of a panel
  dtype type;
  std::int64_t period = 0;  // where row i sees the first i + 1 keys alone: with how many rows that begins anew

  // How many of the keys some rows see, as far as whole tiles go.
  std::int64_t seen(std::int64_t first, std::int64_t count) const {
    const bool within = period > 0 && first % period + count <= period;
    return within ? std::min((first % period + count + 31) / 32 * 32, columns) : columns;
  }

  std::int64_t panels() const { return (rows + panel - 1) / panel; }     // of a batch
  std::int64_t row_stride() const { return cpu::apart(type, columns); }  // of a panel in memory of its own
  std::int64_t bytes() const { return panel * row_stride() * size_of(type); }
};

std::optional<cut> cut_of(const prepared_contraction& c, const Tensor& x, const Tensor& keys, bool backward) {
  if (c.behind.line.words.empty() || device_of(x).is_cuda()) return {};
  const batches of(x, keys);
  const dtype type = dtype_of(keys);
  const std::int64_t rows = of.row_count(), columns = keys.size(keys.dim() - 2);
  if (!choice::panels_serve_scores(type, of.count(), rows, columns, backward)) return {};
  cut by{of.count(), rows, columns, choice::rows_of_score_panel(type, rows, columns), type};
  const spec::line& behind = c.behind.line;
  const bool whole_rows = behind.keeps > 0 || behind.dropouts > 0;  // kept, or drawn by their length
  if (!whole_rows && spec::is_triangular(behind) && spec::leaves_zeros(behind)) by.period = x.size(x.dim() - 2);
  return by;
}

void* at_row(const Tensor& dense, std::int64_t row) {
  return static_cast<char*>(dense.data_ptr()) + row * dense.size(dense.dim() - 1) * size_of(dtype_of(dense));
}

// What backward of `values` adds to that of scores.
struct values_backward {
  const Tensor &values, &gradient;  // of the result
  optional_tensor weights;          // where they were kept
  optional_tensor of_weights;       // their gradient, if so
  optional_tensor result;           // the gradient of the values, filled in, where it is wanted
};

// A gradient of a batch that panels add to: in float, where it is stored in 16 bits and there are several.
class batch_sum {
 public:
  batch_sum(const std::optional<matrices>& to, bool several) : to_(to), several_(several) {}
  void begin(std::int64_t batch) {
    if (!to_) return;
    result_ = sum_ = to_->whole(batch);
    if (several_ && size_of(sum_.type) == 2) {
      void* floats = floats_.at_least(sum_.rows * sum_.columns * size_of(dtype::f32));
      sum_ = {floats, dtype::f32, sum_.rows, sum_.columns, sum_.columns, 1};
    }
    clear(sum_, 0);
  }
  // To the first rows, as many as a has.
  void add(const cpu::matrix& a, const cpu::matrix& b) {
    if (!to_) return;
    cpu::matrix rows = sum_;
    rows.rows = a.rows;
    b_.take(b);
    b_.multiply(rows, a, several_);
  }
  void end() const {
    if (to_ && sum_.type != result_.type) cpu::round_to_bf16(sum_, result_);
  }

 private:
  const std::optional<matrices>& to_;
  const bool several_;
  cpu::matrix result_{}, sum_{};
  cpu::aligned_memory floats_;
  cpu::right_factor b_;
};

// Backward of batches, a panel at a time.
class backward_of_batches {
 public:
  // reads_scores: what stands behind them does.
  backward_of_batches(const cut& by, const backward_call& call, bool reads_scores, const values_backward* v)
      : by_(by),
        reads_scores_(reads_scores),
        own_(own_batch_sizes(*call.operands[0])),
        queries_(of(*call.x)),
        keys_(of(*call.operands[0])) {
    if (!v) return;
    values_ = of(v->values), gradient_ = of(v->gradient);
    weights_ = v->weights;
    if (v->of_weights) of_weights_ = of(*v->of_weights);
    if (v->result) dvalues_ = of(*v->result);
  }
  void queries_gradient_to(const Tensor& t) { dqueries_ = of(t); }
  void keys_gradient_to(const Tensor& t) { dkeys_ = of(t); }

  // again: forward of what stands behind the scores, where the weights are to be made again.
  void run(const panel_kernel* again, const panel_kernel& kernel) const {
    torch::stable::parallel_for(0, by_.batches, 1, [&](std::int64_t begin, std::int64_t end) {
      thread at(*this, again && reads_scores_);
      for (std::int64_t batch = begin; batch < end; ++batch) {
        if (again || reads_scores_) at.transposed_keys.take(transposed(keys_.whole(batch)));
        if (values_) at.transposed_values.take(transposed(values_->whole(batch)));
        if (dqueries_) at.keys.take(keys_.whole(batch));
        at.dkeys.begin(batch), at.dvalues.begin(batch);
        for (std::int64_t first = 0; first < by_.rows; first += by_.panel) panel(again, kernel, batch, first, at);
        at.dkeys.end(), at.dvalues.end();
      }
    });
  }

 private:
  struct thread {
    thread(const backward_of_batches& of, bool weights_apart)
        : scores(of.by_.bytes()),
          apart(weights_apart ? of.by_.bytes() : 0),
          gradient(of.by_.bytes()),
          dkeys(of.dkeys_, of.by_.panels() > 1),
          dvalues(of.dvalues_, of.by_.panels() > 1) {}
    cpu::aligned_memory scores, apart, gradient;
    cpu::right_factor transposed_keys, transposed_values, keys;
    batch_sum dkeys, dvalues;
  };
  matrices of(const Tensor& t) const { return {t, own_, by_.type}; }

  void panel(const panel_kernel* again, const panel_kernel& kernel, std::int64_t batch, std::int64_t first,
             thread& at) const {
    const std::int64_t count = std::min(by_.panel, by_.rows - first), row = batch * by_.rows + first,
                       seen = by_.seen(first, count);
    const auto matrix = [&](void* data) { return cpu::matrix{data, by_.type, count, seen, by_.row_stride(), 1}; };
    const auto tensor = [](view arguments::*which, const cpu::matrix& m) {
      return elsewhere{which, m.data, m.row_stride};
    };
    const cpu::matrix queries = queries_.part(batch, first, count), gradient = matrix(at.gradient.data()),
                      scores = matrix(at.scores.data());
    if (again || reads_scores_) at.transposed_keys.multiply(scores, queries, false);
    cpu::matrix x = reads_scores_ ? scores : cpu::matrix{}, y{};
    if (values_) {
      cpu::matrix weights = again && reads_scores_ ? matrix(at.apart.data()) : scores;
      if (again) {
        (*again)(row, row + count, seen, {tensor(&arguments::x, scores), tensor(&arguments::y, weights)});
      } else {
        weights.data = at_row(*weights_, row);
        weights.row_stride = by_.columns;
      }
      if (!reads_scores_) x = weights;
      y = gradient;
      const cpu::matrix given = gradient_->part(batch, first, count);
      if (of_weights_) copy(of_weights_->part(batch, first, count), gradient);
      at.transposed_values.multiply(gradient, given, of_weights_.has_value());
      at.dvalues.add(transposed(weights), given);
    }
    kernel(row, row + count, seen,
           {tensor(&arguments::x, x), tensor(&arguments::y, y), tensor(&arguments::dx, gradient)});
    if (dqueries_) at.keys.multiply(dqueries_->part(batch, first, count), gradient, false);
    at.dkeys.add(transposed(gradient), queries);
  }

  const cut& by_;
  const bool reads_scores_;
  const int own_;
  const matrices queries_, keys_;
  std::optional<matrices> values_, gradient_, of_weights_, dqueries_, dkeys_, dvalues_;
  optional_tensor weights_;
};

// The tensors of backward_with_scores, then the gradient of the values.
std::optional<std::vector<Tensor>> backward_of_panels(const backward_call& call, const linear_saved& saved,
                                                      const spec::contraction_gradients& plan,
                                                      const values_backward* values) {
  if (!call.x || !call.operands[0]) return {};  // not saved, since the other has no gradient
  const prepared_contraction& c = *call.line.contraction;
  const Tensor &x = *call.x, &keys = *call.operands[0];
  std::optional<cut> by = cut_of(c, x, keys, true);
  const std::vector<spec::gradient_output>& outputs = plan.behind.outputs;
  const auto of_column = [](const spec::gradient_output& output) { return output.column; };
  const int dscores = plan.behind.inputs[0];
  if (!by || dscores < 0 || !(plan.wants_input || plan.wants_weight) || (values && c.behind.line.keeps > 0) ||
      std::any_of(outputs.begin(), outputs.end(), of_column) ||
      std::count(plan.kept_outputs.begin(), plan.kept_outputs.end(), dscores) > 0)
    return {};
  if (!plan.kept_outputs.empty()) by->period = 0;
  backward_of_batches batches(*by, call, c.behind.reads.x, values);
  std::vector<Tensor> results;
  if (plan.wants_input) {
    results.push_back(empty_product(x, keys.size(keys.dim() - 1), by->type));
    batches.queries_gradient_to(results.back());
  }
  if (plan.wants_weight) {
    results.push_back(empty_like(shape_of(keys), by->type, device_of(keys)));
    batches.keys_gradient_to(results.back());
  }
  const Tensor shape = shape_of_product(x, keys);
  std::vector<Tensor> behind;
  const auto backward_with = [&](const panel_kernel* again) {
    const optional_tensor resumed = values ? shape : saved.resumed_behind;
    behind = backward_behind(call, {saved.x, shape, resumed}, plan, call.statistics,
                             [&](frame& f, const spec::gradients&, const std::vector<view>&) {
                               batches.run(again, panel_kernel(f, by->type, 1, true));
                             });
  };
  if (values && !values->weights) {
    const std::vector<Tensor> operands = given_operands(call, 1, call.line.line.operands);
    forward({shape, operands, c.behind, call.dropout_state, false}, [&](frame& f) {
      const panel_kernel again(f, by->type, 1, false);
      backward_with(&again);
    });
  } else {
    backward_with(nullptr);
  }
  if (plan.wants_input) results.front() = in_dtype(results.front(), saved.x);
  for (const int output : plan.kept_outputs) results.push_back(behind[static_cast<std::size_t>(output)]);
  if (values && values->result) results.push_back(*values->result);
  return results;
}

}  // namespace

std::vector<Tensor> forward_in_panels(const forward_call& call, const std::optional<values_of_scores>& with) {
  const prepared_contraction& c = *call.line.contraction;
  const Tensor& keys = call.operands[0];
  const std::optional<cut> by = cut_of(c, call.x, keys, false);
  ONEPASS_CHECK(by, "onepass: panels were chosen for a call that they do not serve");
  const device on = device_of(keys);
  const int own = own_batch_sizes(keys);
  const Tensor shape = shape_of_product(call.x, keys);
  const matrices queries(call.x, own, by->type), all_keys(keys, own, by->type);
  std::optional<matrices> values, result;
  optional_tensor weights, product;
  if (!with || with->keeps_weights) weights = empty_like(shape_of(shape), by->type, on);
  if (with) {
    values.emplace(with->values, own, by->type);
    product = empty_product(call.x, with->values.size(with->values.dim() - 1), by->type);
    result.emplace(*product, own, by->type);
  }
  const std::vector<Tensor> operands(call.operands.begin() + 1, call.operands.end());
  std::vector<Tensor> results =
      forward({shape, operands, c.behind, call.dropout_state, call.save_statistics}, [&](frame& f) {
        if (!with) f.a.stream_stores = stream_stores(f, 1);
        const panel_kernel kernel(f, by->type, 1, false);
        torch::stable::parallel_for(0, by->batches * by->panels(), 1, [&](std::int64_t begin, std::int64_t end) {
          const cpu::aligned_memory memory(by->bytes());
          cpu::right_factor of_scores, of_product;
          std::int64_t taken = -1;  // a batch
          for (std::int64_t task = begin; task < end; ++task) {
            const std::int64_t batch = task / by->panels(), first = task % by->panels() * by->panel,
                               count = std::min(by->panel, by->rows - first), row = batch * by->rows + first;
            if (batch != taken) {
              of_scores.take(transposed(all_keys.whole(batch)));
              if (with) of_product.take(values->whole(batch));
              taken = batch;
            }
            const std::int64_t seen = by->seen(first, count);
            const cpu::matrix scores{memory.data(), by->type, count, seen, by->row_stride(), 1};
            cpu::matrix made = scores;
            if (weights) {
              made = {at_row(*weights, row), by->type, count, by->columns, by->columns, 1};
              clear(made, seen);
              made.columns = seen;
            }
            of_scores.multiply(scores, queries.part(batch, first, count), false);
            kernel(row, row + count, seen,
                   {{&arguments::x, scores.data, scores.row_stride}, {&arguments::y, made.data, made.row_stride}});
            if (with) of_product.multiply(result->part(batch, first, count), made, false);
          }
        });
      });
  if (with && weights) results.insert(results.begin() + call.line.line.keeps, *weights);
  results.insert(results.begin(), with ? *product : *weights);
  return results;
}

std::optional<std::vector<Tensor>> backward_in_panels(const backward_call& call, const linear_saved& saved,
                                                      const spec::contraction_gradients& plan) {
  return backward_of_panels(call, saved, plan, nullptr);
}

std::optional<std::vector<Tensor>> backward_in_panels(const backward_call& call, dtype of_x,
                                                      const spec::attention_gradients& wanted,
                                                      const optional_tensor& weights) {
  const prepared_attention& a = *call.line.attention;
  const prepared_contraction& c = *a.scores.contraction;
  if (wanted.gives_weights || wanted.wants_scores == 0) return {};
  const Tensor &x = given(call, call.x, "x"), &keys = given(call, call.operands.front(), "its keys"),
               &values = given(call, call.operands.back(), "its values");
  const std::vector<optional_tensor> operands = part_of(call.operands, 0, a.parts.values);
  const std::vector<std::int64_t> types = part_of(call.operand_types, 0, a.parts.values);
  const spec::contraction_gradients plan =
      spec::plan_gradients(c.parts, of_x, spec::operand_facts_of(types.data(), types.size()), wanted.wants_scores);
  values_backward with{values, call.gradients[0], weights, {}, {}};
  if (a.parts.keeps_weights) with.of_weights = call.gradients.back();
  if (wanted.wants_values) with.result = empty_like(shape_of(values), dtype_of(values), device_of(values));
  const std::vector<Tensor> gradients{shape_of_product(x, keys)};
  return backward_of_panels({gradients, call.x, operands, std::nullopt, call.statistics, call.dropout_state, a.scores,
                             types, static_cast<std::int64_t>(wanted.wants_scores)},
                            {of_x, std::nullopt, std::nullopt}, plan, &with);
}

}  // namespace onepass::binding
