// The rules by which a way is chosen: by time, by rank, by name, and what is left where tensors do not suit a kernel.
#include "src/choose/choose.h"

#include <gtest/gtest.h>

#include <cmath>

namespace onepass::choice {
namespace {

const char *const kAttention = "scores | mul(0.125) | mask | softmax", *const kNorm =
                                                                           "layer_norm | scale | bias | linear";

decision chosen(const char* chip, const char* line, const sizes& of, int64 value_depth = 0, bool backward = false) {
  const spec::contraction parts(spec::parse(line));
  const cuda::device_facts facts = cuda::facts_of(chip);
  return choose({.of = parts, .sizes = of, .value_depth = value_depth, .values = value_depth > 0, .backward = backward},
                &facts);
}

sizes attention(int64 matrices, int64 rows, int64 depth, int64 keys, dtype type = dtype::bf16) {
  return {.rows = matrices * rows, .depth = depth, .columns = keys, .type = type, .matrices = matrices};
}

// Measured: docs/measured-facts.md, "On an H100": 230 us by warps, 393 otherwise.
TEST(Choose, PlansAttentionAsItIsLaunched) {
  const decision of = chosen("sm_90a", kAttention, attention(32, 1001, 256, 1001), 256);
  EXPECT_EQ(of.chosen().how, spec::strategy::flash);
  EXPECT_EQ(of.chosen().by, implementation::warps);
  EXPECT_GT(of.of(spec::strategy::unfused).seconds, of.chosen().seconds);
}

// A cluster before tiles before warps, whichever is there.
TEST(Choose, KernelsOfOneStrategyTakeTurns) {
  const auto by = [](const char* line, sizes of) { return chosen("sm_90a", line, of).of(spec::strategy::two_pass).by; };
  EXPECT_EQ(by(kAttention, attention(64, 2048, 64, 2048)), implementation::cluster);
  EXPECT_EQ(by("scores | causal | softmax", attention(64, 2048, 64, 2048)), implementation::tiles);
  EXPECT_EQ(by(kAttention, attention(64, 2048, 64, 2047)), implementation::warps);
}

TEST(Choose, LeavesAKernelThatTheTensorsDoNotSuit) {
  const spec::contraction parts(spec::parse(kAttention));
  const cuda::device_facts chip = cuda::facts_of("sm_90a");
  call c{.of = parts, .sizes = attention(64, 2048, 64, 2048), .value_depth = 64, .values = true};
  const auto next = [&] {
    const implementation by = choose(c, &chip).chosen().by;
    c.unfit |= 1u << static_cast<int>(by);
    return by;
  };
  EXPECT_EQ(next(), implementation::tiles);
  EXPECT_EQ(next(), implementation::warps);
  EXPECT_EQ(next(), implementation::library);
  c.named = spec::strategy::flash;
  EXPECT_FALSE(choose(c, &chip).chosen().serves());
  EXPECT_EQ(choose(c, &chip).chosen().why_not, "rows must begin at multiples of 16 bytes");
}

TEST(Choose, SaysWhyANamedWayCannotBe) {
  const spec::contraction parts(spec::parse(kNorm));
  const cuda::device_facts chip = cuda::facts_of("sm_80");
  call c{.of = parts, .sizes = {64, 64, 64, dtype::bf16}, .named = spec::strategy::tiled};
  EXPECT_NE(choose(c, &chip).chosen().why_not.find("9.0"), std::string::npos);
  EXPECT_EQ(choose(c, nullptr).chosen().why_not, "its kernel is for CUDA");
  c.named = spec::strategy::panels;
  EXPECT_EQ(choose(c, &chip).chosen().why_not, "it is for the CPU");
  c.named = spec::strategy::automatic;
  EXPECT_TRUE(choose(c, &chip).chosen().serves());
}

TEST(Choose, WritesWhatIsKept) {
  const spec::contraction parts(spec::parse(kAttention));
  const cuda::device_facts chip = cuda::facts_of("sm_90a");
  const call c{
      .of = parts, .sizes = attention(64, 2048, 64, 2048), .value_depth = 64, .values = true, .gives_more = true};
  EXPECT_EQ(choose(c, &chip).chosen().by, implementation::library);
  EXPECT_EQ(choose(c, &chip).of(spec::strategy::flash).why_not, "what is kept must be written");
}

TEST(Choose, OnTheCpuSmallNBeforePanels) {
  const spec::contraction parts(spec::parse(kNorm));
  call c{.of = parts, .sizes = {16384, 256, 8, dtype::f32}};
  EXPECT_EQ(choose(c, nullptr).chosen().how, spec::strategy::small_n);
  c.unfit = 1u << static_cast<int>(implementation::small_n);
  EXPECT_EQ(choose(c, nullptr).chosen().how, spec::strategy::panels);
  c.sizes.rows = 8;
  EXPECT_EQ(choose(c, nullptr).chosen().how, spec::strategy::unfused);
}

TEST(Choose, BackwardOfLinear) {
  const spec::contraction norm(spec::parse(kNorm)), softmax(spec::parse("softmax | linear"));
  const cuda::device_facts chip = cuda::facts_of("sm_90a");
  call c{.of = norm, .sizes = {16384, 256, 8, dtype::f32}, .backward = true};
  for (const cuda::device_facts* on : {&chip, static_cast<const cuda::device_facts*>(nullptr)})
    EXPECT_EQ(choose(c, on).chosen().by, implementation::small_n);
  c.unfit = 1u << static_cast<int>(implementation::small_n);
  EXPECT_EQ(choose(c, nullptr).chosen().by, implementation::panels);
  EXPECT_EQ(choose(c, &chip).chosen().by, implementation::library);
  c.gives_more = true;
  EXPECT_EQ(choose(c, nullptr).chosen().by, implementation::library);
  c.gives_more = false, c.named = spec::strategy::unfused;
  EXPECT_EQ(choose(c, nullptr).chosen().by, implementation::library);
  const call from_input{.of = softmax, .sizes = c.sizes, .backward = true, .from_input = true};
  for (const cuda::device_facts* on : {&chip, static_cast<const cuda::device_facts*>(nullptr)})
    EXPECT_EQ(choose(from_input, on).chosen().by, implementation::library);
}

// Chips that were not measured: a kernel of ours has a time, and is taken where that is clearly the shorter.
TEST(Choose, OtherChipsHaveAModel) {
  for (const char* chip : {"sm_80", "sm_86", "sm_89", "sm_100a", "sm_120"}) {
    const sizes of = attention(64, 2048, 64, 2048);
    for (const bool backward : {false, true}) {
      const decision values = chosen(chip, kAttention, of, 64, backward);
      EXPECT_TRUE(std::isfinite(values.of(spec::strategy::flash).seconds)) << chip;
      EXPECT_EQ(values.of(spec::strategy::flash).by, implementation::warps) << chip;
    }
    const decision all = chosen(chip, kNorm, {8, 4096, 4096, dtype::bf16});
    EXPECT_TRUE(std::isinf(all.of(spec::strategy::tiled).seconds)) << chip;
    EXPECT_TRUE(std::isfinite(all.of(spec::strategy::small_k).seconds) || !all.of(spec::strategy::small_k).serves());
  }
  // 537 MB of weights that are not written.
  EXPECT_EQ(chosen("sm_80", kAttention, attention(64, 2048, 64, 2048), 64).chosen().by, implementation::warps);
}

// A chip that has half of the other's SMs computes as much in twice the time.
TEST(Choose, AModelCountsSms) {
  const spec::contraction parts(spec::parse(kAttention));
  cuda::device_facts chip = cuda::facts_of("sm_80");
  const call c{.of = parts, .sizes = attention(1 << 12, 2048, 64, 2048), .value_depth = 64, .values = true};
  const double whole = choose(c, &chip).of(spec::strategy::flash).seconds;
  chip.sm_count /= 2;
  EXPECT_NEAR(choose(c, &chip).of(spec::strategy::flash).seconds / whole, 2, .05);
}

}  // namespace
}  // namespace onepass::choice
