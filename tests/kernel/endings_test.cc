// Lines that end in numbers of their rows, on the device, beside the CPU in float64.
#include <cmath>

#include "tests/kernel/line_call.h"

namespace onepass::cuda {
namespace {

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

// Behind the rows there are numbers that are none.
TEST_F(EmulatedAnyLines, OfRowsApartAreTheCpus) {
  for (const memory& lies : {memory{1, 3}, memory{0, 5}})
    for (const dtype x : {dtype::f32, dtype::bf16})
      for (const char* const text :
           {"logprob | entropy", "bias | cross_entropy(0.1)", "logsumexp | amax", "kl_div(0.5)"})
        line_call(text, x, x, {3, 3003}, lies).expect_right();
}

TEST_F(EmulatedAnyLines, OfSeveralTargetsAreTheCpus) {
  for (const sizes of : {sizes{6, 264}, sizes{2, 50000}, sizes{1, 300001}})
    line_call("logprob | entropy | cross_entropy(0.5)", dtype::f32, dtype::f32, of).expect_right();
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

// Beside the CPU in float64.
void expect_divergences(const char* text, sizes of, const std::vector<float>& own, const std::vector<float>& others) {
  const line reference(text);
  std::vector<double> exact_own(own.begin(), own.end()), exact_others(others.begin(), others.end());
  const spec::line parsed = spec::parse(text);
  const int numbers = parsed.statistics(dtype::f32);
  const auto saved_numbers = static_cast<std::size_t>(numbers * of.rows);
  std::vector<double> expected(static_cast<std::size_t>(of.rows)), saved(saved_numbers);
  values exact{.x = {exact_own.data(), dtype::f64, {of.rows, of.columns}},
               .y = {expected.data(), dtype::f64, {of.rows}}};
  exact.operands.push_back({exact_others.data(), dtype::f64, {of.rows, of.columns}});
  exact.statistics = {saved.data(), dtype::f64, {numbers, of.rows}};
  reference.forward(exact);
  const device_tensor x(own, dtype::f32), teacher(others, dtype::f32);
  device_tensor y(static_cast<std::size_t>(of.rows), dtype::f32);
  const call c = call_of(parsed, false, dtype::f32, dtype::f32, of.rows, of.columns);
  arguments a = c.a;
  a.inverse_columns = 1.0 / static_cast<double>(of.columns);
  spec::fill_parameters(parsed, dtype::f32, a);
  device_tensor statistics(saved_numbers, dtype::f32);
  a.statistics = statistics.data();
  a.x = {x.data(), {0, 0, 0, of.columns}, dtype::f32, 1};
  a.operand[0] = {teacher.data(), {0, 0, 0, of.columns}, dtype::f32, 1};
  a.y = {y.data(), {0, 0, 0, 1}, dtype::f32, 0};
  launch(c.r, prepare(c.r, a, 0, nullptr), a, 0, nullptr);
  const std::vector<double> found = y.host();
  for (std::size_t row = 0; row < found.size(); ++row)
    EXPECT_NEAR(found[row], expected[row], 1e-5 * expected[row]) << text << ", row " << row;
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
    expect_divergences(text, kOf, own, others);
  }
}

// Logits past those whose exponents float32 has.
TEST_F(EmulatedAnyLines, OfLogitsFarAway) {
  const std::vector<float> own{3e31f, 0, -1e30f, 1, 2, 3, 2e31f, 1e31f, 0},
      others{0, 2e31f, 5, 3e31f, 1, 0, 3e31f, 0, 0};
  for (const char* text : {"kl_div", "kl_div(0.5)", "kl_div(1, 4)"}) expect_divergences(text, {3, 3}, own, others);
}

}  // namespace
}  // namespace onepass::cuda
