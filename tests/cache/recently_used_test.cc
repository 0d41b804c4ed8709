// What is kept by text up to a number.
#include "src/cache/recently_used.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace onepass {
namespace {

std::shared_ptr<const int> number(int n) { return std::make_shared<const int>(n); }

TEST(RecentlyUsed, TheLeastRecentlyUsedGoesFirst) {
  recently_used<const int> kept(3);
  for (int n = 0; n < 3; ++n) kept.keep(std::to_string(n), number(n));
  EXPECT_EQ(*kept.find("0"), 0);  // now 1 is the oldest
  kept.keep("3", number(3));
  EXPECT_EQ(kept.find("1"), nullptr);
  for (const int n : {0, 2, 3}) EXPECT_EQ(*kept.find(std::to_string(n)), n);
  EXPECT_EQ(kept.size(), 3u);
}

TEST(RecentlyUsed, WhoHoldsAValueKeepsIt) {
  recently_used<const int> kept(1);
  const std::shared_ptr<const int> held = kept.keep("0", number(0));
  kept.keep("1", number(1));
  EXPECT_EQ(kept.find("0"), nullptr);
  EXPECT_EQ(*held, 0);
  EXPECT_EQ(held.use_count(), 1);
}

TEST(RecentlyUsed, TheFirstOfTwoStays) {
  recently_used<const int> kept(2);
  kept.keep("one", number(1));
  EXPECT_EQ(*kept.keep("one", number(2)), 1);
}

TEST(RecentlyUsed, Forgets) {
  recently_used<const int> kept(8);
  for (int n = 0; n < 8; ++n) kept.keep(std::to_string(n), number(n));
  kept.forget([](int n) { return n % 2 == 0; });
  EXPECT_EQ(kept.size(), 4u);
  EXPECT_EQ(kept.find("2"), nullptr);
  EXPECT_EQ(*kept.find("3"), 3);
}

TEST(RecentlyUsed, ManyThreadsSeeTheirOwnValues) {
  recently_used<const int> kept(16);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int turn = 0; turn < 5000; ++turn) {
        const int n = (turn * 7 + t) % 40;
        std::shared_ptr<const int> value = kept.find(std::to_string(n));
        if (!value) value = kept.keep(std::to_string(n), number(n));
        wrong += *value != n;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(kept.size(), 16u);
}

}  // namespace
}  // namespace onepass
