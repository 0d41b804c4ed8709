// On the CPU: what stands before `linear` and the matrix product a panel of rows at a time.
#include "src/torch/panels.h"

#include <algorithm>

#include "src/torch/check.h"
#include "src/torch/matrix_product.h"
#include "src/torch/panel.h"

namespace onepass::binding {
namespace {

constexpr std::int64_t kPanelBytes = 512 << 10;  // 256 KB: 5 to 10 % slower; 1 MB: the same, and fewer tasks
constexpr std::int64_t kMostFeatures = 1024;     // with 3072 every panel brings too much of the weight again

std::string why_not_panels() {
  return "panels are for words before 'linear' on the CPU, in float32 or float64, with many rows and at most " +
         std::to_string(kMostFeatures) + " features";
}

// The matrix's gradient is the sum of parts, each of the panels of one task. All parts together are no larger than x.
constexpr std::int64_t kMostParts = 32, kFewestParts = 8;
std::int64_t parts_of(std::int64_t rows, std::int64_t features) { return std::min(rows / features, kMostParts); }

Tensor rows_of(const Tensor& matrix, std::int64_t first, std::int64_t count) {
  const dtype type = dtype_of(matrix);
  char* data = static_cast<char*>(matrix.data_ptr()) + first * matrix.stride(0) * size_of(type);
  return matrix_at(data, count, matrix.size(1), matrix.stride(0), matrix.stride(1), type, device_of(matrix));
}

// The same matrix for other threads, where what requires a gradient would be recorded.
Tensor detached(const Tensor& matrix) { return rows_of(matrix, 0, matrix.size(0)); }

}  // namespace

std::int64_t panel_rows(dtype of_matrix, std::int64_t rows, std::int64_t columns, std::int64_t features) {
  if (of_matrix != dtype::f32 && of_matrix != dtype::f64) return 0;
  if (features == 0 || features > kMostFeatures || columns == 0) return 0;
  const std::int64_t panel = std::max<std::int64_t>(kPanelBytes / (columns * size_of(of_matrix)) / 16 * 16, 16);
  return rows >= 4 * panel ? panel : 0;
}

std::int64_t panel_rows(const spec::contraction& line, spec::strategy how, const Tensor& x, const Tensor& weight) {
  const bool possible = !line.before.words.empty() && !device_of(x).is_cuda();
  const bool wanted = how == spec::strategy::automatic || how == spec::strategy::panels;
  const std::int64_t rows =
      possible && wanted ? panel_rows(dtype_of(weight), shape_of(x).rows(), weight.size(1), weight.size(0)) : 0;
  ONEPASS_CHECK(rows > 0 || how != spec::strategy::panels,
                "onepass: 'linear(panels)' cannot take this call: ", why_not_panels());
  return rows;
}

std::vector<spec::prediction> strategies_on_cpu(const spec::contraction& line, const spec::linear_case& c) {
  const std::int64_t x = c.x_bytes(), y = c.result_bytes();
  const bool makes_input = !line.before.words.empty(), goes_on = !line.behind.words.empty();
  const bool serves = makes_input && panel_rows(c.type, c.rows, c.depth, c.columns) > 0;
  spec::prediction unfused{.how = spec::strategy::unfused}, panels{.how = spec::strategy::panels},
      dots{.how = spec::strategy::dots};
  panels.bytes = x + c.matrix_bytes() + y + (goes_on ? 2 * y : 0);
  unfused.bytes = panels.bytes + (makes_input ? 2 * x : 0);
  if (!serves) panels.why_not = why_not_panels();
  dots.bytes = panels.bytes, dots.why_not = spec::why_not_dots(line, c.columns);
  return {unfused, dots, panels};
}

bool sums_in_panels(const Tensor& x, const Tensor& weight) {
  return parts_of(shape_of(x).rows(), weight.size(0)) >= kFewestParts;
}

std::vector<Tensor> forward_in_panels(const forward_call& before, std::int64_t rows, const Tensor& weight,
                                      const Tensor* bias, const Tensor& product) {
  const dtype type = dtype_of(weight);
  const device on = device_of(weight);
  const Tensor matrix = transposed(weight);
  std::optional<Tensor> row;
  if (bias) row = matrix_at(bias->data_ptr(), 1, bias->size(0), 0, bias->stride(0), type, on);
  return forward(before, [&](frame& f) {
    const panel_kernel kernel(f, type, rows, false);
    const std::int64_t all = f.a.rows, columns = f.a.columns;
    torch::stable::parallel_for(0, (all + rows - 1) / rows, 1, [&](std::int64_t begin, std::int64_t end) {
      const cpu::aligned_memory memory(rows * columns * size_of(type));
      for (std::int64_t panel = begin; panel < end; ++panel) {
        kernel(panel, panel + 1, columns, {{&arguments::y, memory.data(), columns}});
        const std::int64_t first = panel * rows, count = std::min(rows, all - first);
        multiply(rows_of(product, first, count), matrix_at(memory.data(), count, columns, columns, 1, type, on), matrix,
                 row ? &*row : nullptr);
      }
    });
  });
}

std::vector<Tensor> backward_in_panels(const backward_call& before, std::int64_t rows, const Tensor& product_gradient,
                                       const Tensor& weight,
                                       const std::optional<panel_weight_gradient>& weight_gradient) {
  const dtype type = dtype_of(weight);
  const device on = device_of(weight);
  const Tensor matrix = detached(weight);
  const std::int64_t all = product_gradient.size(0), columns = weight.size(1), features = weight.size(0);
  const std::int64_t panels = (all + rows - 1) / rows,
                     most = std::max<std::int64_t>(parts_of(all, features), kFewestParts),
                     in_part = (panels + most - 1) / most, parts = (panels + in_part - 1) / in_part;

  const auto run = [&](const panel_kernel* again, frame& f, const spec::gradients&,
                       const std::vector<view>& column_outputs) {
    panel_kernel kernel(f, type, rows, true);
    const auto slots = static_cast<std::int64_t>(column_outputs.size());
    std::optional<Tensor> partial, products;
    if (slots) {
      const std::int64_t sizes[3] = {slots, panels, columns};
      f.a.task_rows = rows;
      f.a.column_partial = partial.emplace(empty(sizes, 3, dtype::f64, on)).data_ptr();
      f.a.parts = panels;
      kernel.column_sums_to(f.a.column_partial, panels);
    }
    if (again) {
      const std::int64_t sizes[2] = {parts, features * columns};
      products = empty(sizes, 2, type, on);
    }
    torch::stable::parallel_for(0, parts, 1, [&](std::int64_t begin, std::int64_t end) {
      const cpu::aligned_memory memory(rows * columns * size_of(type)),
          taken(again ? rows * columns * size_of(type) : 0);
      for (std::int64_t panel = begin * in_part; panel < std::min(end * in_part, panels); ++panel) {
        const std::int64_t first = panel * rows, count = std::min(rows, all - first);
        const Tensor given = rows_of(product_gradient, first, count);
        multiply(matrix_at(memory.data(), count, columns, columns, 1, type, on), given, matrix);
        kernel(panel, panel + 1, columns, {{&arguments::y, memory.data(), columns}});
        if (!again) continue;
        (*again)(panel, panel + 1, columns, {{&arguments::y, taken.data(), columns}});
        const std::int64_t part = panel / in_part;
        const Tensor sum =
            matrix_at(static_cast<char*>(products->data_ptr()) + part * features * columns * size_of(type), features,
                      columns, columns, 1, type, on);
        multiply(sum, transposed(given), matrix_at(taken.data(), count, columns, columns, 1, type, on),
                 panel % in_part ? &sum : nullptr);
      }
    });
    if (slots) cpu::reduce_columns(f.a, panels, static_cast<int>(slots), column_outputs.data());
    if (again) {
      const std::int64_t one = 1;
      Tensor ones = empty(&one, 1, type, on);
      torch::stable::fill_(ones, 1.0);
      multiply(matrix_at(weight_gradient->result.data_ptr(), 1, features * columns, features * columns, 1, type, on),
               matrix_at(ones.data_ptr(), 1, parts, 0, 0, type, on), *products);
    }
  };
  if (!weight_gradient) return backward(before, [&](auto&... a) { run(nullptr, a...); });
  std::vector<Tensor> results;
  forward(weight_gradient->again, [&](frame& again) {
    const panel_kernel kernel(again, type, rows, false);
    results = backward(before, [&](auto&... a) { run(&kernel, a...); });
  });
  return results;
}

}  // namespace onepass::binding
