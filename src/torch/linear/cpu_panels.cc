// On the CPU: what stands before `linear` and the matrix product a panel of rows at a time.
#include "src/torch/linear/cpu_panels.h"

#include <algorithm>

#include "src/cpu/panel_product.h"
#include "src/torch/check.h"
#include "src/torch/matrix_product.h"
#include "src/torch/panel.h"
#include "src/torch/run.h"

namespace onepass::binding {
namespace {

// Forward. Fewer rows bring too little for what it takes to bring the matrix; more do not fit beside it.
constexpr std::int64_t kFewestPanelRows = 24, kMostPanelRows = 192, kMostPanelBytes = 1 << 20;

// Backward: of what stands before `linear`.
constexpr std::int64_t kPanelBytes = 512 << 10;  // 256 KB: 5 to 10 % slower; 1 MB: the same, and fewer tasks
constexpr std::int64_t kMostFeatures = 1024;     // with 3072 every panel brings too much of the weight again

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

cpu::matrix part(const cpu::matrix& m, std::int64_t first, std::int64_t count) {
  return {cpu::address(m, first, 0), m.type, count, m.columns, m.row_stride, m.column_stride};
}

// Rows of a panel in a thread's own memory.
class panel_memory {
 public:
  panel_memory(dtype type, std::int64_t rows, std::int64_t columns)
      : rows_{nullptr, type, rows, columns, cpu::apart(type, columns), 1},
        memory_(rows * rows_.row_stride * size_of(type)) {
    rows_.data = memory_.data();
  }
  cpu::matrix first(std::int64_t count) const { return part(rows_, 0, count); }

 private:
  cpu::matrix rows_;
  cpu::aligned_memory memory_;
};

// Rows so many bytes apart share a few sets of the first cache.
bool is_crowded(const cpu::matrix& rows) { return rows.row_stride * size_of(rows.type) % 4096 == 0; }

// As products take it: its rows contiguous, or its columns.
Tensor factor_of(const Tensor& matrix, bool by_rows) {
  const bool fits = matrix.stride(1) == 1 || (matrix.stride(0) == 1 && !by_rows);
  return fits ? matrix : torch::stable::contiguous(matrix);
}

// The right factor of all panels: the matrix in the order in which products read it.
class packed_matrix {
 public:
  explicit packed_matrix(const Tensor& weight) : held_(factor_of(weight, false)) {
    const cpu::matrix right = cpu::transposed(matrix_of(held_));
    const std::int64_t tiles = factor.make_room(right, [&](std::int64_t bytes) {
      const std::int64_t numbers = bytes / size_of(right.type);
      return memory_.emplace(empty(&numbers, 1, right.type, device_of(held_))).data_ptr();
    });
    torch::stable::parallel_for(0, tiles, 1,
                                [&](std::int64_t begin, std::int64_t end) { factor.take_tiles(right, begin, end); });
  }
  cpu::right_factor factor;

