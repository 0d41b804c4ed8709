// The ways of a line with `linear`, `scores` or `values` on the CPU. No time is predicted: small_n comes before panels,
// and panels before the library. The choice is a function of shapes and dtypes, and of what can be compiled, since
// other sums have other bits.
#include <algorithm>

#include "src/choose/ways.h"
#include "src/cpu/attention.h"
#include "src/cpu/linear.h"

namespace onepass::choice {
namespace {

std::string why_not_panels(const call& c) {
  const sizes& s = c.sizes;
  if (!c.of.scores) return cpu::panels_serve_linear(s.type, s.rows, s.depth, s.columns) ? "" : cpu::kWhyNoLinearPanels;
  const int64 rows = s.rows / std::max<int64>(s.matrices, 1);
  const auto by = cpu::cut_scores(c.of.behind, s.type, s.matrices, rows, s.columns, rows);
  const bool serves = !c.of.behind.words.empty() && by && cpu::has_many_tasks(*by, false);
  return serves ? "" : cpu::kWhyNoScorePanels;
}

std::vector<way> linear_ways_on_cpu(const call& c) {
  const sizes& s = c.sizes;
  const int64 x = s.x_bytes(), y = s.result_bytes();
  const bool makes_input = !c.of.before.words.empty(), goes_on = !c.of.behind.words.empty();
  way library{.how = spec::strategy::unfused, .rank = 2},
      small_n{.how = spec::strategy::small_n, .by = implementation::small_n, .rank = 0},
      panels{.how = spec::strategy::panels, .by = implementation::panels, .rank = 1};
  panels.bytes = x + s.matrix_bytes() + y + (s.saves_product ? y : 0);
  small_n.bytes = x + s.matrix_bytes() + y + (goes_on ? 2 * y : 0);
  library.bytes = small_n.bytes + (makes_input ? 2 * x : 0);
  panels.why_not = why_not_panels(c);
  small_n.why_not = spec::why_not_small_n(c.of, s.columns);
  if (small_n.serves() && (c.unfit >> static_cast<int>(small_n.by) & 1))
    small_n.why_not = "it is compiled at first use, by a C++ compiler";
  return {library, small_n, panels};
}

std::vector<way> attention_ways_on_cpu(const call& c) {
  const sizes& s = c.sizes;
  const int64 x = s.x_bytes(), keys = s.matrix_bytes(), scores = s.result_bytes(),
              values = (s.matrices * s.columns + s.rows) * c.value_depth * size_of(s.type);
  way library{.how = spec::strategy::unfused, .rank = 1},
      panels{.how = spec::strategy::panels, .by = implementation::panels, .rank = 0};
  panels.bytes = x + keys + (c.values ? values : scores);
  library.bytes = panels.bytes + (c.of.behind.words.empty() ? 0 : 2 * scores) + (c.values ? 2 * scores : 0);
  panels.why_not = why_not_panels(c);
  return {library, panels};
}

}  // namespace

std::vector<way> cpu_ways(const call& c) {
  if (c.of.scores) return attention_ways_on_cpu(c);
  if (spec::gives_numbers(c.of)) return ways_to_numbers(c, nullptr);
  return c.backward ? linear_gradient_ways(c, true) : linear_ways_on_cpu(c);
}

}  // namespace onepass::choice
