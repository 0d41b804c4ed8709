// Tests that compile with NVRTC, into an empty cache; the environment is put back.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "src/cuda/runtime/nvrtc.h"
#include "src/settings.h"

namespace onepass::cuda {

// Where Python's packages have it, ONEPASS_NVRTC says so: a C++ test knows no Python.
inline const char* find_nvrtc() {
  const char* path = std::getenv("ONEPASS_NVRTC");
  return path ? path : "";
}

inline bool nvrtc_is_here() {
  for (const char* name : {find_nvrtc(), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) {
    if (*name != '\0' && dlopen(name, RTLD_NOW | RTLD_LOCAL) != nullptr) return true;
  }
  return false;
}

// It compiles, and the tensor cores may work while others do: where the assembler cannot tell that it may, it says so.
inline void expect_compiles_well(const std::string& source, const std::string& arch_name) {
  std::string log;
  EXPECT_FALSE(nvrtc_compile(source, arch_name, &log).empty());
  EXPECT_EQ(log.find("serialized"), std::string::npos) << log;
}

// Bytes of static shared memory of a cubin's kernel, from its ELF sections, without the 1024 that the system has.
inline unsigned static_shared_bytes(const std::string& cubin) {
  const std::size_t begin = cubin.find(
      "\x7f"
      "ELF");
  const auto number = [&](std::size_t at, std::size_t bytes) {
    std::uint64_t value = 0;
    std::memcpy(&value, cubin.data() + begin + at, bytes);
    return value;
  };
  constexpr std::size_t kNameAt = 0, kOffsetAt = 24, kSizeAt = 32;
  const std::size_t sections = number(0x28, 8), each = number(0x3a, 2), count = number(0x3c, 2);
  const std::size_t names = number(sections + each * number(0x3e, 2) + kOffsetAt, 8);
  for (std::size_t i = 0; i < count; ++i) {
    const std::string_view name = cubin.data() + begin + names + number(sections + each * i + kNameAt, 4);
    if (name.starts_with(".nv.shared.")) return static_cast<unsigned>(number(sections + each * i + kSizeAt, 8)) - 1024;
  }
  return 0;
}

class Nvrtc : public testing::Test {
 protected:
  void SetUp() override {
    settings_now().include_dir = ONEPASS_SOURCE_DIR "/include";
    settings_now().find_nvrtc = find_nvrtc;
    if (!nvrtc_is_here()) GTEST_SKIP() << "libnvrtc cannot be opened";
    std::string pattern = (std::filesystem::temp_directory_path() / "onepass-test-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    if (const char* old = std::getenv("ONEPASS_CACHE_DIR")) before_ = old;
    setenv("ONEPASS_CACHE_DIR", folder_.c_str(), 1);
  }
  void TearDown() override {
    if (folder_.empty()) return;
    before_ ? setenv("ONEPASS_CACHE_DIR", before_->c_str(), 1) : unsetenv("ONEPASS_CACHE_DIR");
    std::filesystem::remove_all(folder_);
  }

 private:
  std::filesystem::path folder_;
  std::optional<std::string> before_;
};

}  // namespace onepass::cuda