 private:
  const Tensor held_;
  std::optional<Tensor> memory_;  // in pages that are there from the last call
};

bool may_be_panels(spec::strategy named) {
  return named == spec::strategy::automatic || named == spec::strategy::panels;
}

// As many panels for each thread; how many rows they have changes no bit.
std::int64_t forward_rows(std::int64_t rows, std::int64_t row_bytes) {
  const std::int64_t most = std::clamp(kMostPanelBytes / row_bytes, kFewestPanelRows, kMostPanelRows),
                     threads = torch::stable::get_num_threads(), panels = (rows + most - 1) / most,
                     shared = (panels + threads - 1) / threads * threads;
  return std::max(((rows + shared - 1) / shared + 3) / 4 * 4, kFewestPanelRows);
}

}  // namespace

std::int64_t backward_panel_rows(const spec::contraction& line, spec::strategy how, const Tensor& x,
                                 const Tensor& weight) {
  if (!may_be_panels(how)) return 0;
  const dtype type = dtype_of(weight);
  const std::int64_t columns = weight.size(1), features = weight.size(0);
  if (line.before.words.empty() || device_of(x).is_cuda() || (type != dtype::f32 && type != dtype::f64)) return 0;
  if (features == 0 || features > kMostFeatures || columns == 0) return 0;
  const std::int64_t panel = std::max<std::int64_t>(kPanelBytes / (columns * size_of(type)) / 16 * 16, 16);
  return shape_of(x).rows() >= 4 * panel ? panel : 0;
}

bool sums_in_panels(const Tensor& x, const Tensor& weight) {
  return parts_of(shape_of(x).rows(), weight.size(0)) >= kFewestParts;
}

linear_results forward_in_panels(const forward_call& call, const forward_call& before) {
  const prepared_contraction& c = *call.line.contraction;
  const int operands = call.line.line.operands;
  const Tensor& weight = call.operands[static_cast<std::size_t>(c.parts.weight)];
  const dtype type = dtype_of(weight);
  const std::int64_t all = shape_of(call.x).rows(), columns = weight.size(1), features = weight.size(0),
                     rows = forward_rows(all, std::max(columns, features) * size_of(type));
  const bool makes_input = !c.before.line.words.empty(), goes_on = !c.behind.line.words.empty();

  packed_matrix matrix(weight);
  linear_results made;
  const Tensor result = empty_product(call.x, features, type);
  if (!goes_on) made.product = result;
  else if (call.save_statistics && call.line.reads.product) made.product = empty_product(call.x, features, type);
  const cpu::matrix y = matrix_of(as_matrix(result, features)),
                    products = made.product ? matrix_of(as_matrix(*made.product, features)) : cpu::matrix{};
  std::optional<Tensor> taken;
  if (!makes_input) taken = factor_of(as_matrix(in_dtype(call.x, type), columns), true);
  const cpu::matrix x = taken ? matrix_of(*taken) : cpu::matrix{};
  const bool copies = taken && is_crowded(x);

  const auto run = [&](const frame* words_before, const frame* words_behind) {
    std::optional<panel_kernel> first, last;
    if (words_before) first.emplace(*words_before, type, rows, false);
    if (words_behind) last.emplace(*words_behind, type, rows, false);
    torch::stable::parallel_for(0, (all + rows - 1) / rows, 1, [&](std::int64_t begin, std::int64_t end) {
      const panel_memory input(type, first || copies ? rows : 0, columns),
          output(type, made.product ? 0 : rows, features);
      for (std::int64_t panel = begin; panel < end; ++panel) {
        const std::int64_t row = panel * rows, count = std::min(rows, all - row);
        const cpu::matrix left = first || copies ? input.first(count) : part(x, row, count),
                          product = made.product ? part(products, row, count) : output.first(count);
        if (first) (*first)(panel, panel + 1, columns, {{&arguments::y, left.data, left.row_stride}});
        else if (copies) cpu::copy(part(x, row, count), left);
        matrix.factor.multiply(product, left, false);
        if (last) {
          (*last)(panel, panel + 1, features,
                  {{&arguments::x, product.data, product.row_stride},
                   {&arguments::y, cpu::address(y, row, 0), y.row_stride}});
        }
      }
    });
  };
  const auto run_behind = [&](const frame* words_before) {
    if (!goes_on) return run(words_before, nullptr);
    const Tensor shape = shape_of_product(call.x, weight);
    made.results =
        forward({shape, part_of(call.operands, c.parts.weight + 1, operands), c.behind, call.dropout_state, false},
                [&](frame& f) {
                  f.a.stream_stores = stream_stores(f, 1);
                  run(words_before, &f);
                });
  };
  if (makes_input) made.kept = forward(before, [&](frame& f) { run_behind(&f); });
  else run_behind(nullptr);
  made.results.insert(made.results.begin(), result);
  return made;
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
