// A line with `linear` of few features (few_features.h) for several tensors: those that are alike share a launch.
#include "src/torch/lists/small_n.h"

#include <torch/csrc/stable/accelerator.h>

#include <algorithm>

#include "src/cuda/linear/small_n.h"
#include "src/cuda/row/launch.h"
#include "src/torch/check.h"
#include "src/torch/lists/column_parts.h"
#include "src/torch/linear/linear.h"
#include "src/torch/linear/small_n.h"
#include "src/torch/run.h"

namespace onepass::binding {
namespace {

using optional_tensor = std::optional<Tensor>;
using some_tensors = std::vector<Tensor>;

// The words before `linear` with its features, their operands, and those of the words behind it.
template <class T>  // a tensor, or perhaps one
struct feature_operands {
  feature_operands(const prepared_line& whole, const std::vector<T>& operands, const group_of& of)
      : c(*whole.contraction), first(matrix(operands, of, c.parts.weight, 0)), features(first.size(0)) {
    const int weight = c.parts.weight;
    const std::string why_not = spec::why_not_dots(c.parts, features);
    ONEPASS_CHECK(why_not.empty(), "onepass: 'linear' of several tensors: ", why_not);
    line = &c.with_features(static_cast<int>(features));
    const std::uint64_t below = (std::uint64_t{1} << weight) - 1;
    of_before = of_behind = of;
    of_before.own = of.own & below;
    of_behind.own = of.own >> (weight + 1);
    const auto at_weight = static_cast<std::ptrdiff_t>(of.operand_at(weight, 0));
    before.assign(operands.begin(), operands.begin() + at_weight);
    matrices = of.has_own(weight) ? of.count : 1;
    behind.assign(operands.begin() + at_weight + matrices, operands.end());
    for (std::int64_t j = 0; j < features; ++j) {
      of_before.own |= (of.own >> weight & 1) << (weight + j);
      for (std::int64_t i = 0; i < matrices; ++i) before.emplace_back(row_of(matrix(operands, of, weight, i), j));
    }
    for (std::int64_t i = 1; i < matrices; ++i) {
      const Tensor& w = matrix(operands, of, weight, i);
      ONEPASS_CHECK(
          w.dim() == 2 && w.size(0) == features && w.size(1) == first.size(1) && dtype_of(w) == dtype_of(first),
          "onepass: the matrices of 'linear' must have one shape and dtype, got ", shape_text(first), " and ",
          shape_text(w));
    }
  }

  const prepared_contraction& c;
  const Tensor& first;  // of the matrices
  const std::int64_t features;
  std::int64_t matrices;
  const prepared_line* line;
  std::vector<T> before, behind;
  group_of of_before, of_behind;

