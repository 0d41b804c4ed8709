// Compilers that fail, hang, have no room and are stopped; each case in a process of its own, which asks once which
// compiler there is.
#include "src/compiler.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <list>
#include <string>
#include <thread>
#include <vector>

#include "src/process.h"
#include "src/settings.h"

namespace onepass {
namespace {

namespace fs = std::filesystem;

int warnings = 0;
std::string warning;

std::string contents(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class Compiler : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "onepass-test-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder = pattern;
    for (const char* inner : {"cache", "temporary"}) fs::create_directory(folder / inner), chmod(at(inner), 0700);
  }
  void TearDown() override { fs::remove_all(folder); }

  const char* at(const std::string& name) {
    names_.push_back((folder / name).string());
    return names_.back().c_str();
  }

  // A compiler that notes each compilation, does what it says, and then compiles.
  void compiler_that(const std::string& does) {
    std::ofstream(folder / "compiler")
        << "#!/bin/sh\n[ \"$1\" = --version ] && echo broken 1.0 && exit 0\necho compiled >>"
        << (folder / "log").string() << '\n'
        << does << "\nexec c++ \"$@\"\n";
    chmod(at("compiler"), 0755);
  }
  long compilations() const {
    const std::string log = contents(folder / "log");
    return std::count(log.begin(), log.end(), '\n');
  }

