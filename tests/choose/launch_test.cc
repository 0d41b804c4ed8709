// What is chosen for a call's sizes, which is all that Line.plan knows, is what a launch of it asks the driver for.
// Calls are drawn: lines, sizes, odd ones too, dtypes and chips.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <iterator>
#include <map>
#include <random>
#include <sstream>

#include "src/choose/choose.h"
#include "src/cuda/attention/backward.h"
#include "src/cuda/attention/forward_sm80.h"
#include "src/cuda/attention/forward_sm90.h"
#include "src/cuda/attention/probabilities_backward.h"
#include "src/cuda/attention/probabilities_sm90.h"
#include "src/cuda/linear/small_n.h"
#include "src/cuda/runtime/source.h"
#include "src/settings.h"
#include "tests/cuda/imagined_attention.h"
#include "tests/cuda/imagined_call.h"

namespace onepass::cuda {
namespace {

using choice::implementation;

constexpr const char* kChips[] = {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a"};  // the recorder's devices
constexpr int64 kBatches = 6;                                                       // of imagined_attention

// The names of kernels that a driver that runs nothing was asked for, of a cache of its own.
class Launches : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    std::string folder = (std::filesystem::temp_directory_path() / "onepass-choose-XXXXXX").string();
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
    setenv("ONEPASS_CACHE_DIR", folder.c_str(), 1);
    cache_ = folder;
    settings_now().include_dir = ONEPASS_SOURCE_DIR "/include";
  }
  static void TearDownTestSuite() { std::filesystem::remove_all(cache_); }

  static std::vector<std::string> recorded() {
    static const auto ask = reinterpret_cast<const char* (*)()>(dlsym(driver(), "recorded_launches"));
    std::istringstream names(ask());
    return {std::istream_iterator<std::string>(names), {}};
  }
  // `launch` asks for the way's kernel first.
  template <class Launch>
  static void expect_launched(const choice::way& way, const Launch& launch) {
    recorded();
    launch();
    const std::vector<std::string> names = recorded();
    ASSERT_FALSE(names.empty());
    EXPECT_EQ(names.front(), std::string("onepass_") + way.kernel);
  }

  template <class T>
  T one_of(std::initializer_list<T> all) {
    return *(all.begin() + std::uniform_int_distribution<std::size_t>(0, all.size() - 1)(random_));
  }
  std::mt19937 random_{42};

