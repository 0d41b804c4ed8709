// Attention on the CPU: scores, the words behind them and the GEMM with the values, for a panel of rows at a time.
#include "src/cpu/attention.h"

#include <algorithm>

#include "src/cpu/gemm/panel_product.h"
#include "src/cpu/threads.h"

namespace onepass::cpu {
namespace {

constexpr int64 kPanelBytes = 256 << 10;
constexpr int64 kFewestTasks = 4;  // with fewer, threads share one GEMM instead

int64 rows_of_panel(dtype type, int64 rows, int64 columns) {
  const int64 most = std::max<int64>(kPanelBytes / (columns * size_of(type)), 16), panels = (rows + most - 1) / most;
  return std::min(((rows + panels - 1) / panels + 15) / 16 * 16, rows);
}

// Rows of a dense matrix of the scores' size.
matrix dense_rows(void* data, const score_panels& by, int64 row, int64 count) {
  return {static_cast<char*>(data) + row * by.columns * size_of(by.type), by.type, count, by.columns, by.columns, 1};
}

// A panel of the scores' size in memory of a thread's own.
class panel_buffer {
 public:
  panel_buffer(const score_panels& by, dtype type, bool is_used = true)
      : all_{nullptr, type, by.panel, by.columns, apart(type, by.columns), 1},
        memory_(is_used ? by.panel * all_.row_stride * size_of(type) : 0) {}
  matrix rows(int64 count, int64 columns) const {
    return {memory_.data(), all_.type, count, columns, all_.row_stride, 1};
  }

 private:
  const matrix all_;
  aligned_memory memory_;
};

// A gradient of a batch to which panels add, in float where it is stored in 16 bits and there are several panels.
class batch_sum {
 public:
  batch_sum(const std::optional<batched_matrices>& to, bool several) : to_(to), several_(several) {}
  void begin(int64 batch) {
    if (!to_) return;
    result_ = sum_ = to_->whole(batch);
    if (several_ && size_of(sum_.type) == 2) {
      void* floats = floats_.at_least(sum_.rows * sum_.columns * size_of(dtype::f32));
      sum_ = {floats, dtype::f32, sum_.rows, sum_.columns, sum_.columns, 1};
    }
    clear(sum_, 0);
  }
  // Adds a · b to the first a.rows rows.
  void add(const matrix& a, const matrix& b) {
    if (!to_) return;
    matrix rows = sum_;
    rows.rows = a.rows;
    b_.take(b);
    b_.multiply(rows, a, several_);
  }
  void end() const {
    if (to_ && sum_.type != result_.type) round_to_bf16(sum_, result_);
  }

 private:
  const std::optional<batched_matrices>& to_;
  const bool several_;
  matrix result_{}, sum_{};
  aligned_memory floats_;
  right_factor b_;
};

// Backward of batches, one panel after another.
class backward_of_batches {
 public:
  explicit backward_of_batches(const scores_backward& of) : of_(of), kernel_(of.behind, 1, true) {
    if (of.recompute) recompute_.emplace(*of.recompute, 1, false);
  }

  void run() const {
    const score_panels& by = of_.by;
    in_threads(by.batches, 1, [&](int64 begin, int64 end) {
      thread at(of_, recompute_.has_value());
      for (int64 batch = begin; batch < end; ++batch) {
        if (recompute_ || of_.reads_scores) at.transposed_keys.take(transposed(of_.keys.whole(batch)));
        if (of_.values) at.transposed_values.take(transposed(of_.values->whole(batch)));
        if (of_.grad_queries) at.keys.take(of_.keys.whole(batch));
        at.dkeys.begin(batch), at.dvalues.begin(batch);
        for (int64 first = 0; first < by.rows; first += by.panel) panel(batch, first, at);
        at.dkeys.end(), at.dvalues.end();
      }
    });
  }

 private:
  struct thread {
    thread(const scores_backward& of, bool makes_probabilities)
        : scores(of.by, of.by.inner_type(), makes_probabilities || of.reads_scores),
          probabilities(of.by, of.by.type, makes_probabilities && (of.reads_scores || of.by.is_wider_within())),
          grad_probabilities(of.by, of.by.inner_type(), of.values && is_apart(of)),
          gradient(of.by, of.by.type),
          dkeys(of.grad_keys, of.by.panels() > 1),
          dvalues(of.grad_values, of.by.panels() > 1) {}
    // Whether what the kernel reads and what it writes are of two dtypes.
    static bool is_apart(const scores_backward& of) { return of.by.is_wider_within() && !of.grad_probabilities; }
    panel_buffer scores, probabilities, grad_probabilities, gradient;
    right_factor transposed_keys, transposed_values, keys;
    batch_sum dkeys, dvalues;
  };

