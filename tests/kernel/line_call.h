// A call of a line on the device, forward and backward, beside the CPU in float64.
#pragma once

#include <cmath>
#include <map>
#include <numeric>

#include "onepass/core.h"
#include "src/cuda/row/launch.h"
#include "tests/cuda/imagined_call.h"
#include "tests/kernel/device_memory.h"

namespace onepass::cuda {

struct sizes {
  int64 rows, columns;
};

// A call's tensors, each as the device has it and in float64.
class line_call {
 public:
  // lies: how what it is given does; results are dense. level: x is a few units in the last place about it, if not 0.
  // of_pairs: tables of `rope` have one number for two columns. channels: how many a row has, for words by channels.
  line_call(const std::string& text, dtype x, dtype column, sizes of, memory lies = {}, float level = 0,
            bool of_pairs = false, int64 channels = 1)
      : line_(spec::parse(text)),
        reference_(text),
        x_(x),
        of_(of),
        column_(column),
        lies_(lies),
        table_columns_(line_.turned(of.columns) / (of_pairs ? 2 : 1)),
        of_pairs_(of_pairs),
        channels_(channels) {
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
      const std::size_t numbers = is_column(i) ? static_cast<std::size_t>(numbers_of_column(i)) : count;
      add(operand(i), drawn(numbers, type_of(i), 3 + static_cast<unsigned>(i)), type_of(i),
          is_column(i) ? numbers_of_column(i) : of.columns);
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
      values_.operands.push_back(
          is_target(i)   ? tensor{targets_.at(i).data(), dtype::i64, {of_.rows}}
          : is_table(i)  ? tensor{exact_.at(operand(i)).data(), dtype::f64, {of_.rows, table_columns_}}
          : is_column(i) ? tensor{exact_.at(operand(i)).data(), dtype::f64, {numbers_of_column(i)}}
                         : exact(operand(i)));
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
      const std::vector<double>& expected = expected_.at(name);
      std::vector<double> there = found->host();
      if (name == "dx" && lies_.with_dx) there = without_gaps(there);
      if (there.size() != expected.size()) {  // of channels, whose columns the kernel leaves to be added up
        const std::size_t each = there.size() / expected.size();
        for (std::size_t i = 0; i < expected.size(); ++i) {
          const auto first = there.begin() + static_cast<std::ptrdiff_t>(i * each);
          there[i] = std::accumulate(first, first + static_cast<std::ptrdiff_t>(each), 0.0);
        }
        there.resize(expected.size());
      }
      EXPECT_LT(distance(there, expected), bound)
          << name << " of " << line_.text << ", " << of_.rows << " x " << of_.columns;
    }
  }

 private:
  static std::string operand(int i) { return "operand " + std::to_string(i); }
  static std::string kept(int k, const char* before) { return before + std::string("kept ") + std::to_string(k); }
  bool is_column(int i) const { return line_.operand_word(i).about->operand == operand_kind::column; }
  bool is_of_channels(int i) const { return line_.operand_word(i).about->by_channels; }
  // Columns whose gradients are added up, as plan_gradients has it.
  int unit() const {
    const auto log = static_cast<int>(unit_type(of_.columns / channels_) / kUnit);
    return line_.by_channels() ? std::min(1 << log, 512 / size_of(x_)) : 1;
  }
  int64 numbers_of_column(int i) const { return is_of_channels(i) ? channels_ : of_.columns; }
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
  // Of dx whose rows lie apart; between them nothing is written.
  std::vector<double> without_gaps(const std::vector<double>& there) const {
    const auto columns = static_cast<std::size_t>(of_.columns), stride = columns + static_cast<std::size_t>(lies_.gap);
    std::vector<double> numbers;
    for (std::size_t at = 0; at < there.size(); ++at) {
      if (at % stride < columns) numbers.push_back(there[at]);
      else EXPECT_TRUE(std::isnan(there[at])) << "behind a row of dx of " << line_.text;
    }
    return numbers;
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
      else if (is_column(i))
        a.operand[i] = {
            data_of(operand(i), column_), {}, column_, static_cast<int>(of_.columns / numbers_of_column(i))};
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
      a.parts = 1 + plans.back().parts;  // the first is another tensor's, whose rows give zeros
      const std::vector<float> zeros(static_cast<std::size_t>(slots * a.parts * a.columns));
      partial = std::make_unique<device_tensor>(zeros, dtype::f32);
      a.column_partial = static_cast<float*>(partial->data()) + a.columns;
    }
    launch(r, plans, a, 0, nullptr);
    if (partial) a.column_partial = partial->data();
    if (slots > 0 && !plans.back().with.one_part)
      reduce_columns(sums_of(a, dtype::f32, a.parts, slots, columns_.data()), dtype::f32, 0, nullptr);
  }

  void backward(bool again) {
    call c = call_of(line_, true, x_, column_, of_.rows, of_.columns, {}, again);
    c.a.unit = c.r.unit = unit();
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
    if (c.a.dx.data != nullptr && lies_.with_dx) {
      const auto numbers = static_cast<std::size_t>(of_.rows * (of_.columns + lies_.gap));
      found_["dx"] = std::make_unique<device_tensor>(std::vector<float>(numbers, NAN), x_);
      a.dx.data = found_.at("dx")->data(), a.dx.stride[kMaxDims - 1] = of_.columns + lies_.gap;
    }
    for (int i = 0; i < line_.operands; ++i) {
      const std::string name = "gradient of " + operand(i);
      g.operands.emplace_back();
      if (is_column(i)) {
        const dtype type = is_of_channels(i) ? dtype::f32 : column_;
        const int each = is_of_channels(i) ? unit() : 1;
        found_[name] = std::make_unique<device_tensor>(static_cast<std::size_t>(of_.columns / each), type);
        columns_.push_back({found_[name]->data(), {}, type, each});
        const auto numbers = static_cast<std::size_t>(numbers_of_column(i));
        expected_[name].resize(numbers);
        g.operands.back() = {expected_[name].data(), dtype::f64, {numbers_of_column(i)}};
        continue;
      } else if (c.a.operand_gradient[i].data != nullptr) {
        a.operand_gradient[i] = result(name, type_of(i), false, c.a.operand_gradient[i]);
      } else {
        continue;
      }
      g.operands.back() = to(name);
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
  const int64 channels_;
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

inline std::ostream& operator<<(std::ostream& out, const line_case& c) { return out << c.line; }

using EmulatedAnyLines = Emulated;

}  // namespace onepass::cuda
