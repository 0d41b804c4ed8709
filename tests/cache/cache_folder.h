// What tests of the cache share: an empty folder as the cache, processes, and what they are warned of.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "src/cache/disk_cache.h"
#include "src/settings.h"

namespace onepass::cache {

namespace fs = std::filesystem;

inline std::string contents(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
inline void put(const fs::path& file, const std::string& text) { std::ofstream(file, std::ios::binary) << text; }

// Runs body in a process of its own; its result is the exit status.
inline pid_t start(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  return child;
}
inline int finish(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// An empty folder as cache; the environment is put back.
class DiskCache : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "onepass-test-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder = pattern;
    set("ONEPASS_CACHE_DIR", folder.c_str());
  }
  void TearDown() override {
    for (const auto& [name, value] : before_) value ? setenv(name.c_str(), value->c_str(), 1) : unsetenv(name.c_str());
    fs::remove_all(folder);
  }
  void set(const char* name, const char* value) {  // null: not set
    const char* old = std::getenv(name);
    before_.emplace_back(name, old ? std::optional<std::string>(old) : std::nullopt);
    value ? setenv(name, value, 1) : unsetenv(name);
  }
  fs::path only_file() const {
    std::vector<fs::path> files;
    for (const fs::directory_entry& file : fs::directory_iterator(folder)) files.push_back(file.path());
    EXPECT_EQ(files.size(), 1u);
    return files.empty() ? fs::path() : files[0];
  }
  fs::path folder;

 private:
  std::vector<std::pair<std::string, std::optional<std::string>>> before_;
};

inline const std::string kPayload = std::string("\x7f\0ELF\n\r\xff", 8) + std::string(5000, 'p');

inline int warnings = 0;
inline std::string warning;

}  // namespace onepass::cache
