// `linear` on the CPU: prologue, GEMM and epilogue of a panel of rows at a time.
#include "src/cpu/linear.h"

#include <algorithm>
#include <optional>

#include "src/cpu/gemm/panel_product.h"
#include "src/cpu/page_pool.h"
#include "src/cpu/threads.h"

namespace onepass::cpu {
namespace {

// Forward. Panels of fewer rows load the matrix too often; more rows do not fit in the cache beside it.
constexpr int64 kFewestRows = 64, kLeastProduct = 1 << 21;  // rows times columns times features
constexpr int64 kFewestPanelRows = 24, kMostPanelRows = 192, kMostPanelBytes = 1 << 20;

// Backward of the words before `linear`.
constexpr int64 kPanelBytes = 512 << 10;  // 256 KB: 5 to 10 % slower; 1 MB: the same, and fewer tasks
constexpr int64 kMostFeatures = 1024;     // with 3072 every panel loads too much of the weight

// The matrix's gradient is the sum of parts, each of the panels of one task. All parts together are no larger than x.
constexpr int64 kMostParts = 32, kFewestParts = 8;
int64 parts_of(int64 rows, int64 features) { return std::min(rows / features, kMostParts); }

// Rows at strides of 4096 bytes share a few sets of L1.
bool is_crowded(const matrix& rows) { return rows.row_stride * size_of(rows.type) % 4096 == 0; }

// The right factor of all panels: the matrix packed for the GEMM.
class packed_matrix {
 public:
  explicit packed_matrix(const matrix& right) {
    const int64 tiles = factor.make_room(right, [&](int64 bytes) { return memory_.emplace(bytes).data(); });
    in_threads(tiles, 1, [&](int64 begin, int64 end) { factor.take_tiles(right, begin, end); });
  }
  right_factor factor;

 private:
  std::optional<large_memory> memory_;  // large_memory reuses the pages of the last call
};

// Every thread gets the same number of panels. The number of rows of a panel changes no bit.
int64 forward_rows(int64 rows, int64 row_bytes) {
  const int64 most = std::clamp(kMostPanelBytes / row_bytes, kFewestPanelRows, kMostPanelRows),
              in_all = count_threads(), panels = (rows + most - 1) / most,
              shared = (panels + in_all - 1) / in_all * in_all;
  return std::max(((rows + shared - 1) / shared + 3) / 4 * 4, kFewestPanelRows);
}

int64 backward_rows(dtype type, int64 columns) {
  return std::max<int64>(kPanelBytes / (columns * size_of(type)) / 16 * 16, 16);
}

// Adds up the parts of a matrix, which are contiguous one behind the other.
template <class T>
void add_parts(const T* parts, int64 count, const matrix& result) {
  constexpr int64 kSome = 1024;
  const int64 all = result.rows * result.columns;
  in_threads((all + kSome - 1) / kSome, 16, [&](int64 begin, int64 end) {
    T sums[kSome];
    for (int64 first = begin * kSome; first < std::min(end * kSome, all); first += kSome) {
      const int64 some = std::min(kSome, all - first);
      std::copy(parts + first, parts + first + some, sums);
      for (int64 p = 1; p < count; ++p)
        for (int64 i = 0; i < some; ++i) sums[i] += parts[p * all + first + i];
      const matrix from{sums, sizeof(T) == 8 ? dtype::f64 : dtype::f32, 1, some, some, 1},
          to{static_cast<char*>(result.data) + first * size_of(result.type), result.type, 1, some, some, 1};
      if (from.type == to.type) copy(from, to);
      else round_to_bf16(from, to);
    }
  });
}

// Backward of one call.
class backward_panels {
 public:
  explicit backward_panels(const linear_backward& of)
      : of_(of),
        type_(of.weight.type),
        all_(of.gradient.rows),
        columns_(of.weight.columns),
        features_(of.weight.rows),
        rows_(of.panel_rows ? of.panel_rows : backward_rows(type_, columns_)),
        panels_((all_ + rows_ - 1) / rows_),
        in_part_((panels_ + most_parts() - 1) / most_parts()),
        parts_((panels_ + in_part_ - 1) / in_part_) {}

  void run() {
    if (of_.before) kernel_.emplace(*of_.before, rows_, true);
    if (of_.recompute) recompute_.emplace(*of_.recompute, rows_, false);
    const auto slots = static_cast<int64>(of_.column_outputs.size());
    const large_memory partial(slots * panels_ * columns_ * size_of(dtype::f64));
    if (slots) kernel_->column_sums_to(partial.data(), panels_);
    const bool wants_input = kernel_ || of_.x_gradient.data, wants_weight = of_.weight_gradient.data != nullptr;
    std::optional<packed_matrix> weight;
    if (wants_input) weight.emplace(of_.weight);
    const large_memory sums(wants_weight ? parts_ * features_ * columns_ * size_of(sum_type()) : 0);
    in_threads(parts_, 1, [&](int64 begin, int64 end) {
      thread here(type_, kernel_ ? rows_ : 0, recompute_ ? rows_ : 0, columns_);
      for (int64 panel = begin * in_part_; panel < std::min(end * in_part_, panels_); ++panel)
        pass(panel, weight ? &weight->factor : nullptr, wants_weight ? sums.data() : nullptr, here);
    });
    if (slots) reduce_columns(kernel_->call(), panels_, static_cast<int>(slots), of_.column_outputs.data());
    if (!wants_weight) return;
    if (type_ == dtype::f64) add_parts(static_cast<const double*>(sums.data()), parts_, of_.weight_gradient);
    else add_parts(static_cast<const float*>(sums.data()), parts_, of_.weight_gradient);
  }