 private:
  static const Tensor& matrix(const std::vector<T>& operands, const group_of& of, int weight, std::int64_t i) {
    const T& found = operands.at(of.operand_at(weight, i));
    if constexpr (std::is_same_v<T, Tensor>) {
      return found;
    } else {
      ONEPASS_CHECK(found.has_value(), "onepass: backward of 'linear' reads its matrix");
      return *found;
    }
  }
};

// The frames' y is a dense tensor of as many rows, each of `features` numbers.
void set_rows(frames& all, const some_tensors& dense, std::int64_t features) {
  for (std::size_t i = 0; i < all.size(); ++i)
    if (!all[i].empty()) all[i].a.y = rows_at(dense[i], features, all[i].a);
}

std::vector<cuda::few_features_member> members_of(frames& before, frames& behind) {
  std::vector<cuda::few_features_member> members;
  for (std::size_t i = 0; i < before.size(); ++i)
    if (!before[i].empty()) members.push_back({&before[i].a, &behind[i].a});
  return members;
}

// Of tensors of which one has numbers.
template <class Prepare>
void launch_all(const cuda::request& before, const cuda::request& behind,
                const std::vector<cuda::few_features_member>& members, int device, const Prepare& prepare) {
  void* stream = current_stream(device);
  const std::vector<cuda::few_features_batch> batches = cuda::batches(before, behind, members, cuda::facts(device));
  ONEPASS_CHECK(!batches.empty(), "onepass: 'linear' of several tensors: rows are too long for a block");
  prepare();
  for (const cuda::few_features_batch& b : batches) cuda::launch(before, behind, b, members, device, stream);
}

const frame& with_numbers(const frames& all) {
  const auto found = std::find_if(all.begin(), all.end(), [](const frame& f) { return !f.empty(); });
  return found == all.end() ? all.front() : *found;
}

void run_forward(frames& before, frames& behind) {
  const std::vector<cuda::few_features_member> members = members_of(before, behind);
  if (members.empty()) return;
  const device on = before.front().on;
  const torch::stable::accelerator::DeviceGuard guard(on.index);
  launch_all(request_of(with_numbers(before), false), request_of(with_numbers(behind), false), members, on.index,
             [] {});
}

struct part_backward {
  frames& all;
  const spec::gradients& plan;
  const column_views& columns;
};
void run_backward(const part_backward& before, const part_backward& behind) {
  const device on = before.all.front().on;
  const torch::stable::accelerator::DeviceGuard guard(on.index);
  for (frame& f : before.all) f.a.y = {};
  const std::vector<cuda::few_features_member> members = members_of(before.all, behind.all);
  const dtype type = before.all.front().arithmetic();
  std::optional<column_parts> parts, parts_behind;
  const auto prepare = [&] {
    for (const cuda::few_features_member& m : members) m.before->parts = m.behind->parts = m.before->blocks;
    parts.emplace(before.all, before.columns, type), parts_behind.emplace(behind.all, behind.columns, type);
  };
  if (members.empty()) prepare();
  else
    launch_all(request_of(with_numbers(before.all), before.plan), request_of(with_numbers(behind.all), behind.plan),
               members, on.index, prepare);
  std::vector<column_sum> sums = parts->sums();
  const std::vector<column_sum> more = parts_behind->sums();
  sums.insert(sums.end(), more.begin(), more.end());
  cuda::reduce_columns(sums, type, on.index, current_stream(on.index));
}

}  // namespace

std::string why_not_grouped(const prepared_line& of, std::int64_t columns, std::int64_t features, dtype type,
                            const std::string& chip) {
  if (of.line.linear < 0) return "";
  if (of.line.scores() || of.attention) return "it has 'scores'";
  const prepared_contraction& c = *of.contraction;
  const bool suits = of.line.how == spec::strategy::automatic || of.line.how == spec::strategy::dots;
  if (!suits) return "it names another strategy";
  if (features < 1) return "there are no features";
  if (std::string why_not = spec::why_not_dots(c.parts, features); !why_not.empty()) return why_not;
  if (c.before.reads.result) return "what stands before 'linear' is made again from its result";
  if (chip != "cpu") {
    return cuda::why_not_few_features(c.with_features(static_cast<int>(features)).line, columns, type,
                                      cuda::facts_named(chip));
  }
  return has_kernels(c.with_features(static_cast<int>(features)), 0) ? ""
                                                                     : "it is compiled at first use, by a compiler";
}

some_tensors forward_with_features(const group_forward& call) {
  ONEPASS_CHECK(!call.xs.empty() && call.operands.size() == call.of.operand_count(call.line.line.operands),
                "onepass: the line \"", call.line.line.text, "\" takes ",
                call.of.operand_count(call.line.line.operands), " operands, got ", call.operands.size());
  const feature_operands operands(call.line, call.operands, call.of);
  const prepared_contraction& c = operands.c;
  for (const Tensor& x : call.xs) check_weight(call.line, x, operands.first);
  const dtype type = dtype_of(operands.first);
  ONEPASS_CHECK(dtype_of(call.xs[0]) == type,
                "onepass: 'linear' of several tensors: x and the matrix must have one dtype");
  const bool saves_product = call.save_statistics && call.line.reads.product,
             saves_statistics = call.save_statistics && c.before.reads.statistics;
  frames before;
  some_tensors kept;  // and statistics
  enter({call.xs, operands.before, *operands.line, call.dropout_state, saves_statistics, operands.of_before}, false,
        before, kept);
  some_tensors results, products, kept_behind;
  if (!before.front().on.is_cuda()) {
    const some_tensors rows = fresh(call.of, call.xs, operands.features, type, products);
    set_rows(before, rows, operands.features);
    run_forward(before);
    results = c.behind.line.words.empty()
                  ? products
                  : forward({rows, operands.behind, c.behind, call.dropout_state, false, operands.of_behind});
    kept_behind.assign(results.begin() + call.of.lists(1), results.end());
  } else {
    const some_tensors rows = fresh(call.of, call.xs, operands.features, type, results);
    frames behind;
    enter({rows, operands.behind, saves_product ? c.behind_keeping : c.behind, call.dropout_state, false,
           operands.of_behind},
          false, behind, kept_behind);
    set_rows(behind, rows, operands.features);
    run_forward(before, behind);
    if (saves_product) {
      const auto end = kept_behind.begin() + call.of.lists(1);
      products.assign(kept_behind.begin(), end);
      kept_behind.erase(kept_behind.begin(), end);
    }
  }
  results.resize(static_cast<std::size_t>(call.of.lists(1)), call.xs[0]);
  const auto add = [&](auto begin, auto end) { results.insert(results.end(), begin, end); };
  add(kept.begin(), kept.end() - saves_statistics), add(kept_behind.begin(), kept_behind.end());
  if (saves_product) add(products.begin(), products.end());
  add(kept.end() - saves_statistics, kept.end());
  return results;
}

namespace {

// One call of backward: its two parts, and their gradients.
class features_backward {
 public:
  features_backward(const group_backward& call, const group_linear_saved& saved)
      : call_(call),
        saved_(saved),
        operands_(call.line, call.operands, call.of),
        c_(operands_.c),
        facts_(spec::operand_facts_of(call.operand_types.data(), call.operand_types.size())),
        plan_(spec::plan_gradients(c_.parts, saved.x, facts_, static_cast<std::uint64_t>(call.wanted))),
        types_(part_of(call.operand_types, 0, c_.parts.weight)),
        types_behind_(part_of(call.operand_types, c_.parts.weight + 1, call.line.line.operands)),
        wanted_(plan_.wants_before) {
    for (std::int64_t j = 0; j < operands_.features; ++j) {
      types_.push_back(static_cast<std::int64_t>(dtype_of(operands_.first)));
      if (plan_.wants_weight) wanted_ |= std::uint64_t{2} << (c_.parts.weight + j);
    }
    for (std::int64_t i = 0; plan_.wants_weight && i < operands_.matrices; ++i)
      matrix_gradients_.push_back(
          empty_like(shape_of(operands_.first), dtype_of(operands_.first), device_of(operands_.first)));
    const auto lists = static_cast<int>(call.of.lists(1));
    const int keeps_before = c_.before.line.keeps;
    behind_gradients_ = part_of(call.gradients, (1 + keeps_before) * lists, static_cast<int>(call.gradients.size()));
    behind_gradients_.insert(behind_gradients_.begin(), call.gradients.begin(), call.gradients.begin() + lists);
    for (std::int64_t i = 0; i < call.of.count; ++i) {
      upstream_.push_back(call.of.pick(call.gradients, 0, i));
      before_gradients_.push_back(as_x(upstream_.back()));
    }
    for (std::int64_t i = 0; i < (saved.products.empty() ? 0 : call.of.count); ++i)
      products_.push_back(call.of.pick(saved.products, 0, i));
    for (int k = 1; k <= keeps_before; ++k)
      for (std::int64_t i = 0; i < call.of.count; ++i) before_gradients_.push_back(call.of.pick(call.gradients, k, i));
  }

