// The C++ API's lines with `linear`, forward and backward.
#include "src/cpu/linear.h"

#include <algorithm>

#include "src/cpu/api/call_frame.h"
#include "src/cpu/api/products.h"

namespace onepass {
namespace {

// One call of a line with `linear`.
class linear_call {
 public:
  linear_call(const spec::contraction& c, const values& v)
      : c_(c), v_(v), weight_(v.operands[static_cast<std::size_t>(c.weight)]), sizes_(v.x.sizes) {
    const std::string name = "operand " + std::to_string(c.weight) + " (weight of 'linear')";
    if (sizes_.empty()) refuse("'linear' needs a tensor of at least 1 dimension, got x of shape []");
    if (sizes_.back() == 0) refuse("'linear' needs rows of at least 1 element, got x of shape " + text(sizes_));
    if (weight_.sizes.size() != 2 || weight_.sizes[1] != sizes_.back())
      refuse(name + " must have shape [N, " + std::to_string(sizes_.back()) + "] for x of shape " + text(sizes_) +
             ", got " + text(weight_.sizes));
    require_product(weight_, name);
    require_there(weight_, name);
    const sizes_of strides = strides_of(weight_);
    if (strides[1] != 1 && strides[0] != 1) refuse(name + " must have contiguous rows, or contiguous columns");
    matrix_ = {weight_.data, weight_.type, weight_.sizes[0], weight_.sizes[1], strides[0], strides[1]};
    if (c.before.words.empty()) require_type(v.x, weight_.type, "x, which 'linear' takes as it is,");
    sizes_.back() = weight_.sizes[0];
  }

  void forward() {
    if (spec::gives_numbers(c_)) return forward_of_rows(c_.behind, values_behind(product(values_before())));
    require_type(v_.y, weight_.type, "y"), require_sizes(v_.y, sizes_, "y");
    if (is_empty()) return;
    cpu::linear_forward panels{.weight = matrix_, .result = rows_of(v_.y, "y")};
    if (c_.behind.words.empty()) {
      panels.product = panels.result;
      run(panels, values_before());
      return;
    }
    const values behind = values_behind(elsewhere_like(weight_, sizes_));
    call_frame f(c_.behind, behind.x);
    f.enter_forward(behind, false);
    f.lay_out(true);
    const cpu::row_call call = f.call();
    panels.behind = &call;
    run(panels, values_before());
  }

  void backward(const gradients& g) {
    const int operands = c_.weight + 1 + c_.behind.operands;
    const tensor of_weight =
        static_cast<int>(g.operands.size()) > c_.weight ? g.operands[static_cast<std::size_t>(c_.weight)] : tensor{};
    gradients before{
        .y = {}, .kept = part_of(g.kept, 0, c_.before.keeps), .x = g.x, .operands = part_of(g.operands, 0, c_.weight)};
    const auto is_there = [](const tensor& t) { return t.data != nullptr; };
    const bool wants_before = is_there(g.x) || std::any_of(before.operands.begin(), before.operands.end(), is_there);
    if (of_weight.data) {
      require_type(of_weight, weight_.type, gradient_name(c_.weight + 1));
      require_sizes(of_weight, weight_.sizes, gradient_name(c_.weight + 1));
      if (!is_contiguous(of_weight)) refuse(gradient_name(c_.weight + 1) + " must be contiguous");
    }
    const tensor of_product =
        through_behind({.y = g.y,
                        .kept = part_of(g.kept, c_.before.keeps, c_.before.keeps + c_.behind.keeps),
                        .x = {},
                        .operands = part_of(g.operands, c_.weight + 1, operands)},
                       wants_before || of_weight.data);
    if (!of_product.data) return;
    cpu::linear_backward panels{.gradient = rows_of(of_product, "the gradient of y"), .weight = matrix_};
    if (of_weight.data)
      panels.weight_gradient = {of_weight.data, of_weight.type, matrix_.rows, matrix_.columns, matrix_.columns, 1};
    if (c_.before.words.empty()) {
      panels.x = rows_of(v_.x, "x");
      if (g.x.data) {
        require_type(g.x, v_.x.type, gradient_name(0)), require_sizes(g.x, v_.x.sizes, gradient_name(0));
        panels.x_gradient = rows_of(g.x, gradient_name(0));
      }
      if (!is_empty()) cpu::backward_in_panels(panels);
    } else {
      backward_before(panels, before, wants_before);
    }
  }

 private:
  bool is_empty() const { return std::find(sizes_.begin(), sizes_.end(), 0) != sizes_.end(); }

