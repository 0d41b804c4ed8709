// One call of a line without `linear` for several tensors of one row length, dtype and device: those that are alike
// share a launch.
#include "src/torch/lists/group.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "src/torch/check.h"

namespace onepass::binding {
namespace {

// What all tensors of a call have in common, as the kernels are compiled for it.
void check_alike(const frame& f, const frame& first, std::size_t member) {
  const auto same = [&](bool is_same, const char* what) {
    ONEPASS_CHECK(is_same, "onepass: the tensors of a list must have one ", what, ", and element ", member,
                  " has another than element 0");
  };
  same(f.shape.columns() == first.shape.columns(), "row length");
  same(f.type == first.type, "dtype");
  same(f.on == first.on, "device");
}
void check_operand_types(const frame& f, const frame& first) {
  for (int i = 0; i < f.line.line.operands; ++i)
    ONEPASS_CHECK(f.operand_types[i] == first.operand_types[i],
                  "onepass: ", operand_name(f.line.line, f.line.line.operand_word(i)),
                  " must have one dtype for all tensors");
}

std::int64_t rows_of(const Tensor& t) { return shape_of(t).rows(); }

template <class T>
std::vector<T> operands_of(const group_of& of, const std::vector<T>& all, int operands, std::int64_t member) {
  std::vector<T> own;
  own.reserve(static_cast<std::size_t>(operands));
  for (int i = 0; i < operands; ++i) own.push_back(all[of.operand_at(i, member)]);
  return own;
}

}  // namespace

Tensor group_of::pick(const std::vector<Tensor>& all, std::int64_t kind, std::int64_t member) const {
  if (!stacked) return all[static_cast<std::size_t>(kind * count + member)];
  const Tensor& whole = all[static_cast<std::size_t>(kind)];
  const auto sizes = whole.sizes(), strides = whole.strides();
  return view_of(whole, {sizes.begin() + 1, sizes.end()}, {strides.begin() + 1, strides.end()}, member * strides[0]);
}

std::size_t group_of::operand_at(int operand, std::int64_t member) const {
  const int before = std::popcount(own & ((std::uint64_t{1} << operand) - 1));
  return static_cast<std::size_t>(operand + before * (count - 1) + (has_own(operand) ? member : 0));
}

namespace {

// Fresh tensors for a result of rows of such shapes; `results` gets them.
std::vector<Tensor> fresh(const group_of& of, const std::vector<Tensor>& like, spec::result_type what,
                          std::vector<Tensor>& results) {
  const device on = device_of(like.front());
  const dtype type = what.type(dtype_of(like.front()));
  const auto sizes_of = [&](const Tensor& t) { return spec::sizes_of_result(what, shape_of(t)); };
  const auto first = static_cast<std::ptrdiff_t>(results.size());
  if (!of.stacked) {
    for (const Tensor& t : like) {
      const std::vector<std::int64_t> sizes = sizes_of(t);
      results.push_back(empty(sizes.data(), static_cast<int>(sizes.size()), type, on));
    }
    return {results.begin() + first, results.end()};
  }
  std::vector<std::int64_t> sizes = sizes_of(like.front());
  sizes.insert(sizes.begin(), of.count);
  results.push_back(empty(sizes.data(), static_cast<int>(sizes.size()), type, on));
  const std::vector<Tensor> whole{results.back()};
  std::vector<Tensor> pieces;
  for (std::int64_t i = 0; i < of.count; ++i) pieces.push_back(of.pick(whole, 0, i));
  return pieces;
}

// What the kernels of a call are given; `results` gets what they write.
void enter(const group_forward& call, frames& all, std::vector<Tensor>& results) {
  const spec::line& line = call.line.line;
  ONEPASS_CHECK(line.linear < 0, "onepass: the line \"", line.text, "\" takes one tensor in a call");
  ONEPASS_CHECK(!call.xs.empty(), "onepass: expected a non-empty list of tensors");
  ONEPASS_CHECK(operand_count_fits(call.operands.size(), call.of.operand_count(line.operands)), "onepass: the line \"",
                line.text, "\" takes ", call.of.operand_count(line.operands), " operands for ", call.xs.size(),
                " tensors, got ", call.operands.size());
  for (const Tensor& x : call.xs) {
    ONEPASS_CHECK(!call.of.stacked || (x.dim() == call.xs[0].dim() &&
                                       std::equal(x.sizes().begin(), x.sizes().end(), call.xs[0].sizes().begin())),
                  "onepass: stack expects each tensor to be equal size, but got ", shape_text(call.xs[0]),
                  " at entry 0 and ", shape_text(x));
    frame& f = all.emplace_back(call.line, x, "x");
    check_alike(f, all.front(), all.size() - 1);
  }
  const dtype type = all.front().type;
  std::vector<Tensor> memory;  // of each kind for each tensor
  for (int kind = 0; kind < line.results(); ++kind) {
    const std::vector<Tensor> some = fresh(call.of, call.xs, line.result(kind), results);
    memory.insert(memory.end(), some.begin(), some.end());
  }
  const std::int64_t rows = std::accumulate(call.xs.begin(), call.xs.end(), std::int64_t{0},
                                            [](std::int64_t sum, const Tensor& x) { return sum + rows_of(x); });
  char* statistics = nullptr;
  if (call.save_statistics) {
    const std::int64_t numbers = line.statistics(type) * rows;
    results.push_back(empty(&numbers, 1, all.front().arithmetic(), all.front().on));
    statistics = static_cast<char*>(results.back().data_ptr());
  }
  std::int64_t row = 0;
  for (std::size_t i = 0; i < call.xs.size(); ++i) {
    frame& f = all[i];
    const std::vector<Tensor> operands =
        operands_of(call.of, call.operands, line.operands, static_cast<std::int64_t>(i));
    f.enter(call.xs[i], operands, 0, call.dropout_state);
    check_operand_types(f, all.front());
    std::size_t kind = i;
    std::vector<Tensor> own;
    f.forward_outputs(true, [&](spec::role what, int k, view& to) {
      own.push_back(memory[kind]);
      if (f.is_number(what, k)) f.number_output_in(to, own.back(), f.group_of(what, k));
      else f.output_in(to, own.back());
      kind += call.xs.size();
    });
    if (f.shape.columns() == 0) fill_numbers_of_nothing(line, own);
    if (statistics) f.a.statistics = statistics + line.statistics(type) * row * size_of(f.arithmetic());
    f.a.first_row = row;
    row += f.shape.rows();
    if (!f.empty()) f.lay_out(false);
  }
}

}  // namespace

std::vector<Tensor> forward(const group_forward& call) {
  frames all;
  std::vector<Tensor> results;
  enter(call, all, results);
  run_forward(all);
  return results;
}

namespace {

// A call of backward on its way into frames, and what it gives.
class entering_backward {
 public:
  explicit entering_backward(const group_backward& call)
      : call_(call),
        line_(call.line.line),
        facts_(spec::operand_facts_of(call.operand_types.data(), call.operand_types.size())) {
    const auto lists = static_cast<std::size_t>(call.of.lists(1 + line_.keeps));
    ONEPASS_CHECK(call.gradients.size() == lists && call.operands.size() == call.of.operand_count(line_.operands) &&
                      static_cast<int>(call.operand_types.size()) == line_.operands,
                  "onepass: backward of \"", line_.text, "\" for ", call.of.count, " tensors takes ", lists,
                  " gradients and ", call.of.operand_count(line_.operands), " operands");
    const bool reads_x = !call.xs.empty();
    const Tensor& like = !line_.result(0).is_number() ? call.gradients[0] : reads_x ? call.xs[0] : call.resumed[0];
    plan = spec::plan_gradients(line_, dtype_of(like), facts_, static_cast<std::uint64_t>(call.wanted));
    made.resize(plan.outputs.size());
    for (std::int64_t i = 0; i < call.of.count; ++i) enter_one(i);
  }