 private:
  struct thread {
    thread(dtype type, int64 gradient_rows, int64 input_rows, int64 columns)
        : gradient(type, gradient_rows, columns), input(type, input_rows, columns) {}
    panel_memory gradient, input;
    right_factor taken;
  };
  int64 most_parts() const { return std::max(features_ ? parts_of(all_, features_) : 0, kFewestParts); }
  dtype sum_type() const { return type_ == dtype::f64 ? dtype::f64 : dtype::f32; }

  void pass(int64 panel, right_factor* weight, void* sums, thread& here) const {
    const int64 first = panel * rows_, count = std::min(rows_, all_ - first);
    const matrix given = part(of_.gradient, first, count), input = recompute_   ? here.input.first(count)
                                                                   : of_.x.data ? part(of_.x, first, count)
                                                                                : matrix{};
    if (recompute_) (*recompute_)(panel, panel + 1, columns_, {at(&arguments::y, input)});
    if (weight) {
      const matrix gradient = kernel_ ? here.gradient.first(count) : part(of_.x_gradient, first, count);
      weight->multiply(gradient, given, false);
      if (kernel_ && of_.from_result)
        (*kernel_)(panel, panel + 1, columns_, {at(&arguments::y, gradient), at(&arguments::x, input)});
      else if (kernel_) (*kernel_)(panel, panel + 1, columns_, {at(&arguments::y, gradient)});
    }
    if (!sums) return;
    const int64 size = features_ * columns_ * size_of(sum_type());
    const matrix sum{static_cast<char*>(sums) + panel / in_part_ * size, sum_type(), features_, columns_, columns_, 1};
    here.taken.take(input);
    here.taken.multiply(sum, transposed(given), panel % in_part_ != 0);
  }

  const linear_backward& of_;
  const dtype type_;
  const int64 all_, columns_, features_, rows_, panels_, in_part_, parts_;
  std::optional<panel_kernel> kernel_, recompute_;
};

}  // namespace

bool panels_serve_linear(dtype type, int64 rows, int64 columns, int64 features) {
  return (type == dtype::f32 || type == dtype::f64) && rows >= kFewestRows &&
         rows * columns * features >= kLeastProduct;
}

int64 backward_panel_rows(const spec::contraction& line, dtype type, int64 rows, int64 columns, int64 features) {
  if (line.before.words.empty() || (type != dtype::f32 && type != dtype::f64)) return 0;
  if (features == 0 || features > kMostFeatures || columns == 0) return 0;
  const int64 panel = backward_rows(type, columns);
  return rows >= 4 * panel ? panel : 0;
}

bool sums_in_panels(int64 rows, int64 features) { return parts_of(rows, features) >= kFewestParts; }

void forward_in_panels(const linear_forward& c) {
  const dtype type = c.weight.type;
  const int64 all = c.result.rows, columns = c.weight.columns, features = c.weight.rows,
              rows = forward_rows(all, std::max({columns, features, int64{1}}) * size_of(type));
  packed_matrix matrix(transposed(c.weight));
  const bool copies = !c.before && is_crowded(c.x), stores = c.product.data != nullptr;
  std::optional<panel_kernel> first, last;
  if (c.before) first.emplace(*c.before, rows, false);
  if (c.behind) last.emplace(*c.behind, rows, false);
  in_threads((all + rows - 1) / rows, 1, [&](int64 begin, int64 end) {
    const panel_memory input(type, first || copies ? rows : 0, columns), output(type, stores ? 0 : rows, features);
    for (int64 panel = begin; panel < end; ++panel) {
      const int64 row = panel * rows, count = std::min(rows, all - row);
      const auto left = first || copies ? input.first(count) : part(c.x, row, count),
                 product = stores ? part(c.product, row, count) : output.first(count);
      if (first) (*first)(panel, panel + 1, columns, {at(&arguments::y, left)});
      else if (copies) copy(part(c.x, row, count), left);
      matrix.factor.multiply(product, left, false);
      if (last) {
        (*last)(panel, panel + 1, features,
                {at(&arguments::x, product), at(&arguments::y, part(c.result, row, count))});
      }
    }
  });
}

void backward_in_panels(const linear_backward& of) { backward_panels(of).run(); }

}  // namespace onepass::cpu
