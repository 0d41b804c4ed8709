// Lines by the ways that tuning tries, on the device, beside the CPU in float64.
#include "src/cuda/row/tuned.h"

#include "tests/kernel/line_call.h"

namespace onepass::cuda {
namespace {

// ONEPASS_WAYS=1 tries each, some minutes; else a few of each direction.
std::size_t step_of(std::size_t ways) {
  const char* const named = std::getenv("ONEPASS_WAYS");
  return named != nullptr ? static_cast<std::size_t>(std::max(std::atoi(named), 1))
                          : std::max<std::size_t>(ways / 2, 1);
}

void expect_right_by_any_way(const line_case& of) {
  listen(true);
  line_call(of.line, of.x, of.column, of.of).expect_right();
  listen(false);
  const std::vector<heard_call> calls = heard();
  ASSERT_FALSE(calls.empty());
  std::size_t backward = 0;
  for (const launched_kernel& kernel : launched_kernels()) {
    EXPECT_EQ(kernel.threads % 32, 0) << kernel.name;
    EXPECT_TRUE(kernel.threads >= 32 && kernel.threads <= 2048) << kernel.name << ", " << kernel.threads;
    backward += kernel.backward;
  }
  EXPECT_TRUE(backward > 0 && backward < launched_kernels().size());
  for (const heard_call& call : calls) {
    std::vector<way> ways = other_ways(call, {});
    const std::vector<way> near = other_ways(call, ways.front());
    ways.insert(ways.end(), near.begin(), near.end());
    for (std::size_t i = 0; i < ways.size(); i += step_of(ways.size())) {
      use_way(call.key, ways[i]);
      line_call(of.line, of.x, of.column, of.of).expect_right();
      if (testing::Test::HasFailure()) FAIL() << text_of(ways[i]) << " of " << call.key;
    }
    use_way(call.key, {});
  }
}

TEST_F(EmulatedAnyLines, ByAnyWayAreTheCpus) {
  for (const line_case& of : {line_case{"bias | gelu | add", dtype::bf16, dtype::f32, {7, 1000}},
                              line_case{"add | keep | layer_norm | scale | bias", dtype::f32, dtype::f32, {9, 2056}},
                              line_case{"gate(silu) | rms_norm | scale", dtype::bf16, dtype::bf16, {5, 777}},
                              line_case{"bias | softmax | dropout(0.3)", dtype::f16, dtype::f16, {5, 5000}},
                              line_case{"softcap(3) | cross_entropy(0.1)", dtype::bf16, dtype::bf16, {4, 3003}}})
    expect_right_by_any_way(of);
}

}  // namespace
}  // namespace onepass::cuda
