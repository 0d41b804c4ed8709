// Lines with `linear` in one kernel, each way, beside the words and the product in float64.
#include "src/cuda/linear/gemm_sm90.h"

#include <algorithm>

#include "onepass/core.h"
#include "src/cuda/linear/small_n.h"
#include "src/cuda/row/launch.h"
#include "src/cuda/linear/small_k.h"
#include "src/cuda/linear/small_m.h"
#include "src/plan/contraction.h"
#include "src/plan/plan.h"
#include "tests/kernel/device_memory.h"

namespace onepass::cuda {
namespace {

using doubles = std::vector<double>;

struct linear_case {
  const char *before, *behind;  // words whose operands are columns
  int64 rows, k, columns;
  dtype type;
};

// The words of one side: their operands on the device and in float64.
class side {
 public:
  side(const char* text, int64 rows, int64 columns, dtype type, unsigned seed)
      : text_(text),
        rows_(rows),
        columns_(columns),
        line_(is_empty() ? spec::contraction(spec::parse("linear")).before : spec::parse(text)),
        r_(line_, false) {
    r_.line = spec::type_text(line_, 0, false), r_.x = type;
    set_rows(a_, rows);
    a_.columns = columns;
    a_.inverse_columns = 1.0 / static_cast<double>(columns);
    spec::fill_parameters(line_, type, a_);
    for (int i = 0; i < line_.operands; ++i) {
      const std::vector<float> numbers =
          drawn(static_cast<std::size_t>(columns), type, seed + static_cast<unsigned>(i));
      exact_.emplace_back(numbers.begin(), numbers.end());
      there_.push_back(std::make_unique<device_tensor>(numbers, type));
      r_.operand[i] = type, a_.operand[i] = {there_.back()->data(), {}, type, 1};
    }
  }
  bool is_empty() const { return *text_ == '\0'; }
  const request& r() const { return r_; }
  arguments& a() { return a_; }
  view rows_of(void* data) const { return {data, {0, 0, 0, columns_}, r_.x, 1}; }
  doubles run(doubles x) const {
    if (is_empty()) return x;
    doubles y(x.size());
    values call{.x = {x.data(), dtype::f64, {rows_, columns_}}, .y = {y.data(), dtype::f64, {rows_, columns_}}};
    for (const doubles& operand : exact_)
      call.operands.push_back({const_cast<double*>(operand.data()), dtype::f64, {columns_}});
    line(text_).forward(call);
    return y;
  }
  const device_tensor* operand(std::size_t i) const { return i < there_.size() ? there_[i].get() : nullptr; }

 private:
  const char* text_;
  const int64 rows_, columns_;
  const spec::line line_;
  request r_;
  arguments a_{};
  std::vector<doubles> exact_;
  std::vector<std::unique_ptr<device_tensor>> there_;
};

class linear_on_device {
 public:
  explicit linear_on_device(const linear_case& of)
      : of_(of),
        x_(drawn(static_cast<std::size_t>(of.rows * of.k), of.type, 1)),
        w_(drawn(static_cast<std::size_t>(of.columns * of.k), of.type, 2)),
        x_there_(x_, of.type),
        w_there_(w_, of.type),
        y_(static_cast<std::size_t>(of.rows * of.columns), of.type),
        before_(of.before, of.rows, of.k, of.type, 10),
        behind_(of.behind, of.rows, of.columns, of.type, 20) {
    before_.a().x = before_.rows_of(x_there_.data()), before_.a().y = {};
    behind_.a().x = behind_.a().y = behind_.rows_of(y_.data());
  }
  warp_linear_call by_warps() {
    return {.before = before_.r(),
            .a_before = before_.a(),
            .behind = behind_.r(),
            .a_behind = behind_.a(),
            .matrix = w_there_.data(),
            .matrix_stride = of_.k,
            .k = of_.k};
  }
  void launch_tiles() {
    ASSERT_TRUE(before_.is_empty());
    const request none_request;
    const arguments none{};
    const linear_call call{.before = none_request,
                           .a_before = none,
                           .behind = behind_.r(),
                           .a_behind = behind_.a(),
                           .defers = false,
                           .input = x_there_.data(),
                           .input_stride = of_.k,
                           .matrix = w_there_.data(),
                           .matrix_stride = of_.k,
                           .k = of_.k,
                           .sums = nullptr,
                           .offsets = nullptr};
    ASSERT_TRUE(fits(call));
    launch(call, 0, nullptr);
    expect_right();
  }
  // Each feature is a word, whose operand is a row of the matrix.
  void launch_small_n() {
    const spec::line ends = spec::with_features(spec::parse(of_.before), static_cast<int>(of_.columns));
    request r(ends, false);
    r.line = spec::type_text(ends, 0, false), r.x = of_.type;
    std::fill_n(r.operand, ends.operands, of_.type);
    arguments a = before_.a();
    spec::fill_parameters(ends, of_.type, a);
    a.y = {};
    const int own = ends.operands - static_cast<int>(of_.columns);
    for (int j = 0; j < of_.columns; ++j)
      a.operand[own + j] = {static_cast<char*>(w_there_.data()) + j * of_.k * size_of(of_.type), {}, of_.type, 1};
    ASSERT_EQ(why_not_small_n(r, a, facts(0)), "");
    const small_n_call call{r, a, behind_.r(), behind_.a()};
    launch(call, plan_small_n(call, facts(0)), 0, nullptr);
    expect_right();
  }
  // Of layer_norm | scale | bias, or rms_norm | scale.
  void launch_deferred(bool centres) {
    const device_tensor folded(w_.size(), of_.type), statistics(static_cast<std::size_t>(2 * of_.rows), dtype::f32);
    const std::vector<float> zeros(static_cast<std::size_t>(2 * padded_columns(of_.columns)), 0.0f);
    const device_tensor sums(zeros, dtype::f32);
    auto* const first = static_cast<float*>(sums.data());
    if (needs_statistics(of_.columns)) make_statistics(statistics);
    fold(folded, first, centres);
    const linear_call call{.before = before_.r(),
                           .a_before = before_.a(),
                           .behind = behind_.r(),
                           .a_behind = behind_.a(),
                           .defers = true,
                           .input = x_there_.data(),
                           .input_stride = of_.k,
                           .matrix = folded.data(),
                           .matrix_stride = of_.k,
                           .k = of_.k,
                           .sums = first,
                           .offsets = first + padded_columns(of_.columns)};
    ASSERT_TRUE(fits(call));
    launch(call, 0, nullptr);
    expect_right();
  }
  void expect_right() {
    const doubles input = before_.run(doubles(x_.begin(), x_.end()));
    doubles products(static_cast<std::size_t>(of_.rows * of_.columns));
    for (int64 r = 0; r < of_.rows; ++r)
      for (int64 c = 0; c < of_.columns; ++c)
        for (int64 d = 0; d < of_.k; ++d)
          products[static_cast<std::size_t>(r * of_.columns + c)] +=
              input[static_cast<std::size_t>(r * of_.k + d)] * double{w_[static_cast<std::size_t>(c * of_.k + d)]};
    const double bound = of_.type == dtype::f32 ? 1e-5 : of_.type == dtype::f16 ? 2e-3 : 1e-2;
    EXPECT_LT(distance(y_.host(), behind_.run(products)), bound)
        << of_.before << " | linear | " << of_.behind << ", " << of_.rows << " x " << of_.k << " to " << of_.columns;
  }