  std::vector<some_tensors> run() {
    if (!plan_.wants_input && !plan_.wants_weight) behind_ = run_behind({});
    else if (device_of(operands_.first).is_cuda()) run_on_cuda();
    else run_on_cpu();
    return gathered();
  }

 private:
  // Of x's shape, for that alone: a frame takes it from the gradient, which is the features'.
  Tensor as_x(const Tensor& gradient) const {
    const std::int64_t one = 1;
    std::vector<std::int64_t> sizes(gradient.sizes().begin(), gradient.sizes().end());
    sizes.back() = operands_.first.size(1);
    return view_of(empty(&one, 1, saved_.x, device_of(gradient)), sizes, std::vector<std::int64_t>(sizes.size()));
  }

  std::vector<some_tensors> run_behind(const group_runner& runner) const {
    if (plan_.behind.outputs.empty()) return {};
    const auto& shared = plan_.kept_outputs;
    const bool stores = std::find(shared.begin(), shared.end(), plan_.behind.inputs[0]) != shared.end();
    return backward({.gradients = behind_gradients_,
                     .xs = products_,
                     .operands = operands_.behind,
                     .resumed = saved_.resumed_behind,
                     .statistics = {},
                     .dropout_state = call_.dropout_state,
                     .line = c_.behind,
                     .operand_types = types_behind_,
                     .wanted = static_cast<std::int64_t>(plan_.wants_behind),
                     .of = operands_.of_behind,
                     .resumed_stacked = call_.resumed_stacked,
                     .runner_has_dx = runner && !stores},
                    runner);
  }
  std::vector<some_tensors> run_before(const group_runner& runner) const {
    group_of of = operands_.of_before;
    of.stacked = false;
    return backward({.gradients = before_gradients_,
                     .xs = call_.xs,
                     .operands = operands_.before,
                     .resumed = call_.resumed,
                     .statistics = call_.statistics,
                     .dropout_state = call_.dropout_state,
                     .line = *operands_.line,
                     .operand_types = types_,
                     .wanted = static_cast<std::int64_t>(wanted_),
                     .of = of,
                     .resumed_stacked = call_.resumed_stacked,
                     .feature_gradients = &matrix_gradients_},
                    runner);
  }

