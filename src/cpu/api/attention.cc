// The C++ API's lines with `scores`, and with `values` or without, forward and backward.
#include "src/cpu/attention.h"

#include <algorithm>

#include "src/cpu/api/call_frame.h"
#include "src/cpu/api/products.h"

namespace onepass {
namespace {

class scores_call {
 public:
  scores_call(const parsed_line& of, const values& v)
      : of_(of),
        c_(*of.product),
        v_(v),
        keys_(v.operands.front()),
        sizes_(v.x.sizes),
        own_(spec::own_batch_sizes({static_cast<int>(keys_.sizes.size()), keys_.sizes.data()})),
        keeps_weights_(of.attention && of.attention->keeps_weights) {
    const sizes_of& x = v.x.sizes;
    if (x.size() < 2) refuse("'scores' needs a tensor of at least 2 dimensions, got x of shape " + text(x));
    bool fits = keys_.sizes.size() == x.size() && keys_.sizes.back() == x.back();
    for (int i = fits ? own_ - 1 : -1; i >= 0; --i) {
      const auto at = static_cast<std::size_t>(i);
      fits = fits && keys_.sizes[at] == x[at];
    }
    if (!fits)
      refuse("the keys must have shape [..., S, " + std::to_string(x.back()) +
             "] with the batch sizes of x, the last of which may be 1, for x of shape " + text(x) + ", got " +
             text(keys_.sizes));
    require_product(keys_, "the keys");
    require_type(v.x, keys_.type, "x");
    sizes_.back() = keys_.sizes[keys_.sizes.size() - 2];
    if (of.attention) check_values();
    const std::int64_t rows = spec::shape{static_cast<int>(x.size()), x.data()}.rows(), batches = count(x, 0, own_);
    if (const auto by = cpu::cut_scores(c_.behind, keys_.type, batches, batches ? rows / batches : 0, sizes_.back(),
                                        x[x.size() - 2]))
      by_ = *by;
  }

  void forward() {
    sizes_of y = v_.x.sizes;
    y.back() = of_.attention ? values_of().sizes.back() : sizes_.back();
    require_type(v_.y, keys_.type, "y"), require_sizes(v_.y, y, "y");
    if (is_empty()) return require_no_keys();
    values behind = values_behind();
    behind.statistics = v_.statistics;
    call_frame f(c_.behind, behind.x);
    f.enter_forward(behind, false);
    f.lay_out(true);
    cpu::scores_forward panels{
        .by = by_, .behind = f.call(), .queries = batched(v_.x, "x"), .keys = batched(keys_, "the keys")};
    if (of_.attention) panels.values = batched(values_of(), "the values"), panels.result = batched(v_.y, "y");
    else panels.probabilities = dense(v_.y, "y");
    if (keeps_weights_) panels.probabilities = dense(v_.kept.back(), "what is kept before 'values'");
    cpu::forward_in_panels(panels);
  }

  void backward(const gradients& g) {
    if (is_empty()) return require_no_keys();
    const std::uint64_t given = wanted_of(of_.line, v_, g, sizes_), all = (std::uint64_t{2} << c_.behind.operands) << 1;
    const bool wants_values = of_.attention && (given & all) != 0;
    // That of the queries is made, whoever wants it: it leads through the words behind.
    const spec::contraction_gradients plan =
        spec::plan_gradients(c_, v_.x.type, facts_of(values_of_scores(), sizes_), (given & (all - 1)) | 1);
    if (!cpu::panels_go_back(c_, plan, of_.attention.has_value()))
      refuse("backward of \"" + of_.line.text +
             "\" is not to be had here: it sums columns, keeps a value before 'values', or gives the gradient of the "
             "scores to an operand as well");
    const spec::reads reads = spec::backward_reads(c_.behind);
    values behind = values_behind();
    behind.statistics = v_.statistics;
    const gradients of_behind{.y = g.y,
                              .kept = part_of(g.kept, 0, c_.behind.keeps),
                              .x = {},
                              .operands = part_of(g.operands, 1, 1 + c_.behind.operands)};
    std::vector<spec::role> elsewhere{spec::role::x};
    if (of_.attention) elsewhere.insert(elsewhere.end(), {spec::role::gradient, spec::role::result});
    call_frame f(c_.behind, behind.x);
    f.enter_backward(behind, of_behind, elsewhere);
    enter_gradients(f, plan, of_behind);
    f.lay_out(true);
    if (!plan.kept_outputs.empty()) by_.period = 0;

    cpu::scores_backward panels{.by = by_,
                                .behind = f.call(),
                                .reads_scores = reads.x,
                                .queries = batched(v_.x, "x"),
                                .keys = batched(keys_, "the keys")};
    if (g.x.data) panels.grad_queries = batched(g.x, gradient_name(0));
    if (given >> 1 & 1) panels.grad_keys = batched(g.operands.front(), gradient_name(1));
    if (!of_.attention) return cpu::backward_in_panels(panels);
    panels.values = batched(values_of(), "the values");
    panels.grad_output = batched(upstream(g.y, v_.y.sizes), "the gradient of y");
    if (wants_values) panels.grad_values = batched(g.operands.back(), gradient_name(of_.line.operands));
    if (keeps_weights_) {
      panels.probabilities = dense(v_.kept.back(), "what is kept before 'values'");
      if (static_cast<int>(g.kept.size()) == of_.line.keeps && g.kept.back().data)
        panels.grad_probabilities = batched(g.kept.back(), "the gradient of kept");
    }
    call_frame forward(c_.behind, behind.x);
    std::optional<cpu::row_call> recompute;
    if (!keeps_weights_) {
      behind.statistics = {};
      forward.enter_forward(behind, false);
      forward.lay_out(true);
      panels.recompute = &recompute.emplace(forward.call());
    }
    cpu::backward_in_panels(panels);
  }