 private:
  void make_statistics(const device_tensor& to) {
    request only = before_.r();
    only.only_statistics = true;
    before_.a().statistics = to.data();
    launch(only, prepare(only, before_.a(), 0, nullptr), before_.a(), 0, nullptr);
  }
  // sums: and offsets behind them.
  void fold(const device_tensor& folded, float* sums, bool centres) {
    const device_tensor *scale = before_.operand(0), *bias = before_.operand(1);
    launch(fold_call{.matrix = w_there_.data(),
                     .scale = scale->data(),
                     .bias = bias ? bias->data() : nullptr,
                     .folded = folded.data(),
                     .sums = sums,
                     .offsets = sums + padded_columns(of_.columns),
                     .k = of_.k,
                     .stride = of_.k,
                     .type = of_.type,
                     .scale_type = of_.type,
                     .bias_type = bias ? of_.type : dtype::none,
                     .centres = centres,
                     .columns = of_.columns},
           0, nullptr);
  }

  const linear_case of_;
  const std::vector<float> x_, w_;
  const device_tensor x_there_, w_there_, y_;
  side before_, behind_;
};

using EmulatedLinear = Emulated;

TEST_F(EmulatedLinear, ByTiles) {
  linear_on_device({"", "bias | gelu", 200, 72, 136, dtype::bf16}).launch_tiles();
  linear_on_device({"", "bias", 130, 256, 264, dtype::f16}).launch_tiles();
}
TEST_F(EmulatedLinear, ByTilesOfADeferredNorm) {
  linear_on_device({"rms_norm | scale", "bias", 150, 256, 136, dtype::bf16}).launch_deferred(false);
  linear_on_device({"layer_norm | scale", "bias", 150, 640, 136, dtype::bf16}).launch_deferred(true);
  linear_on_device({"layer_norm | scale | bias", "gelu", 140, 192, 520, dtype::f16}).launch_deferred(true);
}
TEST_F(EmulatedLinear, SmallN) {
  linear_on_device({"layer_norm | scale | bias", "bias | silu", 50, 256, 3, dtype::bf16}).launch_small_n();
  linear_on_device({"rms_norm | scale", "bias", 9, 100, 1, dtype::f32}).launch_small_n();
}
TEST_F(EmulatedLinear, ByWarps) {
  for (const int device : {0, 1}) {
    linear_on_device few_rows({"rms_norm | scale", "bias | silu", 7, 512, 200, dtype::bf16});
    launch_small_m(few_rows.by_warps(), device, nullptr);
    few_rows.expect_right();
    linear_on_device short_rows({"layer_norm | scale | bias", "bias", 300, 64, 72, dtype::f16});
    launch_small_k(short_rows.by_warps(), device, nullptr);
    short_rows.expect_right();
  }
}

}  // namespace
}  // namespace onepass::cuda
