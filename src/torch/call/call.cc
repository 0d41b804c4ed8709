// One call of a line, forward or backward, on either device: checks, layout, outputs, launch.
#include "src/torch/call/call.h"

#include "src/cuda/row/configuration.h"
#include "src/torch/check.h"
#include "src/torch/call/frame.h"
#include "src/torch/call/run.h"

namespace onepass::binding {

void check_operand_count(const prepared_line& line, std::size_t got) {
  ONEPASS_CHECK(operand_count_fits(got, static_cast<std::size_t>(line.line.operands)), "onepass: the line \"",
                line.line.text, "\" takes ", line.line.operands, " operands, got ", got);
}

void check_backward(const backward_call& call) {
  const spec::line& line = call.line.line;
  ONEPASS_CHECK(static_cast<int>(call.gradients.size()) == 1 + line.keeps &&
                    static_cast<int>(call.operand_types.size()) == line.operands &&
                    static_cast<int>(call.operands.size()) == line.operands,
                "onepass: backward of \"", line.text, "\" takes ", 1 + line.keeps, " gradients and ", line.operands,
                " operands");
}

const Tensor& given(const backward_call& call, const std::optional<Tensor>& t, const char* what) {
  ONEPASS_CHECK(t.has_value(), "onepass: backward of \"", call.line.line.text, "\" reads ", what);
  return *t;
}

const Tensor& given_operand(const backward_call& call, int i) {
  const std::optional<Tensor>& operand = call.operands[static_cast<std::size_t>(i)];
  ONEPASS_CHECK(operand.has_value(), "onepass: backward of \"", call.line.line.text, "\" reads operand ", i);
  return *operand;
}

std::vector<Tensor> given_operands(const backward_call& call, int begin, int end) {
  std::vector<Tensor> operands;
  operands.reserve(static_cast<std::size_t>(end - begin));
  for (int i = begin; i < end; ++i) operands.push_back(given_operand(call, i));
  return operands;
}

void fill_numbers_of_nothing(const spec::line& line, const std::vector<Tensor>& results) {
  for (const int i : line.row_words) {
    const spec::word& w = line.words[static_cast<std::size_t>(i)];
    if (!w.about->gives_number) continue;
    ONEPASS_CHECK(!w.about->needs_elements, "onepass: ", w.about->name,
                  "(): expected rows with at least one element, got x of a last dimension of 0");
    Tensor number = results[static_cast<std::size_t>(w.ordinal + 1)];
    torch::stable::fill_(number, w.about->of_nothing);
  }
}

const Tensor& like_x(const backward_call& call) {
  const spec::line& line = call.line.line;
  if (!line.result(0).is_number()) return call.gradients[0];
  return call.line.reads.x ? given(call, call.x, "x") : given(call, call.resumed, "a kept value");
}

std::vector<Tensor> forward(const forward_call& call, const forward_runner& runner) {
  const prepared_line& line = call.line;
  check_operand_count(line, call.operands.size());
  frame f(line, call.x, "x");
  f.enter(call.x, call.operands, 0, call.dropout_state);
  std::vector<Tensor> results;
  f.forward_outputs(!runner, [&](spec::role what, int i, view& to) {
    results.push_back(f.is_number(what, i) ? f.number_output(to, what, i) : f.output(to, f.result_type(what, i)));
  });
  if (f.shape.columns() == 0) fill_numbers_of_nothing(line.line, results);
  if (call.save_statistics) results.push_back(f.fresh_statistics());
  if (f.empty()) return results;
  f.lay_out(static_cast<bool>(runner));
  if (runner) runner(f);
  else run_forward(f);
  return results;
}

void enter_backward(frame& f, const backward_call& call, const std::vector<spec::operand_facts>& facts) {
  const spec::line& line = call.line.line;
  const spec::reads& reads = call.wants_recompute ? call.line.reads_recomputing : call.line.reads;
  check_backward(call);
  for (int i = 0; i < line.operands; ++i) f.operand_type(i, facts[static_cast<std::size_t>(i)].type);
  f.backward_inputs(reads, [&](spec::role what, int i, view& to) {
    switch (what) {
      case spec::role::x: return f.input(given(call, call.x, "x"), to);
      case spec::role::operand: return f.operand(i, given_operand(call, i));
      case spec::role::result: return f.input(given(call, call.resumed, "the result"), to);
      case spec::role::kept: return f.input(given(call, call.resumed, "a kept value"), to);
      case spec::role::gradient:
      case spec::role::kept_gradient: {
        const Tensor& of = call.gradients[what == spec::role::gradient ? 0 : static_cast<std::size_t>(i) + 1];
        return f.is_number(what, i) ? f.number(of, to) : f.row_gradient(of, f.result_type(what, i), to);
      }
    }
  });
  if (reads.statistics) f.statistics(given(call, call.statistics, "the row statistics"));
  f.dropout_state(call.dropout_state);
}

namespace {

template <class T>
std::vector<T> first_of(const std::vector<T>& all, int count) {
  return {all.begin(), all.begin() + count};
}

// Of a line that gives codes: of the words that have gradients. That of the result is zeros of x's shape and dtype.
std::vector<Tensor> backward_of_part(const backward_call& call) {
  check_backward(call);
  const prepared_line& part = *call.line.differentiable;
  if (part.line.words.empty()) return {};
  const std::vector<Tensor> gradients = first_of(call.gradients, 1 + part.line.keeps);
  const std::vector<std::optional<Tensor>> operands = first_of(call.operands, part.line.operands);
  const std::vector<std::int64_t> types = first_of(call.operand_types, part.line.operands);
  return backward(
      {gradients, call.x, operands, call.resumed, call.statistics, call.dropout_state, part, types, call.wanted});
}

}  // namespace

std::vector<Tensor> backward(const backward_call& call, const backward_runner& runner) {
  const spec::line& line = call.line.line;
  ONEPASS_CHECK(!call.gradients.empty(), "onepass: backward takes gradients");
  if (call.line.differentiable) return backward_of_part(call);
  const Tensor& dy = call.gradients[0];
  frame f(call.line, like_x(call), "the gradient");
  const std::vector<spec::operand_facts> facts =
      spec::operand_facts_of(call.operand_types.data(), call.operand_types.size());
  enter_backward(f, call, facts);
  const spec::gradients plan = spec::plan_gradients(line, f.type, facts, static_cast<std::uint64_t>(call.wanted));

  std::vector<Tensor> results;
  std::vector<view> column_outputs;
  const std::int64_t columns = f.shape.columns();
  f.backward_outputs(plan, [&](const spec::gradient_output& output, view* to) {
    const int feature = output.input - 1 - (line.operands - line.features);
    if (!to && feature >= 0) {
      char* matrix = static_cast<char*>(call.feature_gradients->data_ptr());
      column_outputs.push_back({matrix + feature * columns * size_of(output.type), {}, output.type, 1});
    } else if (!to) {
      auto sizes = output.has < 0 ? std::vector<std::int64_t>{columns}
                                  : spec::sizes_of_groups(f.shape, static_cast<std::uint64_t>(output.has));
      sizes.back() /= output.unit;
      results.push_back(empty(sizes.data(), static_cast<int>(sizes.size()), output.type, f.on));
      column_outputs.push_back({results.back().data_ptr(), {}, output.type, output.unit});
    } else if (output.input > 0) {
      results.push_back(f.output(*to, output.type));
    } else if (call.runner_has_dx) {
      results.push_back(dy);
    } else if (call.dx != nullptr) {
      results.push_back(f.output_in(*to, *call.dx));
    } else {
      const bool in_place = call.in_place && f.on.is_cuda() && cuda::may_be_in_place(f.type, columns);
      results.push_back(in_place ? f.output_in(*to, dy) : f.output(*to, output.type));
    }
  });
  if (plan.outputs.empty()) return results;
  if (call.wants_recompute) results.push_back(f.output(f.a.recomputed, f.type));
  if (f.empty()) {
    for (Tensor& t : results) torch::stable::zero_(t);
    return results;
  }
  f.lay_out(static_cast<bool>(runner));
  if (runner) runner(f, plan, column_outputs);
  else run_backward(f, plan, column_outputs);
  return results;
}

}  // namespace onepass::binding