  values values_before() const {
    return {.x = v_.x,
            .operands = part_of(v_.operands, 0, c_.weight),
            .y = {},
            .kept = part_of(v_.kept, 0, c_.before.keeps),
            .statistics = statistics(0, statistics_before()),
            .dropout_state = v_.dropout_state};
  }
  // How many are the words' before `linear`; those of endings follow.
  std::int64_t statistics_before() const {
    return spec::backward_reads(c_.before).statistics ? c_.before.statistics(v_.x.type) : 0;
  }
  tensor statistics(std::int64_t begin, std::int64_t count) const {
    tensor some = v_.statistics;
    if (some.data == nullptr || count == 0) return {};
    if (some.sizes.size() != 2 || some.sizes[0] < begin + count)
      refuse("statistics must have shape [" + std::to_string(begin + count) + ", rows], got " + text(some.sizes));
    some.data = static_cast<char*>(some.data) + begin * some.sizes[1] * size_of(some.type);
    some.sizes[0] = count;
    return some;
  }
  values values_behind(const tensor& product) const {
    return {.x = product,
            .operands = part_of(v_.operands, c_.weight + 1, c_.weight + 1 + c_.behind.operands),
            .y = v_.y,
            .kept = part_of(v_.kept, c_.before.keeps, c_.before.keeps + c_.behind.keeps),
            .statistics = statistics(statistics_before(), c_.behind.statistics(weight_.type)),
            .dropout_state = v_.dropout_state};
  }
  // What `linear` gives, all of it, in memory of its own.
  tensor product(const values& before) {
    const tensor product = own_(sizes_, weight_.type);
    if (is_empty()) return product;
    cpu::linear_forward panels{.weight = matrix_, .product = rows_of(product, ""), .result = rows_of(product, "")};
    run(panels, before);
    return product;
  }
  // For the line that recomputes what `linear` takes; what it keeps gets memory of its own.
  values recompute_values() {
    const int keep = spec::backward_reads(c_.before).kept;
    values of{.x = keep >= 0 ? v_.kept[static_cast<std::size_t>(keep)] : v_.x,
              .operands = part_of(v_.operands, c_.weight - c_.recompute.operands, c_.weight),
              .y = {},
              .kept = {},
              .statistics = {},
              .dropout_state = v_.dropout_state};
    for (int k = 0; k < c_.recompute.keeps; ++k) of.kept.push_back(own_(v_.x.sizes, v_.x.type));
    return of;
  }
  // The product's panels, with the words before them.
  void run(cpu::linear_forward& panels, const values& before) const {
    if (c_.before.words.empty()) {
      panels.x = rows_of(v_.x, "x");
      cpu::forward_in_panels(panels);
      return;
    }
    call_frame f(c_.before, before.x);
    f.enter_forward(before, false);
    f.lay_out(true);
    const cpu::row_call call = f.call();
    panels.before = &call;
    cpu::forward_in_panels(panels);
  }

  // The gradient of the product, if that is wanted.
  tensor through_behind(gradients g, bool wanted) {
    tensor product{nullptr, weight_.type, sizes_};
    if (c_.behind.words.empty()) {
      if (!wanted || g.y.data) {
        if (wanted)
          require_type(g.y, weight_.type, "the gradient of y"), require_sizes(g.y, sizes_, "the gradient of y");
        return wanted ? g.y : tensor{};
      }
      const tensor zeros = own_(sizes_, weight_.type);
      cpu::clear(rows_of(zeros, ""), 0);
      return zeros;
    }
    if (spec::backward_reads(c_.behind).x && !is_empty()) {
      values before = values_before();
      before.statistics = {};
      for (tensor& kept : before.kept) kept = own_(v_.x.sizes, v_.x.type);
      product = this->product(before);
    }
    if (wanted) g.x = own_(sizes_, weight_.type);
    backward_of_rows(c_.behind, values_behind(product), g);
    return g.x;
  }

  void backward_before(cpu::linear_backward& panels, const gradients& g, bool wanted) {
    const values before = values_before();
    const spec::reads reads = spec::backward_reads(c_.before);
    const std::vector<const tensor*> of_input = gradients_by_input(c_.before, g);
    const spec::gradients plan = spec::plan_gradients(c_.before, v_.x.type, facts_of(before, v_.x.sizes),
                                                      wanted ? wanted_of(c_.before, before, g, v_.x.sizes) : 0);
    const bool passes_on = std::find(plan.inputs.begin(), plan.inputs.end(), kUpstream) != plan.inputs.end();
    std::optional<call_frame> recompute, words;
    std::optional<cpu::row_call> recompute_call, call;
    if ((panels.weight_gradient.data || (reads.result && !passes_on)) && !is_empty()) {
      const values v = recompute_values();
      recompute.emplace(c_.recompute, v.x);
      recompute->enter_forward(v, false);
      recompute->lay_out(true);
      panels.recompute = &recompute_call.emplace(recompute->call());
    }
    tensor gradient;  // of what `linear` takes, where somebody has it as it is
    if (wanted && passes_on) {
      require_type(v_.x, weight_.type, "x, whose gradient 'linear' gives as it is,");
      gradient = own_(v_.x.sizes, weight_.type);
      panels.x_gradient = rows_of(gradient, "");
    } else if (wanted) {
      words.emplace(c_.before, v_.x);
      words->enter_backward(before, g, {spec::role::gradient, spec::role::result});
      panels.column_outputs = words->enter_gradients(plan, of_input);
      if (is_empty()) return backward_of_rows(c_.before, before, g);
      words->lay_out(true);
      panels.before = &call.emplace(words->call());
      panels.from_result = reads.result;
    }
    if (!is_empty()) cpu::backward_in_panels(panels);
    if (!wanted) return;
    if (!passes_on) return copy_shared(plan, {}, of_input);
    gradients with = g;
    with.y = gradient;
    backward_of_rows(c_.before, before, with);
  }

  const spec::contraction& c_;
  const values& v_;
  const tensor& weight_;
  sizes_of sizes_;  // of the product
  cpu::matrix matrix_{};
  scratch own_;
};

}  // namespace

void forward_of_linear(const spec::contraction& c, const values& v) { linear_call(c, v).forward(); }
void backward_of_linear(const spec::contraction& c, const values& v, const gradients& g) {
  linear_call(c, v).backward(g);
}

}  // namespace onepass
