// Operands that repeat along leading dimensions on the device, beside the CPU row by row in float64.
#include <deque>
#include <map>
#include <memory>

#include "onepass/core.h"
#include "src/cuda/row/launch.h"
#include "tests/kernel/device_memory.h"

namespace onepass::cuda {
namespace {

using sizes = std::vector<std::int64_t>;

std::size_t count_of(const sizes& of) {
  std::int64_t count = 1;
  for (const std::int64_t size : of) count *= size;
  return static_cast<std::size_t>(count);
}

// What a call lays out; every operand has as many dimensions as x.
class groups_frame : public spec::frame {
 public:
  groups_frame(const spec::line& line, const sizes& x, dtype type, dtype of_operands)
      : spec::frame(line, {static_cast<int>(x.size()), x.data()}, type) {
    for (int i = 0; i < line.operands; ++i) operand_type(i, of_operands);
  }
  void enter(void* data, dtype type, const sizes& of, view& out) {
    held_.push_back(of);
    const sizes& own = held_.back();
    sizes strides(of.size(), 1);
    for (std::size_t d = of.size() - 1; d > 0; --d) strides[d - 1] = strides[d] * of[d];
    held_.push_back(strides);
    take({data, type, static_cast<int>(own.size()), own.data(), held_.back().data(), &out});
  }

 private:
  std::deque<sizes> held_;
};

class groups_call {
 public:
  groups_call(const char* text, dtype type, dtype of_operands, const sizes& x, const std::vector<sizes>& operands)
      : line_(spec::parse(text)), type_(type), operand_type_(of_operands), x_(x), sizes_(operands) {
    add("x", x, type, 1), add("dy", x, type, 2);
    for (std::size_t i = 0; i < operands.size(); ++i)
      add(operand(i), operands[i], of_operands, 3 + static_cast<unsigned>(i));
    rows_ = static_cast<std::int64_t>(count_of(x)) / x.back();
  }

  void expect_right() {
    expect_by_row(line(line_.text));
    forward(), backward();
    for (const auto& [name, found] : found_)
      EXPECT_LT(distance(found->host(), expected_.at(name)), type_ == dtype::f32 ? 1e-5 : 1e-2)
          << name << " of " << line_.text;
  }

 private:
  static std::string operand(std::size_t i) { return "operand " + std::to_string(i); }
  void add(const std::string& name, const sizes& of, dtype type, unsigned seed) {
    const std::vector<float> numbers = drawn(count_of(of), type, seed);
    given_[name] = std::make_unique<device_tensor>(numbers, type);
    exact_[name].assign(numbers.begin(), numbers.end());
  }
  void* result(const std::string& name, const sizes& of, dtype type) {
    found_[name] = std::make_unique<device_tensor>(count_of(of), type);
    return found_[name]->data();
  }
  // Where a row of x is in an operand, in rows.
  std::int64_t row_in(std::size_t i, std::int64_t row) const {
    std::int64_t at = 0, stride = 1;
    for (std::size_t d = x_.size() - 1; d-- > 0; row /= x_[d]) {
      if (sizes_[i][d] != 1) at += row % x_[d] * stride, stride *= x_[d];
    }
    return at;
  }

  void expect_by_row(const line& of) {
    const std::int64_t columns = x_.back();
    const auto row_of = [&](std::vector<double>& all, std::int64_t row) { return all.data() + row * columns; };
    for (const char* name : {"y", "dx"}) expected_[name].resize(count_of(x_));
    for (std::size_t i = 0; i < sizes_.size(); ++i) expected_["d" + operand(i)].resize(count_of(sizes_[i]));
    for (std::int64_t row = 0; row < rows_; ++row) {
      const sizes shape{1, columns}, column{columns};
      const auto tensor_at = [&](double* data) { return tensor{data, dtype::f64, shape}; };
      values v{.x = tensor_at(row_of(exact_["x"], row)), .y = tensor_at(row_of(expected_["y"], row))};
      gradients g{.y = tensor_at(row_of(exact_["dy"], row)), .x = tensor_at(row_of(expected_["dx"], row))};
      std::vector<std::vector<double>> own;
      own.reserve(sizes_.size());
      for (std::size_t i = 0; i < sizes_.size(); ++i) {
        const bool is_column = line_.operand_word(static_cast<int>(i)).about->operand == operand_kind::column;
        v.operands.push_back({row_of(exact_[operand(i)], row_in(i, row)), dtype::f64, is_column ? column : shape});
        own.emplace_back(columns);
        g.operands.push_back({own.back().data(), dtype::f64, is_column ? column : shape});
      }
      std::vector<double> statistics(static_cast<std::size_t>(std::max(of.statistics(dtype::f64), 1)));
      if (of.statistics(dtype::f64) > 0) v.statistics = {statistics.data(), dtype::f64, {of.statistics(dtype::f64), 1}};
      of.forward(v), of.backward(v, g);
      for (std::size_t i = 0; i < sizes_.size(); ++i) {
        double* sum = row_of(expected_["d" + operand(i)], row_in(i, row));
        for (std::int64_t c = 0; c < columns; ++c) sum[c] += own[i][static_cast<std::size_t>(c)];
      }
    }
  }