  spec::gradients plan;
  frames all;
  std::vector<std::vector<Tensor>> made;
  column_views columns;

 private:
  void enter_one(std::int64_t i) {
    std::vector<Tensor>& gradients = held_.emplace_back();  // a frame looks at their sizes
    for (int kind = 0; kind <= line_.keeps; ++kind) gradients.push_back(call_.of.pick(call_.gradients, kind, i));
    const auto one_of = [&](const std::vector<Tensor>& some, bool stacked) {
      return some.empty() ? std::nullopt : std::optional<Tensor>(group_of{call_.of.count, 0, stacked}.pick(some, 0, i));
    };
    const std::optional<Tensor> x = one_of(call_.xs, false), resumed = one_of(call_.resumed, call_.of.stacked);
    const std::vector<std::optional<Tensor>> operands = operands_of(call_.of, call_.operands, line_.operands, i);
    const backward_call one{
        gradients,           x,           operands, resumed, call_.statistics, call_.dropout_state, call_.line,
        call_.operand_types, call_.wanted};
    frame& f = all.emplace_back(call_.line, likes_.emplace_back(like_x(one)), "the gradient");
    check_alike(f, all.front(), all.size() - 1);
    enter_backward(f, one, facts_);
    f.a.first_row = row_;
    if (f.a.statistics)
      f.a.statistics = static_cast<char*>(f.a.statistics) + line_.statistics(f.type) * row_ * size_of(f.arithmetic());
    row_ += f.shape.rows();
    enter_outputs(f, i);
    if (!f.empty()) f.lay_out(false);
  }

