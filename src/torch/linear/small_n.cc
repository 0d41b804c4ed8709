// `linear` with few out_features in one kernel: a row ends in its dot products with the matrix's rows, and backward
// begins at their gradients.
#include "src/torch/linear/small_n.h"

#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <cstdint>

#include "src/compiler.h"
#include "src/cuda/linear/small_n.h"
#include "src/torch/check.h"
#include "src/torch/column_parts.h"
#include "src/torch/call/frame.h"
#include "src/torch/matrix_product.h"
#include "src/torch/call/run.h"

namespace onepass::binding {

bool has_kernels(const prepared_line& line, std::uint64_t boolean_masks, dtype x) {
  try {
    line.cpu(boolean_masks, x);
    return true;
  } catch (const cannot_compile&) {
    return false;
  }
}

Tensor row_of(const Tensor& matrix, std::int64_t row) {
  return view_of(matrix, {matrix.size(1)}, {matrix.stride(1)}, row * matrix.stride(0));
}

view rows_at(const Tensor& dense, std::int64_t features, const arguments& a) {
  view rows{dense.data_ptr(), {}, dtype_of(dense), 1};
  std::int64_t stride = features;
  for (int d = kMaxDims - 1; d >= 0; --d) rows.stride[d] = stride, stride *= a.size[d];
  return rows;
}

namespace {

using optional_tensor = std::optional<Tensor>;

// One call of backward: the line that ends with features, and its operands.
struct feature_gradients {
  feature_gradients(const backward_call& call, const spec::contraction_gradients& plan)
      : c(*call.line.contraction),
        w(*call.operands[static_cast<std::size_t>(c.parts.weight)]),
        features(w.size(0)),
        line(c.with_features(static_cast<int>(features))),
        source(c.before.reads.kept >= 0 ? call.resumed : call.x),
        operands(call.operands.begin(), call.operands.begin() + c.parts.weight),
        types(call.operand_types.begin(), call.operand_types.begin() + c.parts.weight),
        wanted(plan.wants_before) {
    for (std::int64_t j = 0; j < features; ++j) {
      operands.emplace_back(row_of(w, j));
      types.push_back(static_cast<std::int64_t>(dtype_of(w)));
      if (plan.wants_weight) wanted |= std::uint64_t{2} << (c.parts.weight + j);
    }
    for (int k = 0; k < c.before.line.keeps; ++k) kept.push_back(call.gradients[static_cast<std::size_t>(k) + 1]);
    if (plan.wants_weight) matrix_gradient = empty_like(shape_of(w), dtype_of(w), device_of(w));
  }

  // Backward of the prologue. The runner has the gradients of the features.
  std::vector<Tensor> run(const backward_call& call, const backward_runner& runner) const {
    std::vector<Tensor> given = kept;
    given.insert(given.begin(), *source);  // for its shape
    return backward({.gradients = given,
                     .x = call.x,
                     .operands = operands,
                     .resumed = call.resumed,
                     .statistics = call.statistics,
                     .dropout_state = call.dropout_state,
                     .line = line,
                     .operand_types = types,
                     .wanted = static_cast<std::int64_t>(wanted),
                     .feature_gradients = matrix_gradient ? &*matrix_gradient : nullptr},
                    runner);
  }