  void enter_operand(groups_frame& f, int i, view& to) {
    const auto at = static_cast<std::size_t>(i);
    f.enter(given_.at(operand(at))->data(), operand_type_, sizes_[at], to);
  }
  static void lay_out(groups_frame& f) {
    std::vector<bool> needs_copy;
    ASSERT_EQ(f.lay_out(true, needs_copy), spec::fit::rows);
  }
  static void launch_all(groups_frame& f, const request& r, std::uint64_t grouped = 0,
                         const std::vector<view>& sums = {}) {
    arguments& a = f.a;
    const std::vector<plan> plans = prepare(r, a, 0, nullptr);
    std::unique_ptr<device_tensor> partial, parts_of_rows;
    if (plans.size() > 1) {
      a.task_columns = plans.front().row_columns;
      const auto numbers = a.rows * (row_numbers(r) + 4 * ceil_div(a.columns, a.task_columns));
      parts_of_rows = std::make_unique<device_tensor>(static_cast<std::size_t>(numbers), dtype::f32);
      a.totals = parts_of_rows->data();
      a.row_parts = static_cast<float*>(a.totals) + row_numbers(r) * a.rows;
    }
    const plan& last = plans.back();
    a.parts = last.parts, a.groups.blocks = last.group_blocks;
    if (!sums.empty()) {
      partial =
          std::make_unique<device_tensor>(sums.size() * static_cast<std::size_t>(a.parts * a.columns), dtype::f32);
      a.column_partial = partial->data();
    }
    std::vector<view> whole(sums.size()), of_groups(sums.size());
    std::size_t slot = 0;
    for (int i = 0; i < kMaxOperands; ++i) {
      if ((a.wants_column >> i & 1) == 0) continue;
      const bool is_grouped = (grouped >> i & 1) != 0;
      if (is_grouped ? last.group_blocks == 1 : last.with.one_part != 0) a.operand_gradient[i] = sums[slot];
      else (is_grouped ? of_groups : whole)[slot] = sums[slot];
      ++slot;
    }
    launch(r, plans, a, 0, nullptr);
    const int slots = static_cast<int>(sums.size());
    reduce_columns(sums_of(a, dtype::f32, a.parts, slots, whole.data()), dtype::f32, 0, nullptr);
    reduce_columns(sums_of(a, dtype::f32, last.group_blocks, slots, of_groups.data()), dtype::f32, 0, nullptr,
                   a.groups.count);
  }
  void forward() {
    groups_frame f(line_, x_, type_, operand_type_);
    f.forward_inputs([&](spec::role what, int i, view& to) {
      if (what == spec::role::x) f.enter(given_.at("x")->data(), type_, x_, to);
      else enter_operand(f, i, to);
    });
    f.enter(result("y", x_, type_), type_, x_, f.a.y);
    if (const int count = line_.statistics(type_); count > 0) {
      statistics_ = std::make_unique<device_tensor>(static_cast<std::size_t>(count * rows_), dtype::f32);
      f.a.statistics = statistics_->data();
    }
    lay_out(f);
    launch_all(f, request_of(f, false, spec::type_text(line_, 0, false)));
  }
  void backward() {
    std::vector<std::int64_t> types;
    for (const sizes& own : sizes_) types.push_back(static_cast<std::int64_t>(operand_type_) + repetition(own, x_));
    const std::vector<spec::operand_facts> facts = spec::operand_facts_of(types.data(), types.size());
    const spec::gradients plan = spec::plan_gradients(line_, type_, facts, (std::uint64_t{2} << line_.operands) - 1);
    groups_frame f(line_, x_, type_, operand_type_);
    f.backward_inputs(spec::backward_reads(line_), [&](spec::role what, int i, view& to) {
      if (what == spec::role::operand) enter_operand(f, i, to);
      else f.enter(given_.at(what == spec::role::x ? "x" : "dy")->data(), type_, x_, to);
    });
    if (statistics_) f.a.statistics = statistics_->data();
    std::vector<view> sums;
    f.backward_outputs(plan, [&](const spec::gradient_output& output, view* to) {
      const bool is_x = output.input == 0;
      const std::string name = is_x ? "dx" : "d" + operand(static_cast<std::size_t>(output.input - 1));
      const sizes of = output.column ? sizes_of_groups(f.shape, static_cast<std::uint64_t>(output.has)) : x_;
      void* data = result(name, of, output.type);
      if (to) f.enter(data, output.type, of, *to);
      else sums.push_back({data, {}, output.type, 1});
      if (!is_x) {
        EXPECT_EQ(of, sizes_[static_cast<std::size_t>(output.input - 1)]) << name;
      }
    });
    lay_out(f);
    launch_all(f, request_of(f, plan, spec::type_text(line_, 0, true)), plan.grouped, sums);
  }

