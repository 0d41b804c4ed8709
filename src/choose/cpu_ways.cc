// The ways of a line with `linear`, `scores` or `values` on the CPU, where no time is predicted: dot products before
// panels before the library. A function of shapes and dtypes, but
// for what can be compiled: other sums have other bits.
#include <algorithm>

#include "src/choose/ways.h"
#include "src/cpu/panel_product.h"

namespace onepass::choice {
namespace {

// Fewer bring too little for what it takes to bring the matrix.
constexpr int64 kFewestRows = 64, kLeastProduct = 1 << 21;  // rows times columns times features
constexpr int64 kPanelBytes = 256 << 10;                    // of scores
constexpr int64 kFewestTasks = 4;  // with fewer, threads that share one product have more to do

int64 up(int64 a, int64 b) { return (a + b - 1) / b; }

std::string why_not_panels_of_linear(const sizes& s) {
  const bool serves = (s.type == dtype::f32 || s.type == dtype::f64) && s.rows >= kFewestRows &&
                      s.rows * s.depth * s.columns >= kLeastProduct;
  return serves ? "" : "panels are for many rows on the CPU, in float32 or float64";
}

std::string why_not_panels_of_scores(const call& c) {
  const sizes& s = c.sizes;
  const bool serves =
      !c.of.behind.words.empty() &&
      panels_serve_scores(s.type, s.matrices, s.rows / std::max<int64>(s.matrices, 1), s.columns, false);
  return serves ? ""
                : "panels are for words behind 'scores' on the CPU, several batches or many rows, and float32, "
                  "float64, or bfloat16 where the processor has products of it (AVX512_BF16)";
}

std::vector<way> linear_ways_on_cpu(const call& c) {
  const sizes& s = c.sizes;
  const int64 x = s.x_bytes(), y = s.result_bytes();
  const bool makes_input = !c.of.before.words.empty(), goes_on = !c.of.behind.words.empty();
  way library{.how = spec::strategy::unfused, .rank = 2},
      dots{.how = spec::strategy::dots, .by = implementation::small_n, .rank = 0},
      panels{.how = spec::strategy::panels, .by = implementation::panels, .rank = 1};
  panels.bytes = x + s.matrix_bytes() + y + (s.saves_product ? y : 0);
  dots.bytes = x + s.matrix_bytes() + y + (goes_on ? 2 * y : 0);
  library.bytes = dots.bytes + (makes_input ? 2 * x : 0);
  panels.why_not = why_not_panels_of_linear(s);
  dots.why_not = spec::why_not_dots(c.of, s.columns);
  if (dots.serves() && (c.unfit >> static_cast<int>(dots.by) & 1))
    dots.why_not = "it is compiled at first use, by a C++ compiler";
  return {library, dots, panels};
}

std::vector<way> attention_ways_on_cpu(const call& c) {
  const sizes& s = c.sizes;
  const int64 x = s.x_bytes(), keys = s.matrix_bytes(), scores = s.result_bytes(),
              values = (s.matrices * s.columns + s.rows) * c.value_depth * size_of(s.type);
  way library{.how = spec::strategy::unfused, .rank = 1},
      panels{.how = spec::strategy::panels, .by = implementation::panels, .rank = 0};
  panels.bytes = x + keys + (c.values ? values : scores);
  library.bytes = panels.bytes + (c.of.behind.words.empty() ? 0 : 2 * scores) + (c.values ? 2 * scores : 0);
  panels.why_not = why_not_panels_of_scores(c);
  return {library, panels};
}

}  // namespace

int64 rows_of_score_panel(dtype type, int64 rows, int64 columns) {
  const int64 most = std::max<int64>(kPanelBytes / (columns * size_of(type)), 16), panels = up(rows, most);
  return std::min((up(rows, panels) + 15) / 16 * 16, rows);
}

bool panels_serve_scores(dtype type, int64 matrices, int64 rows, int64 columns, bool backward) {
  if (matrices * rows * columns == 0 || !cpu::has_panel_product(type)) return false;
  const int64 panels = up(rows, rows_of_score_panel(type, rows, columns));
  return matrices * (backward ? 1 : panels) >= kFewestTasks;
}

std::vector<way> cpu_ways(const call& c) { return c.of.scores ? attention_ways_on_cpu(c) : linear_ways_on_cpu(c); }

}  // namespace onepass::choice
