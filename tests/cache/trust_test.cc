// Whose files the cache reads, where it is, and who builds what several want.
#include <gtest/gtest.h>
#include <pwd.h>
#include <sys/stat.h>

#include <csignal>

#include "src/cache/hash.h"
#include "tests/cache/cache_folder.h"

namespace onepass::cache {
namespace {

// Runs body in a process that counts what it is warned of.
template <class Body>
int warned(const Body& body) {
  return finish(start([&] {
    settings_now().warn = [](const char* text) { ++warnings, warning = text; };
    return body();
  }));
}

constexpr uid_t kAnother = 4321;

TEST_F(DiskCache, FoldersAndFilesAreItsUsersAlone) {
  set("ONEPASS_CACHE_DIR", (folder / "a" / "b").c_str());
  const mode_t before = umask(0);
  ASSERT_TRUE(write("key", "so", "label", kPayload));
  umask(before);
  struct stat found {};
  for (const char* made : {"a", "a/b"}) {
    ASSERT_EQ(stat((folder / made).c_str(), &found), 0);
    EXPECT_EQ(found.st_mode & 07777, 0700u) << made;
  }
  ASSERT_EQ(stat((folder / "a" / "b" / (hash().add("key").hex() + ".so")).c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 07777, 0600u);
}

TEST_F(DiskCache, AFileThatOthersMayWriteIsRefusedOnceAndReplaced) {
  ASSERT_TRUE(write("1", "so", "label", kPayload));
  ASSERT_TRUE(write("2", "cubin", "label", kPayload));
  for (const fs::directory_entry& file : fs::directory_iterator(folder)) chmod(file.path().c_str(), 0666);
  EXPECT_EQ(warned([] {
              if (read("1", "so") || read("2", "cubin") || read("1", "so")) return 1;
              if (warnings != 1 || warning.find("may be written by others") == std::string::npos) return 2;
              return write("1", "so", "label", "new") && read("1", "so") == "new" ? 0 : 3;
            }),
            0);
}

TEST_F(DiskCache, AnotherUsersFileIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  ASSERT_TRUE(write("key", "so", "label", kPayload));
  ASSERT_EQ(chown(only_file().c_str(), kAnother, kAnother), 0);
  EXPECT_EQ(warned([] {
              if (read("key", "so")) return 1;
              return warnings == 1 && warning.find("belongs to user 4321") != std::string::npos ? 0 : 2;
            }),
            0);
}

TEST_F(DiskCache, RootsFileIsReadByOthers) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  ASSERT_TRUE(write("key", "so", "label", kPayload));
  chmod(folder.c_str(), 0755), chmod(only_file().c_str(), 0644);
  EXPECT_EQ(warned([] {
              if (setuid(kAnother) != 0) return 1;
              return read("key", "so") == kPayload && warnings == 0 ? 0 : 2;
            }),
            0);
}

TEST_F(DiskCache, ALinkIsNotFollowed) {
  ASSERT_TRUE(write("key", "so", "label", kPayload));
  const fs::path file = only_file();
  fs::rename(file, folder / "elsewhere");
  fs::create_symlink(folder / "elsewhere", file);
  EXPECT_EQ(warned([] { return !read("key", "so") && warnings == 1 ? 0 : 1; }), 0);
  ASSERT_TRUE(write("key", "so", "label", "new"));
  EXPECT_FALSE(fs::is_symlink(file));
  EXPECT_NE(contents(folder / "elsewhere"), contents(file)) << "what the link names was written";
}

TEST_F(DiskCache, APipeInAFilesPlaceIsAMiss) {
  ASSERT_TRUE(write("key", "so", "label", kPayload));
  const fs::path file = only_file();
  fs::remove(file);
  ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
  EXPECT_FALSE(read("key", "so"));
}

TEST_F(DiskCache, AFolderOfAnotherUserOrThatOthersMayWriteIsNotUsed) {
  const fs::path shared = folder / "shared";
  set("ONEPASS_CACHE_DIR", shared.c_str());
  ASSERT_TRUE(write("key", "so", "label", kPayload));
  for (const bool is_another : {false, true}) {
    if (is_another && geteuid() != 0) continue;
    chmod(shared.c_str(), is_another ? 0700 : 0770);
    if (is_another) {
      ASSERT_EQ(chown(shared.c_str(), kAnother, kAnother), 0);
    }
    EXPECT_EQ(warned([&] {
                if (directory() == shared || read("key", "so")) return 1;
                const char* why = is_another ? "belongs to user 4321" : "may be written by others";
                return warnings == 1 && warning.find(why) != std::string::npos ? 0 : 2;
              }),
              0)
        << is_another;
  }
}

TEST_F(DiskCache, WithoutAHomeItIsTheSystemsAndNeverTheWorkingDirectory) {
  const passwd* const user = getpwuid(geteuid());
  for (const char* name : {"ONEPASS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"}) set(name, nullptr);
  for (const char* home : {static_cast<const char*>(nullptr), "", "relative"}) {
    set("HOME", home), set("XDG_CACHE_HOME", home);
    EXPECT_EQ(directory(), user == nullptr ? fs::path() : fs::path(user->pw_dir) / ".cache" / "onepass");
  }
}

TEST_F(DiskCache, AUserWithoutAnyHomeKeepsKernelsInMemory) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  for (const char* name : {"ONEPASS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"}) set(name, nullptr);
  EXPECT_EQ(warned([&] {
              if (setuid(kAnother) != 0 || chdir("/tmp") != 0) return 1;
              if (!directory().empty() || write("key", "so", "label", kPayload) || read("key", "so")) return 2;
              if (write("key", "so", "label", kPayload) || !list().empty() || clear() != 0) return 3;
              return warnings == 1 && warning.find("in memory only") != std::string::npos ? 0 : 4;
            }),
            0);
}

TEST_F(DiskCache, OneProcessBuildsAndOneThatWasKilledDoesNotBlock) {
  const auto append = [&](const char* text) { std::ofstream(folder / "log", std::ios::app) << text; };
  std::vector<pid_t> children;
  for (int who = 0; who < 6; ++who) {
    children.push_back(start([&] {
      const auto alone = lock("key", [] {});
      if (!alone || !alone->is_held()) return 1;
      if (read("key", "so")) return 0;
      append("built\n");
      usleep(100000);
      return write("key", "so", "label", kPayload) ? 0 : 2;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(finish(child), 0);
  EXPECT_EQ(contents(folder / "log"), "built\n");
  int told[2];
  ASSERT_EQ(pipe(told), 0);
  const pid_t holder = start([&] {
    const auto held = lock("another", [] {});
    if (::write(told[1], "x", 1) == 1) pause();
    return 0;
  });
  char got = 0;
  ASSERT_EQ(::read(told[0], &got, 1), 1);
  int asked = 0;
  const auto waits = [&] {
    if (++asked == 3) kill(holder, SIGKILL);
  };
  EXPECT_TRUE(lock("another", waits)->is_held());
  EXPECT_GE(asked, 3);
  finish(holder);
}

}  // namespace
}  // namespace onepass::cache
