// Lines without `linear` on the device, forward and backward, beside the CPU in float64.
#include <array>
#include <cmath>
#include <map>

#include "onepass/core.h"
#include "src/cpu/row/common_lines.h"
#include "src/cuda/row/group.h"
#include "src/cuda/row/launch.h"
#include "src/line/defined.h"
#include "tests/cuda/imagined_call.h"
#include "tests/kernel/device_memory.h"

namespace onepass::cuda {
namespace {

struct sizes {
  int64 rows, columns;
};

// A call's tensors, each as the device has it and in float64.
class line_call {
 public:
  // lies: how what it is given does; results are dense. level: x is a few units in the last place about it, if not 0.
  // of_pairs: tables of `rope` have one number for two columns.
  line_call(const std::string& text, dtype x, dtype column, sizes of, memory lies = {}, float level = 0,
            bool of_pairs = false)
      : line_(spec::parse(text)),
        reference_(text),
        x_(x),
        of_(of),
        column_(column),
        lies_(lies),
        table_columns_(line_.turned(of.columns) / (of_pairs ? 2 : 1)),
        of_pairs_(of_pairs) {
    const auto count = static_cast<std::size_t>(of.rows * of.columns);
    std::vector<float> numbers_of_x = drawn(count, x, 1);
    const float unit = std::nextafter(level, 2 * level) - level;
    if (level != 0)
      for (float& number : numbers_of_x) number = level + std::round(2 * number) * unit;
    add("x", numbers_of_x, x), add_gradient(0, "dy", 2);
    for (int i = 0; i < line_.operands; ++i) {
      if (is_target(i)) {
        add_target(i);
        continue;
      }
      if (is_table(i)) {
        const auto numbers = static_cast<std::size_t>(of.rows * table_columns_);
        add(operand(i), drawn(numbers, x, 3 + static_cast<unsigned>(i)), x, table_columns_);
        continue;
      }
      const std::size_t numbers = is_column(i) ? static_cast<std::size_t>(of.columns) : count;
      add(operand(i), drawn(numbers, type_of(i), 3 + static_cast<unsigned>(i)), type_of(i));
    }
    for (int k = 0; k < line_.keeps; ++k) add_gradient(1 + k, kept(k, "d"), 100 + static_cast<unsigned>(k));
  }

  // again: backward leaves forward's result.
  void expect_right(bool again = false) {
    arguments a = begin_forward();
    launch_all(forward_request(), a, a.statistics == nullptr ? &a.statistics : nullptr);
    backward(again);
    expect_found();
  }
  // Of a line that gives codes: codes times scales are its values before `quantize`, to half a unit of the code.
  // unit: of a code, beside it; 0 where it is the scale.
  void expect_codes(double unit) {
    arguments a = begin_forward();
    launch_all(forward_request(), a, a.statistics == nullptr ? &a.statistics : nullptr);
    const std::vector<double> codes = found_.at("y")->host(), scales = found_.at(kept(line_.keeps - 1, ""))->host();
    std::vector<double> exact = exact_.at("x");
    const spec::line before = spec::slice(line_, 0, static_cast<int>(line_.words.size()) - 1);
    values of_values = values_;
    of_values.y = {exact.data(), dtype::f64, shape(false)}, of_values.kept.pop_back(), of_values.statistics = {};
    if (!before.words.empty()) line(before.text).forward(of_values);
    const double rounding = x_ == dtype::f32 ? 1e-5 : x_ == dtype::f16 ? 2e-3 : 1e-2;  // of kept values
    const int64 columns = line_.group() > 0 ? line_.group() : of_.columns;             // that share a scale
    ASSERT_EQ(static_cast<int64>(scales.size()) * columns, of_.rows * of_.columns);
    for (std::size_t group = 0; group < scales.size(); ++group) {
      const double scale = scales[group];
      double largest = 0, beyond = 0;
      const auto each = [&](const auto& body) {
        for (int64 column = 0; column < columns; ++column)
          body(group * static_cast<std::size_t>(columns) + static_cast<std::size_t>(column));
      };
      each([&](std::size_t at) { largest = std::max(largest, std::fabs(exact[at])); });
      each([&](std::size_t at) {
        const double half = std::max(unit * std::fabs(exact[at]), scale * (unit == 0 ? 0.5 : 0x1p-10));
        beyond = std::max(beyond, std::fabs(codes[at] * scale - exact[at]) - half);
      });
      EXPECT_NEAR(scale, largest / largest_code(line_.result(0).own), rounding * scale) << line_.text;
      EXPECT_LT(beyond, rounding * largest) << line_.text << ", " << of_.rows << " x " << of_.columns;
    }
    for (int k = 0; k + 1 < line_.keeps; ++k)
      EXPECT_LT(distance(found_.at(kept(k, ""))->host(), expected_.at(kept(k, ""))), rounding) << line_.text;
  }
  // And what is right.
  arguments begin_forward() {
    const call c = call_of(line_, false, x_, column_, of_.rows, of_.columns);
    arguments a = arguments_of(c);
    a.x = given("x", x_);
    a.y = result_of_line(0, "y", c.a.y);
    values_ = {.x = exact("x"), .y = to_result(0, "y")};
    for (int k = 0; k < line_.keeps; ++k) {
      a.kept[k] = result_of_line(1 + k, kept(k, ""), c.a.kept[k]);
      values_.kept.push_back(to_result(1 + k, kept(k, "")));
    }
    for (int i = 0; i < line_.operands; ++i)
      values_.operands.push_back(is_target(i) ? tensor{targets_.at(i).data(), dtype::i64, {of_.rows}}
                                 : is_table(i)
                                     ? tensor{exact_.at(operand(i)).data(), dtype::f64, {of_.rows, table_columns_}}
                                     : exact(operand(i), is_column(i)));
    if (const int count = reference_.statistics(dtype::f64); count > 0) {
      statistics_ =
          std::make_unique<device_tensor>(static_cast<std::size_t>(reference_.statistics(x_) * of_.rows), dtype::f32);
      a.statistics = statistics_->data();
      exact_["statistics"].resize(static_cast<std::size_t>(count * of_.rows));
      values_.statistics = {exact_["statistics"].data(), dtype::f64, {count, of_.rows}};
    }
    values_.dropout_state = kState;
    reference_.forward(values_);
    return a;
  }

