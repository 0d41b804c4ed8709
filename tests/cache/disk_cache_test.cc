// The cache on disk: what it keeps, what it refuses, and what many processes at once make of it.
#include "src/cache/disk_cache.h"

#include <gtest/gtest.h>

#include <atomic>

#include "src/cache/hash.h"
#include "tests/cache/cache_folder.h"

namespace onepass::cache {
namespace {

TEST_F(DiskCache, GivesBackWhatWasWritten) {
  EXPECT_FALSE(read("key", "cubin"));
  ASSERT_TRUE(write("key", "cubin", "label", kPayload));
  EXPECT_EQ(read("key", "cubin"), kPayload);
  EXPECT_FALSE(read("key", "so")) << "another kind of the same key";
  EXPECT_FALSE(read("another key", "cubin"));
}

TEST_F(DiskCache, KeysAndPayloadsAreAnyBytes) {
  const std::string key("line\n\0key", 9);
  ASSERT_TRUE(write(key, "so", "two\nlines", kPayload));
  EXPECT_EQ(read(key, "so"), kPayload);
  ASSERT_TRUE(write("empty", "so", "", ""));
  EXPECT_EQ(read("empty", "so"), "");
  EXPECT_EQ(list()[1].label, "two lines");
}

TEST_F(DiskCache, TheLastWriteStays) {
  ASSERT_TRUE(write("key", "so", "label", "one"));
  ASSERT_TRUE(write("key", "so", "label", "another"));
  EXPECT_EQ(read("key", "so"), "another");
  only_file();
}

TEST_F(DiskCache, MakesItsFolder) {
  set("ONEPASS_CACHE_DIR", (folder / "a" / "b").c_str());
  ASSERT_TRUE(write("key", "so", "label", kPayload));
  EXPECT_EQ(read("key", "so"), kPayload);
}

TEST_F(DiskCache, AnEntryOfAnotherKeyIsAMiss) {  // two keys of one hash
  ASSERT_TRUE(write("key", "so", "label", kPayload));
  const fs::path file = only_file();
  std::string text = contents(file);
  text.replace(text.find("key"), 3, "kez");
  put(file, text);
  EXPECT_FALSE(read("key", "so"));
}

TEST_F(DiskCache, DamagedEntriesAreMissesUntilWrittenAgain) {
  ASSERT_TRUE(write("key", "cubin", "label", kPayload));
  const fs::path file = only_file();
  const std::string whole = contents(file);
  const std::size_t head = whole.size() - kPayload.size();
  std::string flipped = whole;
  flipped[head + kPayload.size() / 2] ^= 1;
  std::string huge = whole;  // a payload length that no memory holds
  huge.replace(whole.find(std::to_string(kPayload.size())), 4, "99999999999999999");
  const std::string damaged[] = {"",
                                 "\n\n\n",
                                 "no entry",
                                 whole.substr(0, head / 2),
                                 whole.substr(0, head),
                                 whole.substr(0, whole.size() - 1),
                                 whole + "x",
                                 flipped,
                                 huge,
                                 "x" + whole,
                                 std::string(whole.size(), '\0')};
  for (const std::string& text : damaged) {
    put(file, text);
    EXPECT_FALSE(read("key", "cubin")) << text.size() << " bytes";
    ASSERT_TRUE(write("key", "cubin", "label", kPayload));
    EXPECT_EQ(read("key", "cubin"), kPayload);
    EXPECT_EQ(contents(only_file()), whole);
  }
}

TEST_F(DiskCache, EveryFlippedBitOfTheHeadOrKeyIsAMissOrTheSamePayload) {
  const std::string payload(40, 'p');
  ASSERT_TRUE(write("key", "cubin", "label", payload));
  const fs::path file = only_file();
  const std::string whole = contents(file);
  for (std::size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    put(file, flipped);
    const std::optional<std::string> got = read("key", "cubin");
    EXPECT_TRUE(!got || *got == payload) << "bit " << bit;
  }
}

TEST_F(DiskCache, ListsLabelsKindsAndSizes) {
  EXPECT_TRUE(list().empty());
  ASSERT_TRUE(write("1", "so", "b, for the CPU", kPayload));
  const auto bytes = fs::file_size(only_file());
  ASSERT_TRUE(write("2", "cubin", "a, for CUDA", "small"));
  ASSERT_TRUE(write("3", "so", "c", "damaged soon"));
  put(folder / (hash().add("3").hex() + ".so"), "damaged");
  const std::vector<entry> entries = list();
  ASSERT_EQ(entries.size(), 3u);
  EXPECT_EQ(entries[0].label, "(damaged)");
  EXPECT_EQ(entries[0].bytes, 7u);
  EXPECT_EQ(entries[1].label, "a, for CUDA");
  EXPECT_EQ(entries[1].kind, "cuda");
  EXPECT_EQ(entries[2].label, "b, for the CPU");
  EXPECT_EQ(entries[2].kind, "cpu");
  EXPECT_EQ(entries[2].bytes, bytes);
  for (const entry& e : entries) EXPECT_LT(e.age_seconds, 600);
}

TEST_F(DiskCache, ClearRemovesItsOwnFilesOnly) {
  ASSERT_TRUE(write("1", "so", "label", kPayload));
  ASSERT_TRUE(write("2", "cubin", "label", kPayload));
  const std::string name = hash().add("1").hex();
  put(folder / (name + ".so.1.0.tmp"), "left by a process that was killed");
  fs::create_directory(folder / (name + "0.so"));
  for (const char* other : {"notes.txt", "mine.so", "kernel.cubin"}) put(folder / other, "not ours");
  EXPECT_EQ(clear(), 2u);
  EXPECT_TRUE(list().empty());
  std::size_t left = 0;
  for (const fs::directory_entry& file : fs::directory_iterator(folder)) {
    ++left;
    EXPECT_NE(file.path().extension(), ".tmp");
  }
  EXPECT_EQ(left, 4u);
  EXPECT_EQ(clear(), 0u);
}

TEST_F(DiskCache, WhatCameWithTheLibraryIsReadSecondAndLeftAlone) {
  settings_now().library_dir = folder / "lib";
  set("ONEPASS_CACHE_DIR", prebuilt_directory().c_str());
  ASSERT_TRUE(write("key", "cubin", "label", "prebuilt"));
  set("ONEPASS_CACHE_DIR", (folder / "own").c_str());
  EXPECT_EQ(read("key", "cubin"), "prebuilt");
  EXPECT_FALSE(read("another key", "cubin"));
  EXPECT_TRUE(list().empty());
  ASSERT_TRUE(write("key", "cubin", "label", "own"));
  EXPECT_EQ(read("key", "cubin"), "own");
  EXPECT_EQ(clear(), 1u);
  EXPECT_EQ(read("key", "cubin"), "prebuilt");
  settings_now().library_dir.clear();
  EXPECT_FALSE(read("key", "cubin"));
}

TEST_F(DiskCache, AFolderThatIsNotThereIsEmpty) {
  set("ONEPASS_CACHE_DIR", (folder / "absent").c_str());
  EXPECT_TRUE(list().empty());
  EXPECT_EQ(clear(), 0u);
  EXPECT_FALSE(fs::exists(folder / "absent"));
}

#ifndef __APPLE__
TEST_F(DiskCache, TheEnvironmentNamesTheFolder) {
  set("HOME", "/home/someone");
  set("XDG_CACHE_HOME", "/xdg");
  EXPECT_EQ(directory(), folder);
  set("ONEPASS_CACHE_DIR", "");
  EXPECT_EQ(directory(), "/xdg/onepass");
  set("ONEPASS_CACHE_DIR", nullptr);
  EXPECT_EQ(directory(), "/xdg/onepass");
  set("XDG_CACHE_HOME", "");
  EXPECT_EQ(directory(), "/home/someone/.cache/onepass");
  set("XDG_CACHE_HOME", nullptr);
  EXPECT_EQ(directory(), "/home/someone/.cache/onepass");
}
#endif

TEST_F(DiskCache, AFolderThatCannotBeWrittenWarnsOnce) {
  put(folder / "file", "");
  set("ONEPASS_CACHE_DIR", (folder / "file" / "cache").c_str());  // under a file: not even root can write there
  const int status = finish(start([] {                            // once a process: in one that has not warned yet
    settings_now().warn = [](const char* text) { ++warnings, warning = text; };
    for (const char* key : {"1", "2", "3"}) {
      if (write(key, "so", "label", kPayload) || read(key, "so")) return 2;
    }
    const bool says =
        warning.find("ONEPASS_CACHE_DIR") != std::string::npos && warning.find("file/cache") != std::string::npos;
    return warnings == 1 && says && list().empty() && clear() == 0 ? 0 : 1;
  }));
  EXPECT_EQ(status, 0);
}

// What process `who` writes as its `turn`-th: a letter and a length of its own, so that a mixture shows.
std::string payload_of(int who, int turn) {
  return std::string(static_cast<std::size_t>(1 + (who * 131 + turn * 17) % 5000), static_cast<char>('a' + who));
}
constexpr int kProcesses = 8, kTurns = 200, kKeys = 5;
bool is_a_payload(const std::string& text) {
  for (int turn = 0; turn < kTurns; ++turn) {
    if (!text.empty() && text == payload_of(text[0] - 'a', turn)) return true;
  }
  return false;
}

TEST_F(DiskCache, EightProcessesNeverSeeADamagedPayload) {
  const auto key = [](int k) { return "key " + std::to_string(k); };
  for (int k = 0; k < kKeys; ++k) ASSERT_TRUE(write(key(k), "so", "label", payload_of(0, 0)));
  std::vector<pid_t> children;
  for (int who = 0; who < kProcesses; ++who) {
    children.push_back(start([&, who] {
      for (int turn = 0; turn < kTurns; ++turn) {
        if (!write(key(turn % kKeys), "so", "label", payload_of(who, turn))) return 1;
        const std::optional<std::string> seen = read(key((turn + who) % kKeys), "so");
        if (!seen) return 2;  // a rename leaves no moment without an entry
        if (!is_a_payload(*seen)) return 3;
      }
      return 0;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(finish(child), 0);
  EXPECT_EQ(list().size(), static_cast<std::size_t>(kKeys));
  for (const fs::directory_entry& file : fs::directory_iterator(folder)) EXPECT_EQ(file.path().extension(), ".so");
}

}  // namespace
}  // namespace onepass::cache
