// Kernels compile with NVRTC for every chip, dtype and a line of each kind, without a device; the cache keeps them.
#include "src/cuda/runtime/nvrtc.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <tuple>

#include "src/cache/disk_cache.h"
#include "src/cuda/runtime/source.h"
#include "src/cuda/prebuild.h"
#include "tests/cuda/imagined_call.h"
#include "tests/cuda/nvrtc_fixture.h"

namespace onepass::cuda {
namespace {

std::set<std::string> cached_labels() {
  std::set<std::string> labels;
  for (const cache::entry& e : cache::list()) labels.insert(e.label);
  return labels;
}

double youngest(const std::vector<cache::entry>& entries) {
  return std::min_element(entries.begin(), entries.end(),
                          [](const auto& a, const auto& b) { return a.age_seconds < b.age_seconds; })
      ->age_seconds;
}

TEST_F(Nvrtc, GivesACubinForTheChip) {
  const std::string cubin =
      nvrtc_compile("extern \"C\" __global__ void kernel(float* x) { x[threadIdx.x] += 1; }", "sm_90a");
  EXPECT_EQ(cubin.substr(0, 4), "\x7f\x45LF");
  EXPECT_NE(cubin.find("kernel"), std::string::npos);
  EXPECT_EQ(nvrtc_version().rfind("nvrtc 1", 0), 0u) << nvrtc_version();
  EXPECT_NE(nvrtc_options("sm_90a").find("sm_90a"), std::string::npos);
}

TEST_F(Nvrtc, AnErrorHoldsTheCompilersLog) {
  try {
    nvrtc_compile("__global__ void kernel() { no_such_function(); }", "sm_80");
    FAIL() << "a broken source compiled";
  } catch (const std::runtime_error& e) {
    EXPECT_NE(std::string(e.what()).find("NVRTC failed for sm_80"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("identifier \"no_such_function\" is undefined"), std::string::npos)
        << e.what();
  }
  EXPECT_THROW(nvrtc_compile("", "sm_1"), std::runtime_error);
  EXPECT_TRUE(cache::list().empty());
}

TEST_F(Nvrtc, ASecondPrebuildBuildsNothing) {
  const spec::line line = spec::parse("rms_norm(1e-6) | scale");
  const std::vector<std::string> labels = prebuild(line, "sm_90a", dtype::bf16, dtype::f32, 1000);
  EXPECT_EQ(labels.size(), 4u);  // forward for training and for inference, backward, the column sums
  const std::vector<cache::entry> first = cache::list();
  EXPECT_EQ(first.size(), labels.size());
  EXPECT_EQ(cached_labels(), std::set<std::string>(labels.begin(), labels.end()));
  EXPECT_EQ(prebuild(line, "sm_90a", dtype::bf16, dtype::f32, 1000), labels);
  // Numbers of the line are no part of a kernel.
  EXPECT_EQ(prebuild(spec::parse("rms_norm(1e-3)|scale"), "sm_90a", dtype::bf16, dtype::f32, 1000), labels);
  const std::vector<cache::entry> second = cache::list();
  EXPECT_EQ(second.size(), first.size());
  EXPECT_GT(youngest(second), youngest(first)) << "written again";
  prebuild(line, "sm_80", dtype::bf16, dtype::f32, 1000);
  EXPECT_EQ(cache::list().size(), 2 * labels.size());
}

TEST_F(Nvrtc, WhatCameWithTheLibraryIsNotBuiltAgain) {
  const spec::line line = spec::parse("bias | gelu");
  const auto built = [&](const char* arch) {
    prebuild(line, arch, dtype::bf16, dtype::bf16, 1024);
    return cache::list().size();
  };
  const std::size_t count = built("sm_90a");
  settings_now().library_dir = cache::directory() / "lib";
  std::filesystem::create_directories(cache::prebuilt_directory());
  for (const auto& file : std::filesystem::directory_iterator(cache::directory())) {
    if (file.is_regular_file()) std::filesystem::rename(file, cache::prebuilt_directory() / file.path().filename());
  }
  EXPECT_EQ(built("sm_90a"), 0u);
  EXPECT_EQ(built("sm_80"), count) << "another chip";
  settings_now().library_dir.clear();
}

// Rows ahead take what the kernel's own arrays leave, which the plan estimates.
TEST_F(Nvrtc, StaticAndDynamicSharedMemoryFitTheChip) {
  const device_facts chip = facts_of("sm_90a");
  for (const char* text : {"layer_norm | scale | bias", "rms_norm | scale"}) {
    for (const dtype type : {dtype::f32, dtype::bf16}) {
      for (const int64 columns : {8192, 32768, 65536}) {
        const call c = call_of(spec::parse(text), true, type, type, 4096, columns);
        const plan p = choose(c.r, c.a, chip).front();
        std::string log;
        const unsigned own = static_shared_bytes(nvrtc_compile(source(c.r, p.with), chip.arch_name, &log));
        EXPECT_GT(own, 0u) << c;
        EXPECT_LE(own + p.shared_bytes, static_cast<unsigned>(chip.shared_per_block)) << c;
      }
    }
  }
}

TEST_F(Nvrtc, AValueFreeLineNeedsNoBackward) {  // the upstream gradient is the gradient
  // forward of many rows and of few, and the sum of columns
  EXPECT_EQ(prebuild(spec::parse("add"), "sm_90a", dtype::f32, dtype::f32, 64).size(), 3u);
}

constexpr std::array kChips = {"sm_80", "sm_90a", "sm_100a", "sm_120"};
constexpr std::array kTypes = {dtype::f32, dtype::bf16, dtype::f16, dtype::f64};

class Prebuild : public Nvrtc, public testing::WithParamInterface<std::tuple<size_t, size_t>> {};

// A line of each kind, and row lengths that choose each way of holding a row: registers of part of a warp, registers of
// a block, of a cluster, copies in shared memory, parts of rows. Each chip compiles each of them for one dtype, and
// each dtype is compiled for one chip: all together take a quarter of an hour.
TEST_P(Prebuild, CompilesALineOfEachKind) {
  const auto [chip, number] = GetParam();
  const dtype type = kTypes[number];
  size_t turn = chip + number;
  const auto compiles = [&, chip = chip](const char* line, dtype operand, int64 columns) {
    if (turn++ % kTypes.size() != 0) return;
    for (const std::string& label : prebuild(spec::parse(line), kChips[chip], type, operand, columns)) {
      EXPECT_TRUE(cached_labels().contains(label)) << label;
    }
  };
  compiles("bias | gelu | dropout(0.1) | add", type, 1000);
  compiles("gate(silu)", type, 4096);
  compiles("bias | dropout(0.1) | add | keep | rms_norm | scale", type == dtype::f64 ? dtype::f64 : dtype::f32, 1024);
  compiles("layer_norm | scale | bias", type, 96);
  compiles("layer_norm | scale | bias", type, 12000);
  compiles("layer_norm | scale | bias", type, 50000);
  compiles("layer_norm | scale | bias", type, 2'000'001);
  compiles("mul(0.125) | mask | causal | softmax | dropout(0.1)", type, 777);
  compiles("times | exp | l2_norm | gated(softcap(30)) | round | log_softmax", type, 777);
  compiles("abs | log | pow(1.5) | log_softmax", type, 2'000'001);
  compiles("scores | mul(0.125) | add | softmax | keep | values", type, 64);
  // Backward of what stands before `linear` makes its result again.
  compiles("bias | gelu | dropout(0.1) | linear | bias", type, 1000);
  compiles("bias | add | keep | rms_norm | scale | linear", type, 1023);
  for (const int64 columns : {96, 12000, 50000, 2'000'001})
    compiles("layer_norm | scale | bias | linear | bias", type, columns);
  for (const cache::entry& e : cache::list()) EXPECT_EQ(e.kind, "cuda");
}

std::string name_of_kind(const testing::TestParamInfo<std::tuple<size_t, size_t>>& info) {
  const auto [chip, number] = info.param;
  return std::string(kChips[chip]) + "_" + name_of(kTypes[number]);
}
INSTANTIATE_TEST_SUITE_P(Chips, Prebuild,
                         testing::Combine(testing::Range<size_t>(0, kChips.size()),
                                          testing::Range<size_t>(0, kTypes.size())),
                         name_of_kind);

}  // namespace
}  // namespace onepass::cuda