  void enter_outputs(frame& f, std::int64_t i) {
    const std::int64_t length = f.shape.columns();
    std::size_t slot = 0;
    std::size_t k = 0;
    f.backward_outputs(plan, [&](const spec::gradient_output& output, view* to) {
      std::vector<Tensor>& some = made[k++];
      const int operand = output.input - 1;
      if (to) {
        some.push_back(f.output(*to, output.type));
        return;
      }
      if (columns.size() <= slot) columns.emplace_back();
      std::vector<view>& views = columns[slot++];
      if (i > 0 && !call_.of.has_own(operand)) return;
      const std::int64_t numbers = length / output.unit;
      some.push_back(empty(&numbers, 1, output.type, f.on));
      views.push_back({some.back().data_ptr(), {}, output.type, output.unit});
    });
  }

  const group_backward& call_;
  const spec::line& line_;
  const std::vector<spec::operand_facts> facts_;
  std::deque<std::vector<Tensor>> held_;
  std::deque<Tensor> likes_;  // whose sizes are the frames'
  std::int64_t row_ = 0;
};

}  // namespace

namespace {

// As backward_of_part of one tensor.
std::vector<std::vector<Tensor>> backward_of_part(const group_backward& call) {
  const prepared_line& part = *call.line.differentiable;
  if (part.line.words.empty()) return {};
  const auto first = [](const auto& all, std::int64_t count) {
    return std::remove_cvref_t<decltype(all)>(all.begin(), all.begin() + count);
  };
  const auto gradients = first(call.gradients, call.of.lists(1 + part.line.keeps));
  const auto operands = first(call.operands, static_cast<std::int64_t>(call.of.operand_count(part.line.operands)));
  const auto types = first(call.operand_types, part.line.operands);
  return backward(group_backward{gradients, call.xs, operands, call.resumed, call.statistics, call.dropout_state, part,
                                 types, call.wanted, call.of});
}

}  // namespace

std::vector<std::vector<Tensor>> backward(const group_backward& call) {
  if (call.line.differentiable) return backward_of_part(call);
  entering_backward entered(call);
  if (!entered.plan.outputs.empty()) run_backward(entered.all, entered.plan, entered.columns);
  return std::move(entered.made);
}

}  // namespace onepass::binding
