// The partition of a call into tasks, and that results depend on it alone: not on threads, their number or their order.
#include "src/cpu/row/run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "src/cpu/threads.h"
#include "src/plan/plan.h"

namespace onepass::cpu {
namespace {

using body = void (*)(void*, int64, int64);

void one_call(int64 count, int64, body run_tasks, void* context) { run_tasks(context, 0, count); }
void backwards(int64 count, int64, body run_tasks, void* context) {
  for (int64 i = count - 1; i >= 0; --i) run_tasks(context, i, i + 1);
}
template <int Threads>
void threads(int64 count, int64, body run_tasks, void* context) {
  std::vector<std::thread> all;
  for (int64 t = 0; t < Threads; ++t) {
    const int64 begin = count * t / Threads, end = count * (t + 1) / Threads;
    if (begin < end) all.emplace_back(run_tasks, context, begin, end);
  }
  for (std::thread& thread : all) thread.join();
}
constexpr parallel_for kWays[] = {one_call, backwards, threads<2>, threads<3>, threads<8>};

class Run : public testing::Test {
 protected:
  void TearDown() override { set_parallel_for(one_call); }
};

arguments sized(int64 rows, int64 columns, uint64 wants_column) {
  arguments a{};
  a.rows = rows, a.columns = columns, a.inverse_columns = 1.0 / static_cast<double>(columns),
  a.wants_column = wants_column;
  return a;
}

template <class Body>
void each_size(const Body& check) {
  for (const int64 rows : {0LL, 1LL, 7LL, 8LL, 9LL, 511LL, 512LL, 513LL, 100000LL, 3'000'000'000LL}) {
    for (const int64 columns : {1LL, 3LL, 768LL, 4096LL, 4097LL, 16385LL, 1LL << 20, 3'000'000'000LL}) {
      for (const bool rowwise : {false, true}) {
        for (const uint64 wants : {uint64{0}, uint64{5}}) {
          if (!testing::Test::HasFailure()) check(sized(rows, columns, wants), rowwise);
        }
      }
    }
  }
}

template <int>
void kernel(const arguments&, int64, int64) {}

TEST_F(Run, AKernelOfItsOwnWhereEveryTensorStoresTheSame) {
  const cpu_kernels kernels{
      {kernel<0>, kernel<1>}, {kernel<2>, kernel<3>}, {kernel<4>, kernel<5>}, {kernel<6>, kernel<7>}};
  arguments a = sized(2, 3, 0);
  float number = 0;
  const auto store = [&number](dtype type) { return view{&number, {}, type, 1}; };
  a.x = a.y = a.operand[1] = store(dtype::bf16);
  EXPECT_EQ(choose(kernels, a, dtype::bf16, false), kernels.all_bf16.forward);
  EXPECT_EQ(choose(kernels, a, dtype::bf16, true), kernels.all_bf16.backward);
  a.operand[1].column_stride = 0;  // one number for a row
  EXPECT_EQ(choose(kernels, a, dtype::bf16, false), kernels.f32.forward);
  a.operand[1] = store(dtype::f32);
  EXPECT_EQ(choose(kernels, a, dtype::bf16, false), kernels.f32.forward);
  a.x = a.y = store(dtype::f32);
  EXPECT_EQ(choose(kernels, a, dtype::f32, true), kernels.all_f32.backward);
  a.x = a.y = a.operand[1] = store(dtype::f64);
  EXPECT_EQ(choose(kernels, a, dtype::f64, false), kernels.f64.forward);
}

TEST_F(Run, ThePartitionCoversTheTensor) {
  each_size([](arguments a, bool rowwise) {
    const int64 parts = partition(a, rowwise);
    EXPECT_GE(a.task_rows, 1);
    EXPECT_GE(a.task_columns, 1);
    EXPECT_LE(a.task_columns, std::max<int64>(a.columns, 1));
    EXPECT_TRUE(!rowwise || a.task_columns >= a.columns) << "a row word needs the whole row";
    EXPECT_EQ(parts > 0, a.wants_column != 0);
    EXPECT_LE(parts, 64) << "the second stage's work does not grow with rows";
    EXPECT_TRUE(parts == 0 || parts * a.task_rows >= a.rows) << a.rows << " x " << a.columns;
  });
}

TEST_F(Run, ThePartitionIsAFunctionOfTheShape) {
  each_size([](const arguments& shape, bool rowwise) {
    arguments first = shape;
    const int64 parts = partition(first, rowwise);
    for (const parallel_for way : kWays) {
      set_parallel_for(way);
      arguments again = shape;
      again.x.data = &again, again.stream_stores = 1;  // nor of anything else in the call
      EXPECT_EQ(partition(again, rowwise), parts);
      EXPECT_TRUE(again.task_rows == first.task_rows && again.task_columns == first.task_columns)
          << shape.rows << " x " << shape.columns;
    }
  });
}

std::atomic<int64> tasks_run;

TEST_F(Run, EveryTaskRunsOnce) {
  for (const parallel_for way : kWays) {
    set_parallel_for(way);
    each_size([](arguments a, bool rowwise) {
      partition(a, rowwise);
      const int64 tasks =
          (a.rows + a.task_rows - 1) / a.task_rows * ((a.columns + a.task_columns - 1) / a.task_columns);
      if (tasks > 1 << 20) return;
      tasks_run = 0;
      run([](const arguments&, int64 begin, int64 end) { tasks_run += end - begin; }, a);
      EXPECT_EQ(tasks_run, tasks);
    });
  }
}

// A call on contiguous tensors of random numbers, forward then backward with every gradient; operands are columns.
class example {
 public:
  example(const char* text, int64 rows, int64 columns) : line_(spec::parse(text)), a_(sized(rows, columns, 0)) {
    set_rows(a_, rows);
    a_.matrix_rows = rows;
    for (std::size_t i = 0; i < line_.parameters.size(); ++i) a_.parameter[i] = line_.parameters[i];
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& v, int64 count) {
      v.resize(static_cast<std::size_t>(count));
      for (float& number : v) number = normal(random);
    };
    fill(x_, rows * columns), fill(dy_, rows * columns), fill(operands_, line_.operands * columns);
  }

  // All that comes out, in one row of numbers. again: where backward shall leave the result once more.
  std::vector<float> run_both(float* again = nullptr) {
    const auto size = x_.size(), columns = static_cast<std::size_t>(a_.columns),
               operands = static_cast<std::size_t>(line_.operands);
    constexpr float kUnwritten = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> out(2 * size + operands * columns, kUnwritten),
        statistics(3 * static_cast<std::size_t>(a_.rows), kUnwritten);
    const std::shared_ptr<const cpu_kernels> held = kernels_for(line_, 0, dtype::f32);
    const cpu_kernels& kernels = *held;
    arguments a = a_;
    a.x = tensor(x_.data()), a.y = tensor(out.data()), a.statistics = statistics.data();
    for (std::size_t i = 0; i < operands; ++i) a.operand[i] = {operands_.data() + i * columns, {}, dtype::f32, 1};
    partition(a, line_.rowwise());
    run(choose(kernels, a, dtype::f32, false), a);
    a.y = tensor(dy_.data()), a.dx = tensor(out.data() + size);
    if (again) a.recomputed = tensor(again);
    a.wants_column = (uint64{1} << line_.operands) - 1;
    const int64 parts = partition(a, line_.rowwise());
    std::vector<double> partial(operands * static_cast<std::size_t>(parts) * columns, kUnwritten);
    a.column_partial = partial.data();
    run_backward(kernels, a, dtype::f32);
    std::vector<view> sums;
    for (std::size_t i = 0; i < operands; ++i) sums.push_back({out.data() + 2 * size + i * columns, {}, dtype::f32, 1});
    reduce_columns(a, parts, line_.operands, sums.data());
    return out;
  }

  std::size_t size() const { return x_.size(); }

  // dy and |dy| summed over the rows. The first is what a trailing bias gets.
  std::pair<double, double> column_sum(int64 column) const {
    std::pair<double, double> sum{};
    for (int64 row = 0; row < a_.rows; ++row) {
      const auto number = static_cast<double>(dy_[static_cast<std::size_t>(row * a_.columns + column)]);
      sum.first += number, sum.second += std::fabs(number);
    }
    return sum;
  }

 private:
  view tensor(float* data) const { return {data, {0, 0, 0, a_.columns}, dtype::f32, 1}; }

  spec::line line_;
  arguments a_;
  std::vector<float> x_, dy_, operands_;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST_F(Run, ResultsDoNotDependOnThreads) {
  for (const char* text : {"layer_norm | scale | bias", "rms_norm(1e-6) | scale", "bias | gelu"}) {
    for (const auto& [rows, columns] : {std::pair<int64, int64>{1, 5}, {7, 64}, {513, 100}, {100, 5000}, {2000, 17}}) {
      example call(text, rows, columns);
      set_parallel_for(one_call);
      const std::vector<float> expected = call.run_both();
      for (const float number : expected) ASSERT_FALSE(std::isnan(number)) << text << ", " << rows << " x " << columns;
      for (const parallel_for way : kWays) {
        set_parallel_for(way);
        EXPECT_TRUE(same_bits(call.run_both(), expected)) << text << ", " << rows << " x " << columns;
      }
    }
  }
}

TEST_F(Run, BackwardMakesTheResultAgain) {
  for (const char* text : {"layer_norm | scale | bias", "layer_norm | scale | bias | gelu", "rms_norm(1e-6) | scale",
                           "bias | gelu", "bias"}) {
    for (const auto& [rows, columns] : {std::pair<int64, int64>{1, 5}, {7, 64}, {100, 5000}}) {
      example call(text, rows, columns);
      std::vector<float> again(call.size(), std::numeric_limits<float>::quiet_NaN());
      std::vector<float> out = call.run_both(again.data());
      EXPECT_TRUE(same_bits(out, call.run_both())) << text << ": gradients differ";
      out.resize(again.size());
      EXPECT_TRUE(same_bits(again, out)) << text << ", " << rows << " x " << columns;
    }
  }
}

TEST_F(Run, ColumnSumsAreSums) {
  constexpr int64 kRows = 1000, kColumns = 300;
  example call("layer_norm | scale | bias", kRows, kColumns);
  const std::vector<float> out = call.run_both();
  for (int64 c = 0; c < kColumns; ++c) {
    const auto [expected, magnitude] = call.column_sum(c);
    EXPECT_NEAR(static_cast<double>(out[out.size() - static_cast<std::size_t>(kColumns - c)]), expected,
                0x1p-24 * magnitude)
        << c;
  }
}

}  // namespace
}  // namespace onepass::cpu