  request forward_request() const { return call_of(line_, false, x_, column_, of_.rows, of_.columns).r; }
  void expect_found() const {
    const bool is_wide = x_ == dtype::f32;
    for (const auto& [name, found] : found_) {
      const double bound = is_wide ? 1e-5 : x_ == dtype::f16 ? 2e-3 : 1e-2;
      EXPECT_LT(distance(found->host(), expected_.at(name)), bound)
          << name << " of " << line_.text << ", " << of_.rows << " x " << of_.columns;
    }
  }

 private:
  static std::string operand(int i) { return "operand " + std::to_string(i); }
  static std::string kept(int k, const char* before) { return before + std::string("kept ") + std::to_string(k); }
  bool is_column(int i) const { return line_.operand_word(i).about->operand == operand_kind::column; }
  dtype type_of(int i) const { return is_column(i) ? column_ : line_.likely_type(i, x_); }
  bool is_table(int i) const { return line_.operand_word(i).about->kind == word_kind::rotary; }
  bool is_target(int i) const { return line_.operand_word(i).about->operand == operand_kind::target; }
  // The last row is ignored.
  void add_target(int i) {
    std::vector<int64>& all = targets_[i];
    for (int64 row = 0; row < of_.rows; ++row) all.push_back((row * 7919 + i) * 104729 % of_.columns);
    all.back() = all.size() > 1 ? static_cast<int64>(line_.operand_word(i).parameters.back()) : of_.columns - 1;
    given_.try_emplace(operand(i), std::make_unique<device_tensor>(all));
  }
  std::vector<std::int64_t> shape(bool column) const {
    return column ? std::vector<std::int64_t>{of_.columns} : std::vector<std::int64_t>{of_.rows, of_.columns};
  }
  std::size_t count(bool column) const {
    return static_cast<std::size_t>(column ? of_.columns : of_.rows * of_.columns);
  }

  // Of results, which are rows or one number a row.
  bool is_number(int i) const { return line_.result(i).is_number(); }
  std::vector<std::int64_t> shape_of_result(int i) const {
    const std::int64_t sizes[2] = {of_.rows, of_.columns};
    return spec::sizes_of_result(line_.result(i), {2, sizes});
  }
  void add_gradient(int i, const std::string& name, unsigned seed) {
    if (line_.gives_codes()) return;  // backward is of other lines
    if (const dtype type = line_.result(i).type(x_); !is_number(i))
      return add(name, drawn(count(false), type, seed), type);
    const std::vector<float> numbers = drawn(static_cast<std::size_t>(of_.rows), dtype::f32, seed);
    given_.try_emplace(name, std::make_unique<device_tensor>(numbers, dtype::f32));
    exact_[name].assign(numbers.begin(), numbers.end());
  }
  view given_gradient(int i, const std::string& name) const {
    if (!is_number(i)) return given(name, line_.result(i).type(x_));
    return {given_.at(name)->data(), {0, 0, 0, 1}, dtype::f32, 0};
  }
  tensor exact_gradient(int i, const std::string& name) {
    return {exact_.at(name).data(), dtype::f64, shape_of_result(i)};
  }
  tensor to_result(int i, const std::string& name) {
    return {expected_.at(name).data(), line_.result(i).type(dtype::f64), shape_of_result(i)};
  }
  view result_of_line(int i, const std::string& name, view like) {
    if (!is_number(i)) return result(name, line_.result(i).type(x_), false, like);
    const int group = line_.result(i).group;
    const int64 each = group > 0 ? of_.columns / group : 1;
    found_[name] = std::make_unique<device_tensor>(static_cast<std::size_t>(of_.rows * each), dtype::f32);
    expected_[name].resize(static_cast<std::size_t>(of_.rows * each));
    return {found_[name]->data(), {0, 0, 0, each}, dtype::f32, group};
  }

  // Between the rows there is nothing that may be read.
  void add(const std::string& name, const std::vector<float>& numbers, dtype type) {
    add(name, numbers, type, of_.columns);
  }
  void add(const std::string& name, const std::vector<float>& numbers, dtype type, int64 row_length) {
    const auto columns = static_cast<std::size_t>(row_length), gap = static_cast<std::size_t>(lies_.gap);
    std::vector<float> there(static_cast<std::size_t>(lies_.offset), NAN);
    for (std::size_t first = 0; first < numbers.size(); first += columns) {
      there.insert(there.end(), numbers.begin() + static_cast<std::ptrdiff_t>(first),
                   numbers.begin() + static_cast<std::ptrdiff_t>(first + columns));
      if (first + columns < numbers.size()) there.insert(there.end(), gap, NAN);
    }
    given_.try_emplace(name, std::make_unique<device_tensor>(there, type));
    exact_[name].assign(numbers.begin(), numbers.end());
  }
  void* data_of(const std::string& name, dtype type) const {
    return static_cast<char*>(given_.at(name)->data()) + lies_.offset * size_of(type);
  }
  view given(const std::string& name, dtype type) const {
    return {data_of(name, type), {0, 0, 0, of_.columns + lies_.gap}, type, 1};
  }
  view result(const std::string& name, dtype type, bool column, view like) {
    found_[name] = std::make_unique<device_tensor>(count(column), type);
    expected_[name].resize(count(column));
    like.data = found_[name]->data();
    return like;
  }
  tensor exact(const std::string& name, bool column = false) {
    return {exact_.at(name).data(), dtype::f64, shape(column)};
  }
  tensor to(const std::string& name, bool column = false) {
    return {expected_.at(name).data(), dtype::f64, shape(column)};
  }