  pid_t start(const std::function<int()>& body) {
    const pid_t child = fork();
    if (child != 0) return child;
    settings_now().include_dir = folder;
    settings_now().warn = [](const char* text) { ++warnings, warning = text; };
    setenv("ONEPASS_CXX", at("compiler"), 1), setenv("ONEPASS_CACHE_DIR", at("cache"), 1);
    setenv("TMPDIR", at("temporary"), 1);
    _exit(body());
  }
  static int finish(pid_t child) {
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  int in_a_process(const std::function<int()>& body) { return finish(start(body)); }

  std::size_t files_in(const char* inner, const std::function<bool(const fs::path&)>& which) const {
    std::size_t count = 0;
    for (const fs::directory_entry& file : fs::directory_iterator(folder / inner)) count += which(file.path());
    return count;
  }
  std::size_t entries() const {
    return files_in("cache", [](const fs::path& file) { return file.extension() == ".so"; });
  }
  std::size_t folders_left() const {
    return files_in("cache", [](const fs::path& file) { return fs::is_directory(file); }) +
           files_in("temporary", [](const fs::path&) { return true; });
  }

  fs::path folder;

 private:
  std::list<std::string> names_;
};

std::string gives(const std::string& name, int number) {
  return "extern \"C\" __attribute__((visibility(\"default\"))) int " + name + "() { return " + std::to_string(number) +
         "; }\n";
}

const program kSeven{gives("seven", 7), "seven", {}};

// 0: it runs; 1: it cannot be compiled, 2: it is wrong, with a message that has all of these; else 3.
int outcome(const program& what, const std::vector<std::string>& says = {}) {
  const auto said = [&](const std::exception& e, int how) {
    for (const std::string& part : says) {
      if (std::string(e.what()).find(part) == std::string::npos) return std::fprintf(stderr, "%s\n", e.what()), 3;
    }
    return how;
  };
  try {
    return reinterpret_cast<int (*)()>(symbol(compile_and_open(what), "seven"))() == 7 ? 0 : 3;
  } catch (const cannot_compile& e) {
    return said(e, 1);
  } catch (const std::runtime_error& e) {
    return said(e, 2);
  }
}

// 0: it ends as another thread interrupts it, soon.
int interrupted_outcome(const program& what) {
  std::thread other([] { usleep(200000), interrupt_programs(); });
  int status = 1;
  try {
    outcome(what);
  } catch (const interrupted&) {
    status = 0;
  }
  other.join();
  return status;
}

TEST_F(Compiler, CompilesOnceForAllProcesses) {
  compiler_that("sleep .1");
  std::vector<pid_t> children;
  for (int who = 0; who < 8; ++who) children.push_back(start([] { return outcome(kSeven); }));
  for (const pid_t child : children) EXPECT_EQ(finish(child), 0);
  EXPECT_EQ(compilations(), 1);
  EXPECT_EQ(entries(), 1u);
  EXPECT_EQ(folders_left(), 0u);
}

TEST_F(Compiler, OneOpensManyLibraries) {  // the dynamic linker takes two of one path for the same
  compiler_that("");
  EXPECT_EQ(in_a_process([] {
              for (int n = 0; n < 5; ++n) {
                const program what{gives("number", n), "number", {}};
                if (reinterpret_cast<int (*)()>(symbol(compile_and_open(what), "number"))() != n) return 1;
              }
              return 0;
            }),
            0);
}

TEST_F(Compiler, PiecesAreOneLibrary) {
  compiler_that("");
  EXPECT_EQ(in_a_process([] {
              program what{gives("seven", 7) + gives("eight", 8), "both", {}};
              what.pieces = {gives("seven", 7), gives("eight", 8)};
              void* const library = compile_and_open(what);
              return reinterpret_cast<int (*)()>(symbol(library, "eight"))() == 8 ? outcome(what) : 1;
            }),
            0);
  EXPECT_EQ(entries(), 1u);
  EXPECT_EQ(folders_left(), 0u);
}

TEST_F(Compiler, APieceThatFailsSaysHow) {
  compiler_that("");
  EXPECT_EQ(in_a_process([] {
              program what{gives("seven", 7) + "nonsense", "both", {}};
              what.pieces = {gives("seven", 7), "nonsense"};
              return outcome(what, {"status 1", "nonsense"});
            }),
            1);
  EXPECT_EQ(entries(), 0u);
  EXPECT_EQ(folders_left(), 0u);
}

TEST_F(Compiler, AsManyAtOnceAsAreAllowed) {
  setenv("MAX_JOBS", "1", 1);
  EXPECT_EQ(compilers_at_once(), 1u);
  setenv("MAX_JOBS", "1000000", 1);
  const std::size_t all = compilers_at_once();
  EXPECT_GE(all, 1u);
  EXPECT_LE(all, std::thread::hardware_concurrency());
  unsetenv("MAX_JOBS");
  EXPECT_EQ(compilers_at_once(), all);
}

TEST_F(Compiler, WherePiecesAreEndedOneIsTried) {
  compiler_that("for each; do [ $each = -c ] && kill -9 $$; done");
  EXPECT_EQ(in_a_process([] {
              program what = kSeven;
              what.pieces = {gives("seven", 7), gives("eight", 8)};
              return outcome(what);
            }),
            0);
  EXPECT_EQ(compilations(), 3);
  EXPECT_EQ(folders_left(), 0u);
}

TEST_F(Compiler, PiecesAreInterrupted) {
  compiler_that("sleep 60");
  EXPECT_EQ(in_a_process([] {
              program what = kSeven;
              what.pieces = {gives("seven", 7), gives("eight", 8)};
              return interrupted_outcome(what);
            }),
            0);
  EXPECT_EQ(entries(), 0u);
  EXPECT_EQ(folders_left(), 0u);
}

TEST_F(Compiler, WithoutOneItSaysWhatItLookedFor) {
  EXPECT_EQ(in_a_process([] { return outcome(kSeven, {"no C++ compiler", "ONEPASS_CXX"}); }), 1);
}

TEST_F(Compiler, OneThatFailsSaysHowAndWhatToSet) {
  compiler_that("echo unrecognized option -std=c++20 >&2; exit 1");
  EXPECT_EQ(in_a_process([] {
              return outcome(kSeven, {"status 1", "broken 1.0", "unrecognized option", "ONEPASS_CXX", "C++20"});
            }),
            1);
  compiler_that("kill -9 $$");
  EXPECT_EQ(in_a_process([] { return outcome(kSeven, {"signal 9, for want of memory perhaps"}); }), 1);
  EXPECT_EQ(entries(), 0u);
  EXPECT_EQ(folders_left(), 0u);
}

TEST_F(Compiler, WhereItCompilesTheRestAUsersSourceIsWrong) {
  program wrong = kSeven;
  wrong.source += "int wrong = no_such_thing;\n", wrong.probe = "int right = 1;\n";
  compiler_that("");
  EXPECT_EQ(in_a_process([&] { return outcome(wrong, {"no_such_thing"}); }), 2);
  compiler_that("exit 1");
  EXPECT_EQ(in_a_process([&] { return outcome(wrong, {"ONEPASS_CXX"}); }), 1);
}

std::string full(const std::string& where) {
  return "case \"$*\" in *\"" + where + "\"*) echo 'cannot write: No space left on device' >&2; exit 1;; esac";
}

TEST_F(Compiler, WhereThereIsNoRoomItWorksElsewhere) {
  compiler_that(full("-o " + (folder / "cache").string()));
  EXPECT_EQ(in_a_process([] { return outcome(kSeven); }), 0);
  EXPECT_EQ(compilations(), 2);
  EXPECT_EQ(entries(), 1u);
  EXPECT_EQ(folders_left(), 0u);
  fs::remove_all(folder / "cache");
  compiler_that(full("-o"));
  EXPECT_EQ(in_a_process([] { return outcome(kSeven, {"No space left", "ONEPASS_CACHE_DIR", "TMPDIR"}); }), 1);
}

TEST_F(Compiler, ItsOwnTemporaryFilesAreInTheFolderThatGoes) {
  compiler_that("echo x > $TMPDIR/left");
  EXPECT_EQ(in_a_process([] { return outcome(kSeven); }), 0);
  EXPECT_EQ(folders_left(), 0u);
}

TEST_F(Compiler, TemporaryFilesNeedNoFolderWhereTheCacheHasOne) {
  compiler_that("");
  EXPECT_EQ(in_a_process([] {
              setenv("TMPDIR", "/nonexistent", 1);
              return outcome(kSeven);
            }),
            0);
  for (const char* options : {"size=4k", ""}) {
    fs::remove_all(folder / "cache");
    const int status = in_a_process([&] {
      if (unshare(CLONE_NEWNS) != 0 || mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return 77;
      if (mount("tmpfs", at("temporary"), "tmpfs", *options ? 0 : MS_NOEXEC, options) != 0) return 77;
      if (*options) std::ofstream(folder / "temporary" / "file") << std::string(8192, 'x');
      return outcome(kSeven);
    });
    if (status == 77) GTEST_SKIP() << "may not mount";
    EXPECT_EQ(status, 0) << options;
  }
}

TEST_F(Compiler, WithoutAWritableCacheItWorksWithTemporaryFiles) {
  compiler_that("");
  EXPECT_EQ(in_a_process([&] {
              std::ofstream(folder / "file") << "";
              setenv("ONEPASS_CACHE_DIR", at("file/below"), 1);
              return outcome(kSeven) == 0 && warnings == 1 ? 0 : 1;
            }),
            0);
  EXPECT_EQ(folders_left(), 0u);
}

TEST_F(Compiler, WhatAKilledProcessLeavesIsRemoved) {
  compiler_that("[ -e " + (folder / "go").string() + " ] || { echo $$ >" + (folder / "pid").string() +
                "; sleep 600; }");
  const pid_t child = start([] { return outcome(kSeven); });
  int compiler = 0;
  for (int turn = 0; turn < 1000 && compiler == 0; ++turn, usleep(10000)) std::ifstream(folder / "pid") >> compiler;
  ASSERT_NE(compiler, 0);
  kill(child, SIGKILL), finish(child);
  EXPECT_EQ(folders_left(), 1u);
  std::string state = "R", skipped;
  for (int turn = 0; turn < 1000 && state != "Z"; ++turn, usleep(10000)) {
    std::ifstream in("/proc/" + std::to_string(compiler) + "/stat");
    if (!(in >> skipped >> skipped >> state)) break;
  }
  EXPECT_FALSE(fs::exists("/proc/" + std::to_string(compiler)) && state != "Z") << "the compiler runs on";
  std::ofstream(folder / "go") << "";
  EXPECT_EQ(in_a_process([] { return outcome(kSeven); }), 0);
  EXPECT_EQ(folders_left(), 0u);
}

TEST_F(Compiler, AnInterruptionReachesWhoWaitsForAnother) {
  compiler_that("sleep 600");
  const pid_t first = start([] { return outcome(kSeven); });
  while (compilations() == 0) usleep(10000);
  EXPECT_EQ(in_a_process([] { return interrupted_outcome(kSeven); }), 0);
  kill(first, SIGKILL), finish(first);
  EXPECT_EQ(compilations(), 1);
}

TEST_F(Compiler, AnotherUsersLibraryIsNotLoaded) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  compiler_that("");
  ASSERT_EQ(in_a_process([] { return outcome(kSeven); }), 0);
  for (const fs::directory_entry& file : fs::directory_iterator(folder / "cache")) {
    if (file.path().extension() != ".so") continue;
    ASSERT_EQ(chown(file.path().c_str(), 4321, 4321), 0);
  }
  EXPECT_EQ(in_a_process([] {
              return outcome(kSeven) == 0 && warnings == 1 && warning.find("user 4321") != std::string::npos ? 0 : 1;
            }),
            0);
  EXPECT_EQ(compilations(), 2);
  EXPECT_EQ(in_a_process([] { return outcome(kSeven) == 0 && warnings == 0 ? 0 : 1; }), 0);
  EXPECT_EQ(compilations(), 2) << "what was built again is loaded";
}

}  // namespace
}  // namespace onepass