  const prepared_contraction& c;
  const Tensor& w;
  const std::int64_t features;
  const prepared_line& line;
  const optional_tensor& source;  // x, or the kept value in its place
  std::vector<optional_tensor> operands;
  std::vector<std::int64_t> types;
  std::uint64_t wanted;
  std::vector<Tensor> kept;
  optional_tensor matrix_gradient;
};

// Whether what the kernels read was saved, and on the CPU they are there or can be compiled.
bool serves(const backward_call& call) {
  const prepared_contraction& c = *call.line.contraction;
  const optional_tensor& w = call.operands[static_cast<std::size_t>(c.parts.weight)];
  const prepared_line& line = c.with_features(static_cast<int>(w->size(0)));
  if ((line.reads.x && !call.x) || (line.reads.statistics && !call.statistics)) return false;
  for (std::size_t i = 0; i < static_cast<std::size_t>(c.parts.weight); ++i)
    if (line.reads.operands[i] && !call.operands[i]) return false;
  const std::uint64_t masks = boolean_masks_of(c.parts.weight, [&](int i) {
    return static_cast<dtype>(call.operand_types[static_cast<std::size_t>(i)] % kBroadcast);
  });
  return device_of(*w).is_cuda() || has_kernels(line, masks, dtype_of(*w));
}

// Gathers the whole line's gradients from those of its two parts.
std::vector<Tensor> gathered(const spec::contraction_gradients& plan, const feature_gradients& of,
                             const std::vector<Tensor>& before, const std::vector<Tensor>& behind, dtype x,
                             const std::vector<spec::operand_facts>& facts) {
  const spec::gradients own = spec::plan_gradients(of.line.line, x, facts, of.wanted);
  std::vector<optional_tensor> all(plan.all.outputs.size());
  const auto weight = static_cast<std::size_t>(of.c.parts.weight);
  for (std::size_t i = 0; i <= weight; ++i)
    if (plan.all.inputs[i] >= 0)
      all[static_cast<std::size_t>(plan.all.inputs[i])] = before[static_cast<std::size_t>(own.inputs[i])];
  if (of.matrix_gradient) all[static_cast<std::size_t>(plan.all.inputs[weight + 1])] = of.matrix_gradient;
  std::size_t at = all.size() - plan.kept_outputs.size();
  for (const int output : plan.kept_outputs) all[at++] = behind[static_cast<std::size_t>(output)];
  std::vector<Tensor> results;
  results.reserve(all.size());
  for (const optional_tensor& t : all) results.push_back(*t);
  return results;
}

// Prologue or epilogue in backward: its tensors, the gradients that are wanted, and where column gradients go.
struct part_backward {
  frame& f;
  const spec::gradients& plan;
  const std::vector<view>& columns;
};
// Returns false, and does nothing, where a block has no room for a row.
bool run_on_cuda(const part_backward& before, const part_backward& behind) {
  const device on = before.f.on;
  const torch::stable::accelerator::DeviceGuard guard(on.index);
  void* stream = current_stream(on.index);
  before.f.a.y = {};
  const cuda::request r_before = request_of(before.f, before.plan), r_behind = request_of(behind.f, behind.plan);
  if (!cuda::why_not_small_n(r_before, before.f.a, cuda::facts(on.index)).empty()) return false;
  const cuda::small_n_call call{r_before, before.f.a, r_behind, behind.f.a};
  cuda::small_n_plan plan = cuda::plan_small_n(call, cuda::facts(on.index));
  before.f.a.parts = behind.f.a.parts = plan.rows.grid_x;
  plan.rows.with.one_part = plan.behind.one_part = plan.rows.grid_x == 1;
  if (plan.rows.grid_x == 1) {
    for (const part_backward& part : {before, behind}) write_sums(part.f, part.plan.wants_column, part.columns);
    cuda::launch(call, plan, on.index, stream);
    return true;
  }
  const column_parts of_before({&before.f}, one_for_all(before.columns), before.f.arithmetic()),
      of_behind({&behind.f}, one_for_all(behind.columns), behind.f.arithmetic());
  cuda::launch(call, plan, on.index, stream);
  std::vector<column_sum> sums = of_before.sums();
  for (const column_sum& sum : of_behind.sums()) sums.push_back(sum);
  cuda::reduce_columns(sums, before.f.arithmetic(), on.index, stream);
  return true;
}

}  // namespace

const prepared_line& line_with_features(const forward_call& call, const Tensor& w) {
  return call.line.contraction->with_features(static_cast<int>(w.size(0)));
}

std::vector<Tensor> operands_with_features(const forward_call& call, const Tensor& w) {
  std::vector<Tensor> operands = part_of(call.operands, 0, call.line.contraction->parts.weight);
  for (std::int64_t j = 0; j < w.size(0); ++j) operands.push_back(row_of(w, j));
  return operands;
}

bool has_small_n_kernels(const forward_call& call, const Tensor& w) {
  const std::uint64_t masks = boolean_masks_of(
      call.line.contraction->parts.weight, [&](int i) { return dtype_of(call.operands[static_cast<std::size_t>(i)]); });
  return has_kernels(line_with_features(call, w), masks, dtype_of(call.x));
}

std::vector<Tensor> forward_small_n(const forward_call& call, bool save_statistics, const Tensor& w,
                                    const Tensor& product) {
  const std::vector<Tensor> operands = operands_with_features(call, w);
  return forward({call.x, operands, line_with_features(call, w), call.dropout_state, save_statistics}, [&](frame& f) {
    f.a.y = rows_at(product, w.size(0), f.a);
    run_forward(f);
  });
}

std::optional<std::vector<Tensor>> backward_small_n(const backward_call& call, const linear_saved& saved,
                                                    const spec::contraction_gradients& plan) {
  if (!serves(call)) return {};
  const feature_gradients of(call, plan);
  const auto facts = spec::operand_facts_of(of.types.data(), of.types.size());
  std::vector<Tensor> before, behind;
  const Tensor& dy = call.gradients[0];
  if (!device_of(of.w).is_cuda()) {
    behind = backward_behind(call, saved, plan, std::nullopt);
    const int from = plan.behind.inputs[0];
    const Tensor gradient = torch::stable::contiguous(from < 0 ? dy : behind[static_cast<std::size_t>(from)]);
    before = of.run(call, [&](frame& f, const spec::gradients& own, const std::vector<view>& columns) {
      f.a.y = rows_at(gradient, of.features, f.a);
      run_backward(f, own, columns);
    });
    return gathered(plan, of, before, behind, saved.x, facts);
  }
  bool served = false;
  const auto both = [&](frame& f_behind, const spec::gradients& plan_behind, const std::vector<view>& to_behind) {
    before = of.run(call, [&](frame& f, const spec::gradients& own, const std::vector<view>& to) {
      served = run_on_cuda({f, own, to}, {f_behind, plan_behind, to_behind});
    });
  };
  if (plan.behind.outputs.empty()) {  // the result's gradient is the features'
    static const prepared_line no_words{spec::line{}};
    frame f(no_words, dy, "the gradient");
    f.input(dy, f.a.y);
    f.lay_out(true);
    both(f, {}, {});
  } else {
    behind = backward_behind(call, saved, plan, std::nullopt, both, true);
  }
  if (!served) return {};
  return gathered(plan, of, before, behind, saved.x, facts);
}

}  // namespace onepass::binding
