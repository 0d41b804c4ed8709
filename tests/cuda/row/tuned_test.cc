// Ways as text, which calls share one, and what is kept of them.
#include "src/cuda/row/tuned.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "src/cache/disk_cache.h"
#include "tests/cuda/imagined_call.h"

namespace onepass::cuda {
namespace {

heard_call heard_of(const char* text, bool backward, dtype x, int64 columns, memory at = {}) {
  const call c = call_of(spec::parse(text), backward, x, x, 4096, columns, at);
  const device_facts chip = facts_of("sm_90a");
  const configuration described = describe(c.r, c.a, true);
  return {tuning_key(c.r, c.a, chip, described), c.r, c.a, chip, described};
}

TEST(Way, EveryWayIsItsText) {
  int ways = 0;
  for (const char* text : kLines) {
    for (const bool backward : {false, true}) {
      for (const way& w : other_ways(heard_of(text, backward, dtype::bf16, 4096), {})) {
        const std::optional<way> again = way_of(text_of(w));
        ASSERT_TRUE(again) << text_of(w);
        EXPECT_EQ(text_of(*again), text_of(w));
        ++ways;
      }
    }
  }
  EXPECT_GT(ways, 100);
}

TEST(Way, WhatIsNoneIsRefused) {
  for (const char* text :
       {"", "columns numbers=32", "rows", "rows numbers=0 block=128 threads=512 resident=512 cluster=8",
        "rows numbers=32 block=128 threads=512 resident=512 cluster=99", "rows numbers=32x block=128",
        "rows numbers=32 block=128 threads=512 resident=512 cluster=8 colour=3", "tiles threads=128",
        "tiles threads=4096 unroll=2 resident=1024 blocks=16", "streamed threads=128 steps=0 vectors=4 resident=1024",
        "rows numbers=32 block=8 threads=512 resident=512 cluster=8",
        "rows numbers=32 block=96 threads=512 resident=512 cluster=8",
        "streamed threads=100 steps=14 vectors=4 resident=1024",
        "rows numbers=99999999999999 block=128 threads=512 resident=512 cluster=8"})
    EXPECT_FALSE(way_of(text)) << text;
  EXPECT_TRUE(way_of("rows numbers=32 block=128 threads=512 resident=512 cluster=8"));
  EXPECT_TRUE(way_of("parts"));
}

TEST(Way, LinesWithoutARowWordHaveTilesAndOthersHaveNone) {
  const std::optional<way> tiles = way_of("tiles threads=128 unroll=2 resident=1024 blocks=16"),
                           rows = way_of("rows numbers=32 block=128 threads=512 resident=512 cluster=8");
  const heard_call flat = heard_of("gelu", false, dtype::f32, 1024),
                   norm = heard_of("layer_norm", false, dtype::f32, 1024);
  const auto laid_out = [](const way& w, const heard_call& of) {
    return lay_out(w, of.r, of.a, of.chip, of.described).size();
  };
  EXPECT_EQ(laid_out(*tiles, flat), 1u);
  EXPECT_EQ(laid_out(*rows, flat), 0u);
  EXPECT_EQ(laid_out(*tiles, norm), 0u);
  EXPECT_EQ(laid_out(*rows, norm), 1u);
  EXPECT_EQ(laid_out(*rows, heard_of("layer_norm", false, dtype::f32, 1 << 20)), 0u) << "no cluster holds such a row";
  EXPECT_GT(laid_out(*way_of("parts"), norm), 1u);
}

TEST(Tuning, LengthsOfAClassShareAWay) {
  const auto key = [](const char* text, bool backward, dtype x, int64 columns, memory at = {}) {
    return heard_of(text, backward, x, columns, at).key;
  };
  const char* const norm = "layer_norm | scale";
  EXPECT_EQ(key(norm, false, dtype::bf16, 4352), key(norm, false, dtype::bf16, 4608));
  EXPECT_NE(key(norm, false, dtype::bf16, 4096), key(norm, false, dtype::bf16, 4352));
  EXPECT_NE(key(norm, false, dtype::bf16, 4608), key(norm, false, dtype::bf16, 4616));
  EXPECT_NE(key(norm, false, dtype::bf16, 4608), key(norm, false, dtype::f16, 4608));
  EXPECT_NE(key(norm, false, dtype::bf16, 4608), key(norm, true, dtype::bf16, 4608));
  EXPECT_NE(key(norm, false, dtype::bf16, 4608), key("layer_norm | bias", false, dtype::bf16, 4608));
  EXPECT_NE(key(norm, false, dtype::bf16, 4608), key(norm, false, dtype::bf16, 4608, {1, 0})) << "how rows lie";
  call c = call_of(spec::parse(norm), false, dtype::bf16, dtype::bf16, 1, 4608);
  const configuration described = describe(c.r, c.a, true);
  EXPECT_EQ(tuning_key(c.r, c.a, facts_of("sm_90a"), described), key(norm, false, dtype::bf16, 4608))
      << "a row does not depend on how many there are";
  EXPECT_NE(tuning_key(c.r, c.a, facts_of("sm_80"), described), key(norm, false, dtype::bf16, 4608));
}

TEST(Tuning, AWayThatIsKeptIsUsed) {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / "onepass-tuned-test";
  std::filesystem::remove_all(folder);
  setenv("ONEPASS_CACHE_DIR", folder.c_str(), 1);
  const heard_call of = heard_of("layer_norm | scale", true, dtype::bf16, 3072);
  const auto tuned = [&] { return choose_tuned(of.r, of.a, of.chip, of.described); };
  EXPECT_TRUE(tuned().empty());
  const std::optional<way> other = way_of("rows numbers=8 block=512 threads=512 resident=512 cluster=1");
  ASSERT_TRUE(keep_way(of.key, other, "a label"));
  ASSERT_EQ(tuned().size(), 1u);
  EXPECT_EQ(tuned().front().with.across, 384);
  const std::vector<cache::entry> entries = cache::list();
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_EQ(entries.front().label + " " + entries.front().kind, "a label tuned");
  EXPECT_TRUE(cache::has_any("way"));
  use_way(of.key, {});
  EXPECT_TRUE(tuned().empty());
  EXPECT_EQ(cache::clear(), 1u);
  EXPECT_FALSE(cache::has_any("way"));
  unsetenv("ONEPASS_CACHE_DIR");
  std::filesystem::remove_all(folder);
}

TEST(Tuning, EachKindOfCallIsHeardOnce) {
  const heard_call of = heard_of("gelu", false, dtype::bf16, 3072);
  const auto goes_by = [&] { choose_tuned(of.r, of.a, of.chip, of.described); };
  goes_by();
  listen(true);
  EXPECT_TRUE(heard().empty());
  goes_by(), goes_by();
  listen(false);
  ASSERT_EQ(heard().size(), 1u);
  EXPECT_EQ(heard().front().key, of.key);
  listen(true);
  listen(false);
  EXPECT_TRUE(heard().empty());
}

}  // namespace
}  // namespace onepass::cuda
