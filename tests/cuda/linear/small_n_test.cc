// Lines with `linear` of few features in one kernel: what it is given, and that it compiles for every chip.
#include "src/cuda/linear/small_n.h"

#include <gtest/gtest.h>

#include "src/cuda/runtime/source.h"
#include "src/plan/contraction.h"
#include "tests/cuda/chosen.h"
#include "tests/cuda/config_names.h"
#include "tests/cuda/imagined_call.h"
#include "tests/cuda/nvrtc_fixture.h"

namespace onepass::cuda {
namespace {

// Without memory; with every gradient in backward.
struct imagined {
  imagined(const char* text, bool backward, dtype type, dtype column, int64 rows, int64 columns, int features,
           memory at = {})
      : parts(spec::parse(text)),
        line(spec::with_features(parts.before, features)),
        before(call_of(line, backward, type, column, rows, columns, at)),
        behind(call_of(parts.behind, backward, type, column, rows, features)) {
    before.a.y = {};
  }
  small_n_call call() const { return {before.r, before.a, behind.r, behind.a}; }

  spec::contraction parts;
  spec::line line;
  cuda::call before, behind;
};

TEST(SmallNLinear, EveryFeatureHasAThread) {
  const device_facts chip = facts_of("sm_90a");
  for (const bool backward : {false, true}) {
    for (const int features : {1, 2, 3, 5, 8}) {
      for (const int64 columns : {1, 3, 8, 31, 256, 1000, 4096}) {
        for (const dtype type : {dtype::f32, dtype::bf16, dtype::f64}) {
          if (features * columns * size_of(type) > 128 << 10) continue;  // column sums that a block has no room for
          const imagined of("layer_norm | tanh | linear | bias | relu", backward, type, type, 5000, columns, features);
          ASSERT_EQ(why_not_small_n(of.before.r, of.before.a, chip), "")
              << backward << " " << features << " x " << columns << " of " << name_of(type);
          const small_n_plan p = plan_small_n(of.call(), chip);
          EXPECT_GE(p.rows.with.across, features) << columns;
          EXPECT_EQ(p.rows.with.across, p.behind.across);
          EXPECT_EQ(p.rows.with.down, p.behind.down);
          EXPECT_FALSE(p.rows.with.ahead);
          EXPECT_LE(p.rows.shared_bytes, static_cast<unsigned>(chip.shared_per_block));
        }
      }
    }
  }
}

TEST(SmallNLinear, ARowsThreadsDoNotDependOnTheNumberOfRows) {
  const device_facts chip = facts_of("sm_90a");
  for (const int features : {1, 2, 8}) {
    for (const int64 columns : {3, 31, 64, 128, 200, 256, 300, 512, 700, 1024}) {
      for (const dtype type : {dtype::f32, dtype::bf16, dtype::f64}) {
        const auto with = [&](int64 rows) {
          const imagined of("layer_norm | tanh | linear", false, type, type, rows, columns, features);
          return plan_small_n(of.call(), chip).rows.with;
        };
        const configuration few = with(1), many = with(1 << 22);
        EXPECT_EQ(few.vector_size, many.vector_size) << features << " x " << columns;
        EXPECT_EQ(few.across, many.across) << features << " x " << columns;
        EXPECT_EQ(few.held_vectors, many.held_vectors) << features << " x " << columns;
      }
    }
  }
}

TEST(SmallNLinear, ManyRowsComeAheadAndSeveralFeaturesHaveRegisters) {
  const device_facts chip = facts_of("sm_90a");
  const auto with = [&](int64 rows, int features) {
    const imagined of("layer_norm | tanh | linear", false, dtype::f32, dtype::f32, rows, 256, features);
    return plan_small_n(of.call(), chip).rows.with;
  };
  EXPECT_EQ(with(16384, 1).stages, 0);
  EXPECT_EQ(with(1 << 20, 1).stages, 2);
  EXPECT_NE(with(1 << 20, 1).loaded_once, 0u);
  for (const int features : {2, 8}) {
    const configuration c = with(16, features);
    EXPECT_LE(c.across * c.down * c.blocks_per_sm, 512) << features;  // 128 registers a thread
  }
}

TEST(SmallNLinear, SaysWhyNot) {
  const spec::contraction line(spec::parse("rms_norm | linear"));
  const auto why = [&](choice::sizes c) {
    return chosen_on("sm_90a", {.of = line, .sizes = c}).of(spec::strategy::small_n).why_not;
  };
  EXPECT_EQ(why({65536, 256, 1, dtype::f32, false}), "");
  EXPECT_EQ(why({1, 7, 8, dtype::f64, false}), "");
  EXPECT_NE(why({65536, 256, 9, dtype::f32, false}).find("at most 8 features"), std::string::npos);
  EXPECT_NE(why({65536, 1 << 20, 1, dtype::f32, false}).find("rows of at most"), std::string::npos);
}

TEST(SmallNLinear, IsTakenForFloats) {
  const spec::contraction line(spec::parse("layer_norm(0) | tanh | linear | bias | relu"));
  for (const char* chip : {"sm_80", "sm_90a"}) {
    const auto found = chosen_on(chip, {.of = line, .sizes = {16384, 256, 1, dtype::f32, true}});
    EXPECT_EQ(found.chosen().how, spec::strategy::small_n) << chip;
  }
}

TEST(SmallNLinear, ItsSourceDefinesWhatKernelReads) {
  const imagined of("layer_norm | scale | linear", true, dtype::f32, dtype::f32, 4, 64, 2);
  expect_defined(config_names({"linear/small_n.cuda.h", "row/rowwise.cuda.h", "common/reduce.cuda.h"}),
                 source(of.call(), plan_small_n(of.call(), facts_of("sm_80"))));
}

using SmallNLinearNvrtc = Nvrtc;

constexpr const char* kFewLines[] = {
    "layer_norm(0) | tanh | linear | bias | relu",
    "linear",
    "tanh | linear | gelu",
    "add | keep | rms_norm(1e-6) | scale | linear | bias | keep | silu",
    "dropout(0.1) | add | keep | linear | dropout(0.1) | add",
    "softmax | bias | linear | gate(silu)",
};

TEST_F(SmallNLinearNvrtc, CompilesForEveryChip) {
  for (const char* arch : {"sm_80", "sm_90a"}) {
    const device_facts chip = facts_of(arch);
    for (const char* line : kFewLines) {
      for (const bool backward : {false, true}) {
        const imagined of(line, backward, dtype::f32, dtype::f32, 16384, 256, 1);
        expect_compiles_well(source(of.call(), plan_small_n(of.call(), chip)), chip.arch_name);
      }
    }
  }
}

TEST_F(SmallNLinearNvrtc, CompilesForEveryType) {
  const device_facts chip = facts_of("sm_90a");
  for (const dtype type : {dtype::bf16, dtype::f64, dtype::f16}) {
    for (const bool backward : {false, true}) {
      for (const int64 columns : {7, 256, 1001, 4096}) {
        const dtype column = type == dtype::bf16 ? dtype::f32 : type;
        const imagined of(kFewLines[3], backward, type, column, 5000, columns, 3, {.offset = 1, .gap = 1});
        expect_compiles_well(source(of.call(), plan_small_n(of.call(), chip)), chip.arch_name);
      }
    }
  }
}

}  // namespace
}  // namespace onepass::cuda