  arguments arguments_of(const call& c) {
    arguments a = c.a;
    a.inverse_columns = 1.0 / static_cast<double>(of_.columns);
    a.matrix_rows = of_.rows;
    a.x = {}, a.y = {}, a.dx = {}, a.recomputed = {}, a.statistics = nullptr;
    std::fill(std::begin(a.kept), std::end(a.kept), view{});
    std::fill(std::begin(a.operand_gradient), std::end(a.operand_gradient), view{});
    spec::fill_parameters(line_, x_, a);
    for (int i = 0; i < line_.operands; ++i) {
      if (is_target(i)) a.operand[i] = {given_.at(operand(i))->data(), {0, 0, 0, 1}, dtype::i64, 0};
      else if (is_column(i)) a.operand[i].data = data_of(operand(i), column_);
      else if (is_table(i))
        a.operand[i] = {data_of(operand(i), x_), {0, 0, 0, table_columns_ + lies_.gap}, x_, of_pairs_ ? kOneForTwo : 1};
      else a.operand[i] = given(operand(i), type_of(i));
    }
    a.dropout_state = static_cast<const int64*>(state_.data());
    return a;
  }
  void launch_all(const request& r, arguments& a, void** of_rows) {
    const std::vector<plan> plans = prepare(r, a, 0, nullptr);
    std::unique_ptr<device_tensor> partial, parts_of_rows;
    if (plans.size() > 1) {
      a.task_columns = plans.front().row_columns;
      const int64 parts = ceil_div(a.columns, a.task_columns);
      parts_of_rows =
          std::make_unique<device_tensor>(static_cast<std::size_t>(a.rows * (row_numbers(r) + 4 * parts)), dtype::f32);
      auto* start = static_cast<float*>(parts_of_rows->data());
      if (of_rows != nullptr) *of_rows = start;
      a.row_parts = start + row_numbers(r) * a.rows;
    }
    const int slots = static_cast<int>(columns_.size());
    if (plans.back().with.one_part) {
      auto output = columns_.begin();
      for (int i = 0; i < kMaxOperands; ++i)
        if (a.wants_column >> i & 1) a.operand_gradient[i] = *output++;
    } else if (slots > 0) {
      a.parts = plans.back().parts;
      partial = std::make_unique<device_tensor>(static_cast<std::size_t>(slots * a.parts * a.columns), dtype::f32);
      a.column_partial = partial->data();
    }
    launch(r, plans, a, 0, nullptr);
    if (slots > 0 && !plans.back().with.one_part)
      reduce_columns(sums_of(a, dtype::f32, a.parts, slots, columns_.data()), dtype::f32, 0, nullptr);
  }

  void backward(bool again) {
    const call c = call_of(line_, true, x_, column_, of_.rows, of_.columns, {}, again);
    arguments a = arguments_of(c);
    const spec::reads reads = spec::backward_reads(line_, again);
    if (again) a.recomputed = result("again", x_, false, c.a.recomputed), expected_["again"] = expected_.at("y");
    if (reads.x) a.x = given("x", x_);
    if (reads.result) a.x = c.a.x, a.x.data = found_.at("y")->data();
    if (reads.kept >= 0) {
      const auto k = static_cast<std::size_t>(reads.kept);
      a.kept[k] = c.a.kept[k], a.kept[k].data = found_.at(kept(reads.kept, ""))->data();
    }
    if (statistics_) a.statistics = statistics_->data();
    a.y = given_gradient(0, "dy");
    gradients g{.y = exact_gradient(0, "dy")};
    for (int k = 0; k < line_.keeps; ++k) {
      a.kept_gradient[k] = given_gradient(1 + k, kept(k, "d"));
      g.kept.push_back(exact_gradient(1 + k, kept(k, "d")));
    }
    if (c.a.dx.data != nullptr) a.dx = result("dx", x_, false, c.a.dx), g.x = to("dx");
    for (int i = 0; i < line_.operands; ++i) {
      const std::string name = "gradient of " + operand(i);
      g.operands.emplace_back();
      if (is_column(i)) {
        columns_.push_back(result(name, column_, true, {nullptr, {}, column_, 1}));
      } else if (c.a.operand_gradient[i].data != nullptr) {
        a.operand_gradient[i] = result(name, type_of(i), false, c.a.operand_gradient[i]);
      } else {
        continue;
      }
      g.operands.back() = to(name, is_column(i));
    }
    launch_all(c.r, a, &a.totals);
    reference_.backward(values_, g);
  }