 private:
  static void* driver() {
    facts(0);  // opens it
    return dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  }
  inline static std::filesystem::path cache_;
};

void launch_forward(const choice::way& way, const imagined_attention& of, const choice::call& call, int device) {
  const attention_call tiles = of.call();
  if (way.by == implementation::warps && call.values) {
    const attention_sm80_call warps{of.scores(),
                                    tiles.values.data,
                                    tiles.values.row_stride,
                                    tiles.values.outer_stride,
                                    tiles.values.inner_stride,
                                    tiles.values.head_dim,
                                    tiles.y,
                                    tiles.causal};
    ASSERT_TRUE(fits(warps));
    return launch_attention_sm80(warps, device, nullptr);
  }
  if (way.by == implementation::warps) {
    ASSERT_TRUE(fits(of.scores()));
    return launch_probabilities_sm80(of.scores(), device, nullptr);
  }
  ASSERT_TRUE(fits(tiles));
  if (way.by == implementation::tiles) launch_forward_sm90(tiles, device, nullptr);
  else EXPECT_TRUE(launch_probabilities_sm90(tiles, device, nullptr));
}

void launch_backward(const choice::way& way, const imagined_attention& of, int device) {
  const attention_call forward = of.call();
  const backward_sm90_call tiles = of.gradients(forward);
  if (way.by == implementation::tiles) {
    ASSERT_TRUE(fits(tiles));
    return launch_backward_sm90(tiles, device, nullptr);
  }
  void* const any = tiles.grad_queries.data;
  const backward_sm80_call warps{.behind = forward.behind,
                                 .a_behind = forward.a_behind,
                                 .causal = forward.causal,
                                 .queries = any,
                                 .grad_output = any,
                                 .output = tiles.output,
                                 .keys = forward.keys,
                                 .values = forward.values,
                                 .rows_of_batch = forward.queries.rows,
                                 .statistics = static_cast<softmax_statistics*>(any),
                                 .grad_queries = tiles.grad_queries,
                                 .grad_keys = tiles.grad_keys,
                                 .grad_values = tiles.grad_values};
  ASSERT_TRUE(fits(warps));
  launch_backward_sm80(warps, device, nullptr);
}

TEST_F(Launches, OfLinesWithScores) {
  std::map<std::string, int> seen;
  for (int i = 0; i < 600; ++i) {
    const char* text = one_of({"scores | softmax", "scores | mul(0.125) | mask | softmax", "scores | add | softmax",
                               "scores | mul(0.125) | causal | softmax", "scores | mul(0.125) | softmax | dropout(0.1)",
                               "scores | mul(0.1) | tanh | mul(30) | softmax", "scores | gelu"});
    const attention_sizes of{.rows = one_of<int64>({1, 8, 100, 577, 2048}),
                             .keys = one_of<int64>({1, 64, 131, 577, 1000, 1001, 2048, 9000}),
                             .head_dim = one_of<int64>({8, 32, 60, 64, 72, 128, 256, 264}),
                             .value_head_dim = one_of<int64>({0, 0, 8, 64, 128, 256})};
    const dtype type = one_of({dtype::bf16, dtype::bf16, dtype::f16, dtype::f32});
    const int device = one_of({0, 1, 2, 3, 3, 3, 4});
    const spec::contraction parts(spec::parse(text));
    choice::call call{.of = parts,
                      .sizes = {kBatches * of.rows, of.head_dim, of.keys, type, false, kBatches},
                      .value_depth = of.value_head_dim,
                      .values = of.value_head_dim > 0,
                      .backward = of.value_head_dim > 0 && one_of({false, true})};
    const device_facts planned = facts_of(kChips[device]);
    const choice::decision plan = choice::choose(call, &planned), now = choice::choose(call, &facts(device));
    SCOPED_TRACE(std::string(text) + " on " + kChips[device] + ", rows " + std::to_string(of.rows) + ", keys " +
                 std::to_string(of.keys) + ", depths " + std::to_string(of.head_dim) + " and " +
                 std::to_string(of.value_head_dim) + ", dtype " + name_of(type) + (call.backward ? ", backward" : ""));
    ASSERT_EQ(plan.chosen().by, now.chosen().by);
    const choice::way& way = now.chosen();
    ++seen[std::string(kChips[device]) + (call.backward ? " backward " : " ") + way.kernel];
    if (way.by == implementation::library) continue;
    const imagined_attention imagined(text, of, type);
    expect_launched(way, [&] {
      if (call.backward) launch_backward(way, imagined, device);
      else launch_forward(way, imagined, call, device);
    });
  }
  for (const char* often :
       {"sm_90a probabilities_forward_sm90", "sm_90a attention_forward_sm90", "sm_90a probabilities_forward_sm80",
        "sm_90a attention_forward_sm80", "sm_90a backward attention_backward_queries_sm90",
        "sm_90a backward attention_backward_queries_sm80", "sm_80 attention_forward_sm80"})
    EXPECT_GT(seen[often], 0) << often;
}

// Launched through what a small-N line's kernels take.
void launch_small_n(const spec::contraction& parts, const choice::sizes& of, int device) {
  const spec::line line = spec::with_features(parts.before, static_cast<int>(of.columns));
  call before = call_of(line, false, of.type, of.type, of.rows, of.depth),
       behind = call_of(parts.behind, false, of.type, of.type, of.rows, of.columns);
  before.a.y = {};
  const small_n_call few{before.r, before.a, behind.r, behind.a};
  ASSERT_EQ(why_not_small_n(before.r, before.a, facts(device)), "");
  launch(few, plan_small_n(few, facts(device)), device, nullptr);
}

TEST_F(Launches, OfLinesWithLinear) {
  std::map<std::string, int> seen;
  for (int i = 0; i < 600; ++i) {
    const char* text = one_of({"linear | bias | gelu", "layer_norm | scale | bias | linear | bias",
                               "rms_norm | scale | linear", "gate(silu) | linear", "layer_norm | linear | gelu"});
    const dtype type = one_of({dtype::bf16, dtype::bf16, dtype::f16, dtype::f32});
    const choice::sizes of{.rows = one_of<int64>({1, 8, 16, 300, 4096, 65536}),
                           .depth = one_of<int64>({7, 64, 128, 256, 1000, 1024, 4096}),
                           .columns = one_of<int64>({1, 3, 8, 64, 100, 128, 1024, 4096}),
                           .type = type};
    const int device = one_of({0, 1, 2, 3, 3, 3, 4});
    const spec::contraction parts(spec::parse(text));
    const choice::call call{.of = parts, .sizes = of};
    const device_facts planned = facts_of(kChips[device]);
    const choice::decision plan = choice::choose(call, &planned), now = choice::choose(call, &facts(device));
    SCOPED_TRACE(std::string(text) + " on " + kChips[device] + ", " + std::to_string(of.rows) + ", " +
                 std::to_string(of.depth) + ", " + std::to_string(of.columns) + ", dtype " + name_of(type));
    ASSERT_EQ(plan.chosen().by, now.chosen().by);
    const choice::way& way = now.chosen();
    ++seen[std::string(kChips[device]) + " " + way.kernel];
    if (way.by == implementation::library) continue;
    const imagined_linear imagined(text, of.rows, of.depth, of.columns, type, false,
                                   way.how == spec::strategy::deferred);
    expect_launched(way, [&] {
      if (way.by == implementation::small_n) return launch_small_n(parts, of, device);
      if (way.by == implementation::gemm) {
        ASSERT_TRUE(fits(imagined.call()));
        return launch(imagined.call(), device, nullptr);
      }
      ASSERT_TRUE(fits(imagined.by_warps()));
      const auto start = way.by == implementation::small_m ? launch_small_m : launch_small_k;
      start(imagined.by_warps(), device, nullptr);
    });
  }
  for (const char* often : {"sm_90a linear_forward", "sm_90a small_m_forward", "sm_90a small_k_forward",
                            "sm_90a small_n_forward", "sm_80 small_n_forward"})
    EXPECT_GT(seen[often], 0) << often;
}

}  // namespace
}  // namespace onepass::cuda
