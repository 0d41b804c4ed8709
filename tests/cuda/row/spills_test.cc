// What is taken where the table's kernel has no registers for its rows: kernels here are made up.
#include "src/cuda/row/spills.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <stdexcept>
#include <string>

#include "tests/cuda/imagined_call.h"

namespace onepass::cuda {
namespace {

const char* const kHeavy = "silu | layer_norm | scale | bias | gelu";

// A chip's kernels, each with the bytes that a plan of it spills.
class kernels {
 public:
  explicit kernels(std::function<int(const plan&)> spilled) : spilled_(std::move(spilled)) {}

  const kernel& of(const plan& p) {
    const std::string name(reinterpret_cast<const char*>(&p.with), sizeof p.with);
    ++asked;
    for (const auto& [known, built] : built_)
      if (known == name) return *built;
    static std::deque<kernel> all;  // which stay valid, as a device's do
    const kernel& made = all.emplace_back(kernel{.function = nullptr, .context = nullptr, .spilled = spilled_(p)});
    return *built_.emplace_back(name, &made).second;
  }
  std::size_t built() const { return built_.size(); }

  int asked = 0;

 private:
  std::function<int(const plan&)> spilled_;
  std::deque<std::pair<std::string, const kernel*>> built_;
};

plan taken(kernels& from, const char* text, bool backward, int64 rows, int64 columns, memory at = {}) {
  const call c = call_of(spec::parse(text), backward, dtype::bf16, dtype::bf16, rows, columns, at);
  const device_facts chip = facts_of("sm_90a");
  const configuration described = describe(c.r, c.a, true);
  const std::vector<plan> plans = without_spills(c.r, c.a, chip, described, choose(c.r, c.a, chip, described),
                                                 [&](const plan& p) -> const kernel& { return from.of(p); });
  EXPECT_EQ(plans.size(), 1u);
  return plans.front();
}

TEST(Spills, ATablesKernelWithoutAnyIsTaken) {
  kernels none([](const plan&) { return 0; });
  const plan p = taken(none, kHeavy, true, 4096, 3072);
  EXPECT_EQ(p.with.held_vectors, 3);
  EXPECT_EQ(none.built(), 1u);
}

TEST(Spills, ALightLineIsNotAsked) {
  kernels all([](const plan&) { return 400; });
  taken(all, "rms_norm | scale", true, 4096, 3072);
  EXPECT_EQ(all.asked, 0);
}

TEST(Spills, TheFirstWithoutAnyIsTakenAndRemembered) {
  kernels of_many([](const plan& p) { return p.with.held_vectors >= 3 ? 100 : 0; });
  const plan p = taken(of_many, kHeavy, true, 4096, 3072);
  EXPECT_LT(p.with.held_vectors, 3);
  const std::size_t built = of_many.built();
  EXPECT_EQ(taken(of_many, kHeavy, true, 4096, 3072).with.across, p.with.across);
  EXPECT_EQ(of_many.built(), built);
}

TEST(Spills, TheLeastIsTakenWhereAllDo) {
  kernels all([](const plan& p) { return 10 * p.with.held_vectors + p.with.blocks_per_sm; });
  EXPECT_LT(taken(all, kHeavy, true, 4096, 3072).with.held_vectors, 3);
  EXPECT_LE(all.built(), 6u);
  kernels same([](const plan&) { return 64; });
  EXPECT_EQ(taken(same, kHeavy, true, 4096, 3072).with.held_vectors, 3) << "the table's";
}

// Of 192 columns 24 lanes are held by 8 threads, or by 16 of which four have none.
TEST(Spills, FewBytesAreLessThanThreadsWithoutNumbers) {
  kernels few([](const plan& p) { return p.with.across == 8 ? 32 : 0; });
  EXPECT_EQ(taken(few, kHeavy, true, 4096, 192).with.across, 8);
  kernels many([](const plan& p) { return p.with.across == 8 ? 400 : 0; });
  EXPECT_EQ(taken(many, kHeavy, true, 4096, 192).with.across, 16);
}

TEST(Spills, WhatIsSavedAndHowBatchesLieDoNotMatter) {
  const call c = call_of(spec::parse(kHeavy), false, dtype::bf16, dtype::bf16, 4096, 11008);
  plan p = choose(c.r, c.a, facts_of("sm_90a")).front();
  const configuration usual = usual_form(c.r, c.a, p).with;
  p.with.saves_statistics = 0, p.with.only_statistics = 1, p.with.dims = 4, p.with.small = 0, p.with.dense = 0;
  const configuration again = usual_form(c.r, c.a, p).with;
  EXPECT_EQ(std::memcmp(&usual, &again, sizeof usual), 0);
}

TEST(Spills, WhatCannotBeBuiltIsDoneWithout) {
  kernels none([](const plan&) -> int { throw std::runtime_error("no NVRTC"); });
  EXPECT_EQ(taken(none, kHeavy, true, 4096, 3072).with.held_vectors, 3);
  kernels first([](const plan& p) -> int {
    if (p.with.held_vectors < 3) throw std::runtime_error("too much shared memory");
    return 100;
  });
  EXPECT_EQ(taken(first, kHeavy, true, 4096, 3072).with.held_vectors, 3);
}

// A call of one row has other kernels than one of many, as has one whose rows lie apart: its row does not.
TEST(Spills, HowManyRowsThereAreDoesNotMatter) {
  kernels of_one_part([](const plan& p) {
    return p.with.one_part != 0 || p.with.small == 0 ? 0 : p.with.held_vectors >= 3 ? 100 : 0;
  });
  const plan many = taken(of_one_part, kHeavy, true, 4096, 3072);
  EXPECT_LT(many.with.held_vectors, 3);
  for (const int64 rows : {int64{1}, int64{3}, int64{1} << 24}) {
    const plan p = taken(of_one_part, kHeavy, true, rows, 3072);
    EXPECT_EQ(p.with.across, many.with.across) << rows;
    EXPECT_EQ(p.with.held_vectors, many.with.held_vectors) << rows;
  }
}

}  // namespace
}  // namespace onepass::cuda