  void run_on_cpu() {
    behind_ = run_behind({});
    const int from = plan_.behind.inputs[0];
    some_tensors gradients;
    for (std::size_t i = 0; i < upstream_.size(); ++i)
      gradients.push_back(
          torch::stable::contiguous(from < 0 ? upstream_[i] : behind_[static_cast<std::size_t>(from)][i]));
    before_ = run_before([&](frames& all, const spec::gradients& own, const column_views& columns) {
      set_rows(all, gradients, operands_.features);
      binding::run_backward(all, own, columns);
    });
  }

  void run_on_cuda() {
    const auto both = [&](frames& all_behind, const spec::gradients& plan_behind, const column_views& to_behind) {
      before_ = run_before([&](frames& all, const spec::gradients& own, const column_views& to) {
        run_backward({all, own, to}, {all_behind, plan_behind, to_behind});
      });
    };
    if (!plan_.behind.outputs.empty()) {
      behind_ = run_behind(both);
      return;
    }
    static const prepared_line no_words{spec::line{}};  // the results' gradients are the features'
    frames all;
    for (const Tensor& dy : upstream_) {
      frame& f = all.emplace_back(no_words, dy, "the gradient");
      f.input(dy, f.a.y);
      if (!f.empty()) f.lay_out(true);
    }
    both(all, {}, {});
  }

  // The whole line's gradients, of those of its two parts.
  std::vector<some_tensors> gathered() {
    std::vector<some_tensors> all(plan_.all.outputs.size());
    const auto weight = static_cast<std::size_t>(c_.parts.weight);
    const spec::gradients own = spec::plan_gradients(operands_.line->line, saved_.x,
                                                     spec::operand_facts_of(types_.data(), types_.size()), wanted_);
    for (std::size_t i = 0; i <= weight; ++i)
      if (plan_.all.inputs[i] >= 0)
        all[static_cast<std::size_t>(plan_.all.inputs[i])] = before_[static_cast<std::size_t>(own.inputs[i])];
    if (plan_.wants_weight) all[static_cast<std::size_t>(plan_.all.inputs[weight + 1])] = matrix_gradients_;
    std::size_t at = all.size() - plan_.kept_outputs.size();
    for (const int output : plan_.kept_outputs) all[at++] = behind_[static_cast<std::size_t>(output)];
    return all;
  }

  const group_backward& call_;
  const group_linear_saved& saved_;
  const feature_operands<optional_tensor> operands_;
  const prepared_contraction& c_;
  const std::vector<spec::operand_facts> facts_;
  const spec::contraction_gradients plan_;
  std::vector<std::int64_t> types_, types_behind_;
  std::uint64_t wanted_;
  some_tensors matrix_gradients_, upstream_, before_gradients_, behind_gradients_, products_;
  std::vector<some_tensors> before_, behind_;
};

}  // namespace

std::vector<some_tensors> backward_with_features(const group_backward& call, const group_linear_saved& saved) {
  return features_backward(call, saved).run();
}

}  // namespace onepass::binding