  static constexpr int64 kState[2] = {1234, 8};
  const spec::line line_;
  const line reference_;
  const dtype x_;
  const sizes of_;
  const dtype column_;
  const memory lies_;
  const int64 table_columns_;
  const bool of_pairs_;
  std::map<std::string, std::unique_ptr<device_tensor>> given_, found_;
  std::map<std::string, std::vector<double>> exact_, expected_;
  std::map<int, std::vector<int64>> targets_;
  std::unique_ptr<device_tensor> statistics_;
  const device_tensor state_{kState};
  std::vector<view> columns_;
  values values_;
};

struct line_case {
  const char* line;
  dtype x, column;
  sizes of;
};

using EmulatedAnyLines = Emulated;
using EmulatedLists = Emulated;

std::ostream& operator<<(std::ostream& out, const line_case& c) { return out << c.line; }

class EmulatedLines : public Emulated, public testing::WithParamInterface<line_case> {};

TEST_P(EmulatedLines, AreTheCpus) {
  const auto& [text, x, column, of] = GetParam();
  line_call(text, x, column, of).expect_right();
}

constexpr line_case kCases[] = {
    {"gelu", dtype::bf16, dtype::bf16, {37, 128}},
    {"bias | gelu_tanh", dtype::f32, dtype::f32, {20, 96}},
    {"gate(silu)", dtype::f16, dtype::f16, {10, 200}},
    {"bias | dropout(0.1) | add", dtype::bf16, dtype::f32, {30, 264}},
    {"layer_norm | scale | bias", dtype::f32, dtype::f32, {70, 512}},
    {"layer_norm | scale | bias", dtype::bf16, dtype::bf16, {9, 1000}},
    {"bias | dropout(0.1) | add | keep | rms_norm | scale", dtype::bf16, dtype::bf16, {33, 768}},
    {"mul(1) | mask | softmax", dtype::f32, dtype::f32, {12, 77}},
    {"softmax", dtype::bf16, dtype::bf16, {5, 16384}},
    {"layer_norm | scale | bias", dtype::bf16, dtype::bf16, {3, 40000}},
    {"rms_norm | scale", dtype::bf16, dtype::bf16, {2, 600000}},
};
INSTANTIATE_TEST_SUITE_P(Kinds, EmulatedLines, testing::ValuesIn(kCases), [](const auto& of) {
  std::string name = of.param.line + std::string("_") + std::to_string(of.param.of.columns);
  std::erase_if(name, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; });
  return name;
});

TEST_F(EmulatedAnyLines, LeaveWhatForwardMade) {
  for (const line_case& of : {line_case{"layer_norm | scale | bias", dtype::f32, dtype::f32, {6, 33}},
                              line_case{"layer_norm | scale | bias | gelu", dtype::bf16, dtype::bf16, {20, 512}},
                              line_case{"rms_norm | scale", dtype::f16, dtype::f16, {1, 20000}},
                              line_case{"bias | gelu", dtype::f32, dtype::f32, {6, 33}}})
    line_call(of.line, of.x, of.column, of.of).expect_right(true);
}

// Rows whose deviation is two units in the last place of their mean: as many threads share one as it is long.
TEST_F(EmulatedAnyLines, OfASmallDeviationAreTheCpus) {
  for (const sizes of :
       {sizes{9, 64}, sizes{5, 512}, sizes{3, 1001}, sizes{2, 8192}, sizes{1, 40000}, sizes{1, 300000}})
    line_call("layer_norm | scale | bias", dtype::f32, dtype::f32, of, {}, 1048576.0f).expect_right();
}

// Held in registers from the first to the last, by threads of a warp, of a block and of a cluster; or in parts.
TEST_F(EmulatedAnyLines, OfSeveralRowWordsAreTheCpus) {
  const char* const residual = "rms_norm | scale | add | keep | rms_norm | scale";
  const char* const mixed =
      "gelu | layer_norm | scale | bias | dropout(0.2) | softmax | mul(8) | layer_norm | gate(silu)";
  for (const line_case& of :
       {line_case{residual, dtype::bf16, dtype::bf16, {9, 64}},
        line_case{residual, dtype::bf16, dtype::f32, {20, 1000}},
        line_case{residual, dtype::f32, dtype::f32, {3, 4096}},
        line_case{residual, dtype::bf16, dtype::bf16, {2, 40000}}, line_case{mixed, dtype::f32, dtype::f32, {7, 77}},
        line_case{mixed, dtype::f16, dtype::f16, {3, 2050}},
        line_case{"softmax | rms_norm(1e-12)", dtype::bf16, dtype::bf16, {2, 16384}},
        line_case{residual, dtype::bf16, dtype::bf16, {2, 600000}},
        line_case{mixed, dtype::f32, dtype::f32, {1, 300001}}})
    line_call(of.line, of.x, of.column, of.of).expect_right();
  line_call(residual, dtype::bf16, dtype::bf16, {5, 256}).expect_right(true);
  line_call(residual, dtype::f32, dtype::f32, {1, 300000}).expect_right(true);
}

// A value kept in float32 beside 16 bits, to which a residual of float32 was added.
TEST_F(EmulatedAnyLines, ThatKeepFloat32AreTheCpus) {
  const char* const residual = "add | keep(float32) | rms_norm | scale";
  for (const line_case& of :
       {line_case{residual, dtype::bf16, dtype::bf16, {9, 64}}, line_case{residual, dtype::f16, dtype::f32, {20, 1001}},
        line_case{residual, dtype::bf16, dtype::bf16, {2, 40000}},
        line_case{residual, dtype::bf16, dtype::bf16, {2, 600000}},
        line_case{residual, dtype::f32, dtype::f32, {3, 96}},
        line_case{"add | keep(float32) | gelu", dtype::bf16, dtype::bf16, {7, 77}},
        line_case{"add | keep(float32) | rms_norm | scale | keep | logsumexp", dtype::bf16, dtype::bf16, {5, 200}},
        line_case{"rms_norm | scale | add | keep(float32) | layer_norm", dtype::bf16, dtype::bf16, {6, 1000}}})
    line_call(of.line, of.x, of.column, of.of).expect_right();
  line_call(residual, dtype::bf16, dtype::bf16, {5, 75}, {.offset = 1, .gap = 3}).expect_right();
}

// Codes of norms' results, beside what is kept; their values are compared.
TEST_F(EmulatedAnyLines, ThatGiveCodesAreTheCpus) {
  const std::string norm = "times | add | keep | layer_norm | scale | bias | quantize(fp8)";
  for (const line_case& of : {line_case{norm.c_str(), dtype::bf16, dtype::bf16, {9, 64}},
                              line_case{norm.c_str(), dtype::f32, dtype::f32, {5, 77}},
                              line_case{norm.c_str(), dtype::f16, dtype::f32, {3, 5000}},
                              line_case{"quantize(fp8)", dtype::bf16, dtype::bf16, {4, 1001}},
                              line_case{"quantize(fp8)", dtype::f32, dtype::f32, {2, 40000}},
                              line_case{"rms_norm | quantize(fp8)", dtype::bf16, dtype::bf16, {1, 600000}},
                              line_case{"rope | quantize(fp8)", dtype::bf16, dtype::bf16, {5, 128}},
                              line_case{"rms_norm | scale | rope | quantize(fp8)", dtype::f32, dtype::f32, {3, 260}},
                              line_case{"rope(16) | keep | quantize(fp8)", dtype::f16, dtype::f16, {7, 40}}})
    line_call(of.line, of.x, of.column, of.of).expect_codes(0x1p-4);
  line_call("quantize(fp8)", dtype::bf16, dtype::bf16, {5, 75}, {.offset = 1, .gap = 3}).expect_codes(0x1p-4);
  line_call("quantize(fp8e5m2)", dtype::bf16, dtype::bf16, {9, 64}).expect_codes(0x1p-3);
  line_call("quantize(int8)", dtype::bf16, dtype::bf16, {9, 64}).expect_codes(0);
}

// In tiles, by threads of a warp, a block and a cluster, and in parts; lanes of 32 bytes; rows that do not begin at 16.
TEST_F(EmulatedAnyLines, ThatGiveCodesOfGroupsAreTheCpus) {
  const char* const gated = "silu | times | quantize(fp8, 128)";
  const char* const norm = "add | keep | rms_norm | scale | quantize(fp8, 128)";
  const char* const long_lanes = "dropout(0.5) | add | keep | layer_norm | scale | quantize(fp8, 256)";
  for (const line_case& of :
       {line_case{gated, dtype::bf16, dtype::bf16, {9, 384}}, line_case{gated, dtype::f32, dtype::f32, {5, 128}},
        line_case{gated, dtype::f16, dtype::f16, {300, 256}}, line_case{gated, dtype::f32, dtype::f32, {3, 4480}},
        line_case{"quantize(fp8, 16)", dtype::bf16, dtype::bf16, {7, 48}},
        line_case{"quantize(fp8, 32)", dtype::f32, dtype::f32, {1, 20000}},
        line_case{"quantize(fp8, 256)", dtype::f32, dtype::f32, {6, 1280}},
        line_case{norm, dtype::bf16, dtype::bf16, {9, 128}}, line_case{norm, dtype::bf16, dtype::bf16, {17, 1152}},
        line_case{norm, dtype::f32, dtype::f32, {9, 128}}, line_case{norm, dtype::f32, dtype::bf16, {3, 7168}},
        line_case{norm, dtype::bf16, dtype::bf16, {2, 40960}}, line_case{norm, dtype::bf16, dtype::bf16, {1, 600064}},
        line_case{long_lanes, dtype::f32, dtype::f32, {9, 768}},
        line_case{long_lanes, dtype::f32, dtype::f32, {2, 40960}},
        line_case{long_lanes, dtype::f32, dtype::f32, {1, 300032}},
        line_case{
            "rms_norm | scale | add | keep | layer_norm | quantize(fp8, 64)", dtype::f16, dtype::f32, {5, 192}}}) {
    SCOPED_TRACE(of.line + std::string(", ") + std::to_string(of.of.rows) + " x " + std::to_string(of.of.columns));
    line_call(of.line, of.x, of.column, of.of).expect_codes(0x1p-4);
  }
  for (const char* const line : {gated, norm})
    for (const memory& lies : {memory{1, 3}, memory{2, 6}, memory{4, 12}, memory{0, 1}}) {
      line_call(line, dtype::bf16, dtype::bf16, {5, 256}, lies).expect_codes(0x1p-4);
      line_call(line, dtype::f32, dtype::f32, {5, 256}, lies).expect_codes(0x1p-4);
    }
  line_call(norm, dtype::bf16, dtype::bf16, {2, 40960}, {1, 3}).expect_codes(0x1p-4);
  line_call(long_lanes, dtype::f32, dtype::f32, {5, 512}, {1, 3}).expect_codes(0x1p-4);
  line_call("scale | quantize(fp8e5m2, 128)", dtype::bf16, dtype::bf16, {9, 256}).expect_codes(0x1p-3);
  line_call("rms_norm | quantize(int8, 64)", dtype::bf16, dtype::bf16, {9, 256}).expect_codes(0);
}

// By threads of a warp, of a block and of a cluster; or in parts. Of l2_norm's rows some are shorter than its number.
TEST_F(EmulatedAnyLines, OfLogSoftmaxAndLengthsAreTheCpus) {
  const char* const both = "times | l2_norm | scale | add | keep | log_softmax | gated(silu)";
  for (const line_case& of :
       {line_case{"log_softmax", dtype::bf16, dtype::bf16, {9, 64}},
        line_case{"sub | mask | log_softmax", dtype::f32, dtype::f32, {12, 77}},
        line_case{"log_softmax", dtype::bf16, dtype::bf16, {5, 16384}},
        line_case{"bias | log_softmax", dtype::f32, dtype::f32, {2, 40000}},
        line_case{"tanh | log_softmax", dtype::bf16, dtype::bf16, {2, 600000}},
        line_case{"l2_norm(8) | scale", dtype::bf16, dtype::f32, {33, 72}},
        line_case{"l2_norm", dtype::f16, dtype::f16, {3, 1001}},
        line_case{"l2_norm | scale", dtype::f32, dtype::f32, {2, 20000}},
        line_case{"l2_norm(1e3)", dtype::f32, dtype::f32, {2, 300000}},
        line_case{both, dtype::f32, dtype::f32, {7, 200}}, line_case{both, dtype::bf16, dtype::bf16, {3, 5000}},
        line_case{both, dtype::f32, dtype::f32, {1, 300001}}})
    line_call(of.line, of.x, of.column, of.of).expect_right();
}

// All but `pow`, whose PTX calls a function: the emulator has no calls.
TEST_F(EmulatedAnyLines, OfFunctionsAreTheCpus) {
  const char* const functions = "clamp(-1, 1.5) | exp | sqrt | gate(abs) | neg | softcap(2) | square";
  for (const dtype x : {dtype::f32, dtype::bf16, dtype::f16}) {
    line_call("round | sub | times | gated(clamp(-1, 2)) | round", x, x, {9, 200}).expect_right();
    line_call("sigmoid | log | neg | sqrt", x, x, {10, 96}).expect_right();
  }
  line_call(functions, dtype::f32, dtype::f32, {20, 96}).expect_right();
}

// Of one and of two sums, by threads of a warp, of a block and of a cluster; or in parts.
TEST_F(EmulatedAnyLines, OfUsersRowWordsAreTheCpus) {
  spec::define({.name = "own_norm",
                .kind = spec::defined_kind::row,
                .parameters = {"eps"},
                .sums = 2,
                .source =
                    "template <class L> static L sum(L x, scalar eps) { return x; }\n"
                    "template <class L> static L second_sum(L x, scalar eps) { return x * x; }\n"
                    "template <class L> static L forward(L x, scalar sum, scalar second, scalar n, scalar eps) {\n"
                    "  const L mean = sum / n;\n"
                    "  return (x - mean) * rsqrt(second / n - mean * mean + eps);\n}"});
  spec::define({.name = "own_length",
                .kind = spec::defined_kind::ending,
                .sums = 1,
                .source = "template <class L> static L sum(L x) { return x * x; }\n"
                          "static scalar number(scalar sum, scalar n) { return sqrt(sum); }"});
  const char* const both = "gelu | add | keep | own_norm(0.1) | scale | rms_norm(0.1) | own_norm(0.5) | bias";
  const char* const numbers = "bias | own_length | logsumexp";
  for (const line_case& of :
       {line_case{both, dtype::f32, dtype::f32, {9, 64}}, line_case{both, dtype::bf16, dtype::bf16, {5, 1000}},
        line_case{both, dtype::f32, dtype::f32, {2, 20000}}, line_case{both, dtype::f32, dtype::f32, {1, 300001}},
        line_case{"own_norm(0.1) | scale", dtype::bf16, dtype::bf16, {20, 4096}},
        line_case{"own_norm(0.1) | scale", dtype::bf16, dtype::bf16, {2, 65536}},
        line_case{numbers, dtype::f32, dtype::f32, {7, 77}}, line_case{numbers, dtype::bf16, dtype::bf16, {3, 8192}},
        line_case{"own_norm(0.1) | keep | own_length", dtype::f32, dtype::f32, {2, 2050}},
        line_case{numbers, dtype::f32, dtype::f32, {1, 600000}}})
    line_call(of.line, of.x, of.column, of.of).expect_right();
  line_call("own_norm(0.1) | scale", dtype::f32, dtype::f32, {5, 256}).expect_right(true);
  spec::undefine("own_norm"), spec::undefine("own_length");
}

// One number a row, alone and several of one pass, of rows that are held, in clusters, read twice and in parts.
TEST_F(EmulatedAnyLines, ThatEndInNumbersAreTheCpus) {
  const char* const kept = "add | keep | rms_norm(1e-3) | scale | logsumexp | entropy";
  for (const line_case& of :
       {line_case{"logsumexp", dtype::bf16, dtype::bf16, {9, 64}}, line_case{"sum", dtype::f32, dtype::f32, {7, 77}},
        line_case{"bias | gelu | mean", dtype::f16, dtype::f16, {5, 1000}},
        line_case{"amax", dtype::bf16, dtype::bf16, {3, 4096}},
        line_case{"bias | logsumexp", dtype::f32, dtype::f32, {3, 20000}},
        line_case{"keep | logsumexp | amax", dtype::bf16, dtype::bf16, {2, 131072}},
        line_case{"mul(3) | entropy | logsumexp", dtype::f32, dtype::f32, {3, 2050}},
        line_case{"entropy", dtype::bf16, dtype::bf16, {2, 600000}}, line_case{kept, dtype::f32, dtype::f32, {6, 264}},
        line_case{kept, dtype::f32, dtype::f32, {1, 300001}}})
    line_call(of.line, of.x, of.column, of.of).expect_right();
}

// Of one row's threads in a warp, in a block, in a cluster; or in parts.
TEST_F(EmulatedAnyLines, OfTargetsAreTheCpus) {
  for (const line_case& of : {line_case{"cross_entropy", dtype::bf16, dtype::bf16, {9, 64}},
                              line_case{"cross_entropy(0.1, 0.01)", dtype::f32, dtype::f32, {7, 77}},
                              line_case{"bias | gelu | keep | logprob", dtype::f16, dtype::f16, {5, 1000}},
                              line_case{"softcap(3) | cross_entropy", dtype::bf16, dtype::f32, {3, 20000}},
                              line_case{"cross_entropy(0.1)", dtype::bf16, dtype::bf16, {3, 131072}},
                              line_case{"cross_entropy(0.1)", dtype::bf16, dtype::bf16, {2, 600000}},
                              line_case{"add | rms_norm(1e-3) | cross_entropy", dtype::f32, dtype::f32, {4, 1001}}})
    line_call(of.line, of.x, of.column, of.of).expect_right();
}

// Rows and others beside them, by threads of a warp and of a block, once and in several steps, one and two passes.
TEST_F(EmulatedAnyLines, OfRowsAndOthersAreTheCpus) {
  for (const line_case& of :
       {line_case{"kl_div", dtype::bf16, dtype::bf16, {9, 64}}, line_case{"kl_div(1)", dtype::f32, dtype::f32, {7, 77}},
        line_case{"bias | gelu | kl_div(0.5, 2)", dtype::f16, dtype::f16, {5, 1000}},
        line_case{"kl_div(0.1)", dtype::f32, dtype::f32, {3, 20000}},
        line_case{"kl_div(0, 3)", dtype::bf16, dtype::bf16, {2, 131072}}})
    line_call(of.line, of.x, of.column, of.of).expect_right();
}

// Classes that the row leaves out and whose others are far below the rest, a whole step of a thread's: they count as
// nothing, as on the CPU.
TEST_F(EmulatedAnyLines, OfRowsThatLeaveOutWhatOthersHaveNextToNothingOf) {
  constexpr sizes kOf{3, 20000};
  constexpr int64 kPresent = 5000;
  for (const char* text : {"kl_div", "kl_div(1)", "kl_div(0.3)"}) {
    const bool is_reverse = std::string(text) == "kl_div(1)";
    const auto count = static_cast<std::size_t>(kOf.rows * kOf.columns);
    std::vector<float> own = drawn(count, dtype::f32, 1), others = drawn(count, dtype::f32, 2);
    for (std::size_t at = 0; at < count; ++at) {
      if (static_cast<int64>(at) % kOf.columns < kPresent) continue;
      own[at] = is_reverse ? -1e30f : -INFINITY, others[at] = is_reverse ? -INFINITY : -1e30f;
    }
    const line reference(text);
    std::vector<double> exact_own(own.begin(), own.end()), exact_others(others.begin(), others.end());
    const spec::line parsed = spec::parse(text);
    const int numbers = parsed.statistics(dtype::f32);
    const auto saved_numbers = static_cast<std::size_t>(numbers * kOf.rows);
    std::vector<double> expected(static_cast<std::size_t>(kOf.rows)), saved(saved_numbers);
    values of{.x = {exact_own.data(), dtype::f64, {kOf.rows, kOf.columns}},
              .y = {expected.data(), dtype::f64, {kOf.rows}}};
    of.operands.push_back({exact_others.data(), dtype::f64, {kOf.rows, kOf.columns}});
    of.statistics = {saved.data(), dtype::f64, {numbers, kOf.rows}};
    reference.forward(of);
    const device_tensor x(own, dtype::f32), teacher(others, dtype::f32);
    device_tensor y(static_cast<std::size_t>(kOf.rows), dtype::f32);
    const call c = call_of(parsed, false, dtype::f32, dtype::f32, kOf.rows, kOf.columns);
    arguments a = c.a;
    a.inverse_columns = 1.0 / static_cast<double>(kOf.columns);
    spec::fill_parameters(parsed, dtype::f32, a);
    device_tensor statistics(saved_numbers, dtype::f32);
    a.statistics = statistics.data();
    a.x = {x.data(), {0, 0, 0, kOf.columns}, dtype::f32, 1};
    a.operand[0] = {teacher.data(), {0, 0, 0, kOf.columns}, dtype::f32, 1};
    a.y = {y.data(), {0, 0, 0, 1}, dtype::f32, 0};
    launch(c.r, prepare(c.r, a, 0, nullptr), a, 0, nullptr);
    const std::vector<double> found = y.host();
    for (std::size_t row = 0; row < found.size(); ++row)
      EXPECT_NEAR(found[row], expected[row], 1e-5 * expected[row]) << text << ", row " << row;
  }
}

// A gradient times one number, in its place; where that is 1 the kernel ends at once.
TEST_F(EmulatedAnyLines, ThatMultiplyInPlaceByOneNumber) {
  for (const dtype type : {dtype::bf16, dtype::f32}) {
    for (const float factor : {1.0f, -2.5f}) {
      constexpr sizes kOf{37, 264};
      const std::vector<float> numbers = drawn(static_cast<std::size_t>(kOf.rows * kOf.columns), type, 5);
      const device_tensor dy(numbers, type), by(std::vector<float>{factor}, dtype::f32);
      call c = call_of(spec::parse("times"), true, type, type, kOf.rows, kOf.columns);
      c.r.in_place = true, c.r.wants_tensor = 0, c.r.operand[0] = dtype::f32;
      arguments a{};
      std::copy(std::begin(c.a.size), std::end(c.a.size), a.size);
      a.rows = kOf.rows, a.columns = kOf.columns, a.matrix_rows = kOf.rows;
      a.y = a.dx = {dy.data(), {0, 0, 0, kOf.columns}, type, 1};
      a.operand[0] = {by.data(), {}, dtype::f32, 0};
      const std::vector<plan> plans = prepare(c.r, a, 0, nullptr);
      ASSERT_EQ(plans.front().with.one_factor, 1u);
      launch(c.r, plans, a, 0, nullptr);
      std::vector<double> right(numbers.begin(), numbers.end());
      for (double& number : right) number *= factor;
      EXPECT_LT(distance(dy.host(), right), type == dtype::f32 ? 1e-7 : 4e-3) << factor;
      request more = c.r;  // of `times | linear`: what else is written does not depend on the factor's being 1
      more.wants_recompute = true;
      EXPECT_EQ(describe(more, a).one_factor, 0u);
      more.wants_recompute = false, more.wants_tensor = 1;
      EXPECT_EQ(describe(more, a).one_factor, 0u);
      a.operand[0].stride[3] = 1;  // a number a row is no such number
      EXPECT_EQ(describe(c.r, a).one_factor, 0u);
    }
  }
}

TEST_F(EmulatedAnyLines, OfSeveralTargetsAreTheCpus) {
  for (const sizes of : {sizes{6, 264}, sizes{2, 50000}, sizes{1, 300001}})
    line_call("logprob | entropy | cross_entropy(0.5)", dtype::f32, dtype::f32, of).expect_right();
}

// By threads of a warp, of a block and of a cluster, or in parts; whole rows and their first numbers, pairs half of
// what is turned apart and neighbours, tables of numbers and of pairs.
TEST_F(EmulatedAnyLines, WithRopeAreTheCpus) {
  const char* const norm = "rms_norm(1e-6) | scale | rope";
  const char* const first = "rms_norm(1e-6) | scale | rope(32)";
  const char* const mixed = "bias | layer_norm | dropout(0.2) | rope(16, interleaved) | keep | rms_norm | gate(silu)";
  for (const line_case& of :
       {line_case{norm, dtype::bf16, dtype::bf16, {40, 128}}, line_case{norm, dtype::f32, dtype::f32, {9, 64}},
        line_case{norm, dtype::bf16, dtype::f32, {20, 80}}, line_case{norm, dtype::f16, dtype::f16, {7, 34}},
        line_case{norm, dtype::bf16, dtype::bf16, {3, 8192}}, line_case{norm, dtype::f32, dtype::f32, {2, 40000}},
        line_case{norm, dtype::bf16, dtype::bf16, {2, 600000}}, line_case{first, dtype::bf16, dtype::bf16, {40, 128}},
        line_case{first, dtype::f32, dtype::f32, {9, 36}}, line_case{first, dtype::f32, dtype::f32, {1, 300000}},
        line_case{mixed, dtype::f32, dtype::f32, {7, 48}}, line_case{mixed, dtype::bf16, dtype::bf16, {3, 256}},
        line_case{mixed, dtype::bf16, dtype::bf16, {2, 16384}},
        line_case{"scale | rope", dtype::bf16, dtype::bf16, {40, 128}},
        line_case{"scale | rope(12) | silu", dtype::f32, dtype::f32, {300, 20}},
        line_case{"dropout(0.3) | rope | causal | softmax", dtype::bf16, dtype::bf16, {5, 96}},
        line_case{"rope(interleaved)", dtype::f16, dtype::f16, {6, 6}},
        line_case{"bias | rope(64, interleaved) | keep", dtype::bf16, dtype::bf16, {11, 128}}}) {
    SCOPED_TRACE(of.line);
    line_call(of.line, of.x, of.column, of.of).expect_right();
    line_call(of.line, of.x, of.column, of.of, {4, 12}, 0, true).expect_right();
  }
  line_call(norm, dtype::bf16, dtype::bf16, {9, 128}, {1, 3}).expect_right();
  line_call(norm, dtype::bf16, dtype::bf16, {9, 128}, {2, 6}, 0, true).expect_right(true);
}

// Tensors of one list.
TEST_F(EmulatedLists, ShareALaunch) {
  std::vector<std::unique_ptr<line_call>> calls;
  std::vector<arguments> all;
  for (const sizes of : {sizes{5, 72}, sizes{40, 72}, sizes{2, 72}})
    calls.push_back(std::make_unique<line_call>("layer_norm | scale | bias", dtype::bf16, dtype::bf16, of));
  for (const auto& call : calls) all.push_back(call->begin_forward());
  std::vector<member> members;
  for (arguments& a : all) members.push_back({&a, false});
  const request r = calls.front()->forward_request();
  const std::vector<batch> shared = batches(r, members, 0, nullptr);
  ASSERT_EQ(shared.size(), 1u);
  launch(r, shared.front(), members, 0, nullptr);
  for (const auto& call : calls) call->expect_found();
}

// Queries and keys.
TEST_F(EmulatedLists, WithRopeShareALaunch) {
  std::vector<std::unique_ptr<line_call>> calls;
  std::vector<arguments> all;
  for (const sizes of : {sizes{40, 128}, sizes{8, 128}})
    calls.push_back(std::make_unique<line_call>("rms_norm(1e-6) | scale(1) | rope", dtype::bf16, dtype::bf16, of,
                                                memory{}, 0.0f, true));
  for (const auto& call : calls) all.push_back(call->begin_forward());
  std::vector<member> members;
  for (arguments& a : all) members.push_back({&a, false});
  const request r = calls.front()->forward_request();
  const std::vector<batch> shared = batches(r, members, 0, nullptr);
  ASSERT_EQ(shared.size(), 1u);
  launch(r, shared.front(), members, 0, nullptr);
  for (const auto& call : calls) call->expect_found();
}

// Any of the common lines, of any size and layout; EMULATED_LINES says how many.
TEST_F(EmulatedAnyLines, AreTheCpus) {
  const char* const asked = std::getenv("EMULATED_LINES");
  std::mt19937 random(asked ? std::random_device()() : 0);
  const std::vector<std::string>& all = cpu::common_lines();
  for (int n = asked ? std::atoi(asked) : 12; n > 0; --n) {
    const std::string& text = all[random() % all.size()];
    const dtype x = std::array{dtype::f32, dtype::bf16, dtype::f16}[random() % 3];
    const dtype column = random() % 4 == 0 ? dtype::f32 : x;
    const bool is_long = random() % 8 == 0;
    int64 columns = 1 + static_cast<int64>(random() % (is_long ? 20000 : 1500));
    if (random() % 2 == 0) columns = (columns + 7) / 8 * 8;
    if (text.find("rope") != std::string::npos) columns += columns % 2;
    const sizes of{1 + static_cast<int64>(random() % (is_long ? 4 : 40)), columns};
    const memory lies{static_cast<int64>(random() % 3 == 0 ? random() % 9 : 0),
                      static_cast<int64>(random() % 3 == 0 ? random() % 20 : 0)};
    SCOPED_TRACE(text + ", " + std::to_string(of.rows) + " x " + std::to_string(of.columns) + ", dtypes " +
                 std::to_string(static_cast<int>(x)) + " and " + std::to_string(static_cast<int>(column)) +
                 ", offset " + std::to_string(lies.offset) + ", gap " + std::to_string(lies.gap));
    line_call(text, x, column, of, lies).expect_right();
  }
}

}  // namespace
}  // namespace onepass::cuda
