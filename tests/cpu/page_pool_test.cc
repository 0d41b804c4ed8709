// Memory for large results: aligned, taken again, never more than the limit kept.
#include "src/cpu/page_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace onepass::cpu {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

class PagePool : public testing::Test {
 protected:
  static void SetUpTestSuite() { setenv("ONEPASS_CPU_KEEP_MB", "64", 1); }  // read once, at the first use
  void SetUp() override { release_pages(); }
};

TEST_F(PagePool, GivesWholeHugePages) {
  for (const std::size_t bytes : {std::size_t{1}, 2 * kMiB, 5 * kMiB + 3}) {
    char* pages = static_cast<char*>(take_pages(bytes));
    ASSERT_NE(pages, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pages) % kHugePage, 0u);
    std::memset(pages, 1, bytes);
    give_pages(pages);
  }
}

TEST_F(PagePool, PagesAreTakenAgain) {
  void* first = take_pages(8 * kMiB);
  void* second = take_pages(8 * kMiB);
  EXPECT_NE(first, second);
  give_pages(first);
  EXPECT_EQ(pages_kept(), 8 * kMiB);
  EXPECT_EQ(take_pages(7 * kMiB), first) << "as many huge pages";
  EXPECT_EQ(pages_kept(), 0u);
  give_pages(second);
  void* small = take_pages(4 * kMiB);
  EXPECT_NE(small, second) << "half of it would be wasted";
  void* large = take_pages(10 * kMiB);
  EXPECT_NE(large, second);
  for (void* pages : {first, small, large}) give_pages(pages);
}

TEST_F(PagePool, TheSmallestThatHasRoomIsTaken) {
  void* larger = take_pages(36 * kMiB);
  void* smaller = take_pages(34 * kMiB);
  give_pages(larger);
  void* other = take_pages(8 * kMiB);
  give_pages(smaller);  // 70 MiB: the larger one goes
  EXPECT_EQ(pages_kept(), 34 * kMiB);
  EXPECT_EQ(take_pages(32 * kMiB), smaller);
  give_pages(smaller), give_pages(other);
}

TEST_F(PagePool, OfEqualBlocksTheLastIsTaken) {
  void* first = take_pages(8 * kMiB);
  void* second = take_pages(8 * kMiB);
  give_pages(second), give_pages(first);
  EXPECT_EQ(take_pages(8 * kMiB), first);
  EXPECT_EQ(take_pages(8 * kMiB), second);
  give_pages(first), give_pages(second);
}

TEST_F(PagePool, NoMoreThanTheLimitIsKept) {
  std::vector<void*> all;
  for (int i = 0; i < 10; ++i) all.push_back(take_pages(10 * kMiB));
  for (void* pages : all) {
    give_pages(pages);
    EXPECT_LE(pages_kept(), 64 * kMiB);
  }
  EXPECT_EQ(pages_kept(), 60 * kMiB);
  give_pages(take_pages(100 * kMiB));
  EXPECT_EQ(pages_kept(), 0u) << "more than the limit by itself, and last";
  release_pages();
  EXPECT_EQ(pages_kept(), 0u);
}

TEST_F(PagePool, WhatNoSystemHasIsNull) { EXPECT_EQ(take_pages(std::size_t{1} << 60), nullptr); }

TEST_F(PagePool, ThreadsDoNotShareABlock) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 200; ++i) {
        const std::size_t bytes = (1 + static_cast<std::size_t>(i % 3)) * 2 * kMiB;
        auto* pages = static_cast<unsigned char*>(take_pages(bytes));
        pages[0] = pages[bytes - 1] = static_cast<unsigned char>(t);
        std::this_thread::yield();
        EXPECT_TRUE(pages[0] == t && pages[bytes - 1] == t);
        give_pages(pages);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(PagePool, AForkMayUseIt) {
  void* pages = take_pages(4 * kMiB);
  const pid_t child = fork();
  if (child == 0) {
    give_pages(pages);
    _exit(take_pages(4 * kMiB) == pages ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  give_pages(pages);
}

}  // namespace
}  // namespace onepass::cpu