  void panel(int64 batch, int64 first, thread& here) const {
    const score_panels& by = of_.by;
    const int64 count = std::min(by.panel, by.rows - first), row = batch * by.rows + first,
                seen = by.seen(first, count);
    const matrix queries = of_.queries.part(batch, first, count), gradient = here.gradient.rows(count, seen),
                 scores = here.scores.rows(count, seen);
    if (recompute_ || of_.reads_scores) here.transposed_keys.multiply(scores, queries, false);
    matrix x = of_.reads_scores ? scores : matrix{}, y{};
    if (of_.values) {
      matrix probabilities = of_.reads_scores || by.is_wider_within() ? here.probabilities.rows(count, seen) : scores;
      if (recompute_) {
        (*recompute_)(row, row + count, seen, {at(&arguments::x, scores), at(&arguments::y, probabilities)});
      } else {
        probabilities = dense_rows(of_.probabilities, by, row, count);
        probabilities.columns = seen;
      }
      if (!of_.reads_scores) x = probabilities;
      y = thread::is_apart(of_) ? here.grad_probabilities.rows(count, seen) : gradient;
      const matrix grad_output = of_.grad_output->part(batch, first, count);
      if (of_.grad_probabilities) copy(of_.grad_probabilities->part(batch, first, count), y);
      here.transposed_values.multiply(y, grad_output, of_.grad_probabilities.has_value());
      here.dvalues.add(transposed(probabilities), grad_output);
    }
    kernel_(row, row + count, seen, {at(&arguments::x, x), at(&arguments::y, y), at(&arguments::dx, gradient)});
    if (of_.grad_queries) here.keys.multiply(of_.grad_queries->part(batch, first, count), gradient, false);
    here.dkeys.add(transposed(gradient), queries);
  }

  const scores_backward& of_;
  const panel_kernel kernel_;
  std::optional<panel_kernel> recompute_;
};

}  // namespace

std::optional<batched_matrices> batched_matrices::of(const spec::strided& t, int own) {
  const int last = t.dim - 1;
  const auto outer = spec::one_dimension(t, 0, own - 1), inner = spec::one_dimension(t, own > 0 ? own - 1 : 0, own),
             rows = spec::one_dimension(t, own, last);
  constexpr int64 kFarthest = 1 << 24;  // what is gathered from many rows counts in 32 bits
  if (!outer || !inner || !rows || rows->stride > kFarthest) return {};
  if (t.strides[last] != 1 && t.sizes[last] > 1) return {};
  batched_matrices all;
  all.data_ = t.data, all.type_ = t.type, all.columns_ = t.sizes[last];
  all.outer_ = *outer, all.inner_ = *inner, all.rows_ = *rows;
  return all;
}

int64 score_panels::seen(int64 first, int64 count) const {
  const bool within = period > 0 && first % period + count <= period;
  return within ? std::min((first % period + count + 31) / 32 * 32, columns) : columns;
}

std::optional<score_panels> cut_scores(const spec::line& behind, dtype type, int64 batches, int64 rows, int64 columns,
                                       int64 period) {
  if (batches * rows * columns == 0 || !has_panel_product(type)) return {};
  score_panels by{batches, rows, columns, rows_of_panel(type, rows, columns), type};
  const bool whole_rows = behind.keeps > 0 || behind.dropouts > 0;  // kept, or drawn by their length
  if (!whole_rows && spec::is_causal(behind) && spec::maps_zero_to_zero(behind)) by.period = period;
  return by;
}

bool has_many_tasks(const score_panels& by, bool backward) {
  return by.batches * (backward ? 1 : by.panels()) >= kFewestTasks;
}

bool panels_go_back(const spec::contraction& of, const spec::contraction_gradients& plan, bool with_values) {
  const std::vector<spec::gradient_output>& outputs = plan.behind.outputs;
  const auto of_column = [](const spec::gradient_output& output) { return output.column; };
  const int scores = plan.behind.inputs[0];
  return scores >= 0 && (plan.wants_input || plan.wants_weight) && !(with_values && of.behind.keeps > 0) &&
         std::none_of(outputs.begin(), outputs.end(), of_column) &&
         std::count(plan.kept_outputs.begin(), plan.kept_outputs.end(), scores) == 0;
}

void forward_in_panels(const scores_forward& c) {
  const score_panels& by = c.by;
  const panel_kernel kernel(c.behind, 1, false);
  in_threads(by.batches * by.panels(), 1, [&](int64 begin, int64 end) {
    const panel_buffer scores_of(by, by.inner_type()), made_of(by, by.type, by.is_wider_within() && !c.probabilities);
    right_factor of_scores, of_product;
    int64 taken = -1;  // a batch
    for (int64 task = begin; task < end; ++task) {
      const int64 batch = task / by.panels(), first = task % by.panels() * by.panel,
                  count = std::min(by.panel, by.rows - first), row = batch * by.rows + first;
      if (batch != taken) {
        of_scores.take(transposed(c.keys.whole(batch)));
        if (c.values) of_product.take(c.values->whole(batch));
        taken = batch;
      }
      const int64 seen = by.seen(first, count);
      const matrix scores = scores_of.rows(count, seen);
      matrix made = by.is_wider_within() ? made_of.rows(count, seen) : scores;
      if (c.probabilities) {
        made = dense_rows(c.probabilities, by, row, count);
        clear(made, seen);
        made.columns = seen;
      }
      of_scores.multiply(scores, c.queries.part(batch, first, count), false);
      kernel(row, row + count, seen, {at(&arguments::x, scores), at(&arguments::y, made)});
      if (c.values) of_product.multiply(c.result->part(batch, first, count), made, false);
    }
  });
}

void backward_in_panels(const scores_backward& of) { backward_of_batches(of).run(); }

}  // namespace onepass::cpu