 private:
  static std::int64_t count(const sizes_of& sizes, int begin, int end) {
    std::int64_t all = 1;
    for (int i = begin; i < end; ++i) all *= sizes[static_cast<std::size_t>(i)];
    return all;
  }
  bool is_empty() const { return by_.batches == 0; }
  void require_no_keys() const {
    if (v_.x.sizes.back() > 0 && count(v_.y.sizes, 0, static_cast<int>(v_.y.sizes.size())) > 0)
      refuse("'scores' needs at least one key");
  }
  const tensor& values_of() const { return v_.operands.back(); }
  void check_values() const {
    sizes_of expected = keys_.sizes;
    if (values_of().sizes.size() == expected.size()) expected.back() = values_of().sizes.back();
    require_type(values_of(), keys_.type, "the values"), require_sizes(values_of(), expected, "the values");
  }
  // Operands of what ends before `values`.
  values values_of_scores() const {
    values all = v_;
    all.operands = part_of(v_.operands, 0, 1 + c_.behind.operands);
    return all;
  }
  values values_behind() const {
    return {.x = elsewhere_like(keys_, sizes_),
            .operands = part_of(v_.operands, 1, 1 + c_.behind.operands),
            .y = v_.y,
            .kept = part_of(v_.kept, 0, c_.behind.keeps),
            .statistics = {},
            .dropout_state = v_.dropout_state};
  }
  // A result's gradient, or zeros.
  tensor upstream(const tensor& given, const sizes_of& sizes) {
    if (given.data) {
      require_type(given, keys_.type, "the gradient of y"), require_sizes(given, sizes, "the gradient of y");
      return given;
    }
    const tensor zeros = memory_(sizes, keys_.type);
    cpu::clear(rows_of(zeros, ""), 0);
    return zeros;
  }
  static void enter_gradients(call_frame& f, const spec::contraction_gradients& plan, const gradients& g) {
    std::vector<const tensor*> of_input = gradients_by_input(f.of, g);
    spec::gradients others = plan.behind;  // that of the scores is in the panels' hands
    others.outputs.erase(others.outputs.begin() + plan.behind.inputs[0]);
    f.enter_gradients(others, of_input);
  }
  cpu::batched_matrices batched(const tensor& t, const std::string& name) const {
    require_there(t, name);
    const sizes_of strides = strides_of(t);
    const auto found = cpu::batched_matrices::of(
        {t.data, t.type, static_cast<int>(t.sizes.size()), t.sizes.data(), strides.data(), nullptr}, own_);
    if (!found) refuse(name + " must be contiguous, or at least matrices of one distance");
    return *found;
  }
  static void* dense(const tensor& t, const std::string& name) {
    require_there(t, name);
    if (!is_contiguous(t)) refuse(name + " must be contiguous");
    return t.data;
  }

  const parsed_line& of_;
  const spec::contraction& c_;
  const values& v_;
  const tensor& keys_;
  sizes_of sizes_;  // of the scores
  const int own_;
  const bool keeps_weights_;
  cpu::score_panels by_{};
  scratch memory_;
};

}  // namespace

void forward_of_scores(const parsed_line& of, const values& v) { scores_call(of, v).forward(); }
void backward_of_scores(const parsed_line& of, const values& v, const gradients& g) { scores_call(of, v).backward(g); }

}  // namespace onepass