  const spec::line line_;
  const dtype type_, operand_type_;
  const sizes x_;
  const std::vector<sizes> sizes_;
  std::int64_t rows_;
  std::map<std::string, std::unique_ptr<device_tensor>> given_, found_;
  std::map<std::string, std::vector<double>> exact_, expected_;
  std::unique_ptr<device_tensor> statistics_;
};

using EmulatedGroups = Emulated;

// Of elementwise lines and of rows; of a group for several blocks, and of many groups a block.
TEST_F(EmulatedGroups, OfConsecutiveRows) {
  for (const std::int64_t n : {96, 1000, 20000}) {
    const std::int64_t few = n > 4096 ? 2 : 9;
    groups_call("layer_norm | scale | bias", dtype::bf16, dtype::bf16, {3, few, n}, {{3, 1, n}, {3, 1, n}})
        .expect_right();
    groups_call("layer_norm | scale | bias", dtype::f32, dtype::f32, {2, few, n}, {{2, 1, n}, {1, 1, n}})
        .expect_right();
  }
  groups_call("bias | gelu | add", dtype::f16, dtype::f32, {3, 50, 72}, {{3, 1, 72}, {1, 1, 72}}).expect_right();
  groups_call("gate(silu)", dtype::f32, dtype::f32, {2, 300, 264}, {{2, 1, 264}}).expect_right();
  groups_call("bias | gelu", dtype::bf16, dtype::bf16, {700, 2, 40}, {{700, 1, 40}}).expect_right();
  groups_call("layer_norm | scale | bias", dtype::bf16, dtype::bf16, {600, 3, 64}, {{600, 1, 64}, {1, 1, 64}})
      .expect_right();
}
TEST_F(EmulatedGroups, OfRowsApart) {
  groups_call("bias | gelu | add", dtype::f32, dtype::f32, {4, 6, 72}, {{1, 6, 72}, {1, 6, 72}}).expect_right();
  groups_call("layer_norm | scale | bias", dtype::bf16, dtype::bf16, {5, 7, 130}, {{1, 7, 130}, {1, 1, 130}})
      .expect_right();
  groups_call("layer_norm | scale | bias", dtype::f32, dtype::f32, {2, 3, 5, 64}, {{2, 1, 5, 64}, {2, 1, 5, 64}})
      .expect_right();
  groups_call("gate(silu)", dtype::f32, dtype::f32, {2, 3, 5, 64}, {{1, 3, 1, 64}}).expect_right();
}
TEST_F(EmulatedGroups, OfLongRows) {
  groups_call("layer_norm | scale | bias", dtype::bf16, dtype::bf16, {2, 2, 40000}, {{2, 1, 40000}, {2, 1, 40000}})
      .expect_right();
  groups_call("rms_norm | scale", dtype::bf16, dtype::bf16, {2, 2, 600000}, {{2, 1, 600000}}).expect_right();
}

}  // namespace
}  // namespace onepass::cuda
