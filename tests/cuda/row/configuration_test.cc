// What a configuration must be for its kernel to be right, over many shapes, dtypes, alignments and chips.
#include "src/cuda/row/configuration.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <ostream>

#include "src/cuda/row/tuned.h"
#include "tests/cuda/imagined_call.h"

namespace onepass::cuda {
namespace {

constexpr int64 kColumns[] = {1,     2,     3,     4,     5,     7,     8,     15,     31,     32,     33,   64,   100,
                              127,   128,   129,   255,   256,   257,   384,   511,    512,    513,    768,  1000, 1023,
                              1024,  1025,  1536,  2047,  2048,  2050,  3072,  4095,   4096,   4097,   5120, 8192, 8200,
                              10000, 12288, 16384, 16385, 32768, 50257, 65536, 131072, 262144, 1 << 20};
constexpr int64 kRows[] = {1, 2, 7, 31, 1000, 70000, 1 << 21, 3'000'000'000};
constexpr dtype kTypes[] = {dtype::f32, dtype::f64, dtype::bf16, dtype::f16};
const char* const kChips[] = {"sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120"};

constexpr memory kMemories[] = {{0, 0}, {1, 0}, {2, 0}, {0, 1}, {0, 8}};

void each_call(const std::function<void(const call&)>& body) {
  for (const char* text : kLines) {
    const spec::line line = spec::parse(text);
    for (const dtype x : kTypes) {
      for (const int64 columns : kColumns) {
        for (const int64 rows : kRows) {
          if (columns * rows > int64{1} << 42) continue;  // no memory has so many numbers
          for (const memory at : kMemories) {
            for (const bool backward : {false, true}) body(call_of(line, backward, x, x, rows, columns, at));
            if (!spec::backward_reads(line).result) body(call_of(line, true, x, x, rows, columns, at, true));
          }
        }
      }
    }
  }
}

void each_plan(const std::function<void(const call&, const plan&, const device_facts&)>& body) {
  for (const char* arch : kChips) {
    const device_facts chip = facts_of(arch);
    each_call([&](const call& c) {
      for (const plan& p : choose(c.r, c.a, chip)) {
        if (!testing::Test::HasFailure()) body(c, p, chip);  // one failure is enough to read
      }
    });
  }
}

// The table's plans, and those of all ways that tuning tries: of one number of rows.
void each_plan_tried(const std::function<void(const call&, const plan&, const device_facts&)>& body) {
  each_plan(body);
  for (const char* arch : {"sm_80", "sm_90a"}) {
    const device_facts chip = facts_of(arch);
    each_call([&](const call& c) {
      if (c.a.rows != 1000 || testing::Test::HasFailure()) return;
      const heard_call heard{"", c.r, c.a, chip, describe(c.r, c.a, true)};
      std::vector<way> ways = other_ways(heard, {});
      if (!ways.empty()) {
        const std::vector<way> near = other_ways(heard, ways[static_cast<std::size_t>(c.a.columns) % ways.size()]);
        ways.insert(ways.end(), near.begin(), near.end());
      }
      for (const way& w : ways)
        for (const plan& p : lay_out(w, c.r, c.a, chip, heard.described)) body(c, p, chip);
    });
  }
}

bool same(const configuration& a, const configuration& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

TEST(Configuration, ThreadsFitABlockAndWarps) {
  each_plan_tried([](const call& c, const plan& p, const device_facts&) {
    const int threads = p.with.across * p.with.down;
    EXPECT_GE(std::min(p.with.across, p.with.down), 1) << c;
    EXPECT_LE(threads, 1024) << c;
    if (!c.r.rowwise || p.with.of == part::tiles) return;
    const bool is_halved = std::has_single_bit(static_cast<unsigned>(p.with.across));
    EXPECT_TRUE(is_halved || p.with.across % 32 == 0) << c << ": shuffles halve the distance within a warp";
    EXPECT_EQ(threads % 32, 0) << c << ": shuffles name a whole warp";
    EXPECT_TRUE(p.with.down <= 15 || p.with.across <= 32) << c << ": each row has a barrier, of 16";
    EXPECT_TRUE(p.with.down == 1 || p.with.cluster == 1) << c << ": a reduction in a cluster would join several rows";
  });
}

// Of the lanes that a block's warps have, an eighth at most is behind the row's end.
TEST(Configuration, FewThreadsAreWithoutNumbers) {
  for (const int64 columns : {520, 576, 760, 768, 1128, 1152, 1536, 3000, 3072, 5120, 13312}) {
    for (const bool backward : {false, true}) {
      const call c = call_of(spec::parse("bias | gelu"), backward, dtype::bf16, dtype::bf16, 4096, columns, {});
      const plan p = choose(c.r, c.a, facts_of("sm_90a")).front();
      const int64 warps = (p.with.across * p.with.down + 31) / 32;
      EXPECT_GE(columns * p.with.down * 8, p.grid_x * warps * 32 * p.with.vector_size * 7) << c;
    }
  }
}

TEST(Configuration, ARowHasAsManyWarpsAsItFills) {
  for (const int64 columns : {1728, 2816, 5120, 7168, 9216, 11520, 13312, 14336, 30528}) {
    const call c = call_of(spec::parse("silu | layer_norm | gelu"), true, dtype::bf16, dtype::bf16, 4096, columns, {});
    const plan p = choose(c.r, c.a, facts_of("sm_90a")).front();
    const int64 lanes = int64{p.with.across} * p.with.cluster * p.with.held_vectors * p.with.vector_size;
    EXPECT_GE(columns * 10, lanes * 8) << c;
  }
}

// A flat tensor has no rows that would have to begin at 16 bytes.
TEST(Configuration, AFlatTensorsLanesAreWhole) {
  const call c = call_of(spec::parse("silu"), true, dtype::bf16, dtype::bf16, 1, 999'999, {});
  const configuration with = describe(c.r, c.a, true);
  EXPECT_EQ(with.access, 8);
  EXPECT_EQ(with.ragged, 1);
}

// A chip may have no room for more than eight blocks in a cluster: launch.cc asks again with fewer.
TEST(Configuration, ClustersStayWithinTheChip) {
  device_facts chip = facts_of("sm_90a");
  const call c = call_of(spec::parse("layer_norm | scale | bias"), true, dtype::f32, dtype::f32, 1024, 131072, {});
  EXPECT_EQ(choose(c.r, c.a, chip).front().with.cluster, 16);
  chip.cluster = 8;
  EXPECT_LE(choose(c.r, c.a, chip).front().with.cluster, 8);
}

TEST(Configuration, RowsAreCovered) {
  each_plan_tried([](const call& c, const plan& p, const device_facts&) {
    const configuration& with = p.with;
    const int64 numbers_across = int64{with.across} * with.vector_size;
    if (c.r.rowwise && with.of != part::tiles) {
      const int64 parts = with.of == part::parts ? p.grid_x / c.a.rows : 1;
      EXPECT_TRUE(with.of != part::whole || with.cluster * with.held_vectors * numbers_across >= c.a.columns) << c;
      EXPECT_TRUE(with.of != part::parts || parts * p.row_columns >= c.a.columns) << c;
      EXPECT_LE(with.whole_vectors * with.cluster * numbers_across, c.a.columns) << c;
      EXPECT_EQ(p.row_columns % (with.held_vectors * numbers_across), 0) << c << ": lanes would be in two parts";
      EXPECT_EQ(p.grid_x % static_cast<unsigned>(with.cluster), 0u) << c;
    } else if (with.flat) {
      EXPECT_TRUE(c.a.rows == 1 && c.r.wants_column == 0) << c;
    } else {  // blocks stride over rows, but not over columns
      EXPECT_GE(p.grid_x * numbers_across, c.a.columns) << c;
    }
  });
}

TEST(Configuration, GridsStayWithinLimits) {
  each_plan_tried([](const call& c, const plan& p, const device_facts&) {
    EXPECT_GE(p.grid_x, 1u) << c;
    EXPECT_LE(p.grid_x, (1u << 31) - 1) << c;
    EXPECT_GE(p.grid_y, 1u) << c;
    EXPECT_LE(p.grid_y, 65535u) << c;
  });
}

TEST(Configuration, AccessesAreAlignedAndNeverCrossTheRow) {
  each_plan([](const call& c, const plan& p, const device_facts&) {
    const int access = p.with.access;
    const int bytes = p.with.vector_size * size_of(c.r.x);
    EXPECT_TRUE(bytes == 16 || (access == p.with.vector_size && bytes >= 4))
        << c << ": only whole accesses make short lanes";
    EXPECT_TRUE(std::has_single_bit(static_cast<unsigned>(access)) && access <= p.with.vector_size) << c;
    EXPECT_EQ(c.a.columns % access, 0) << c;
    const auto aligned = [&](const view& v) {
      const auto bytes = static_cast<std::uintptr_t>(std::min(access * size_of(v.type), 16));
      const auto strides = static_cast<std::uintptr_t>(v.stride[kMaxDims - 1] * size_of(v.type));
      return v.data == nullptr || (reinterpret_cast<std::uintptr_t>(v.data) % bytes == 0 && strides % bytes == 0);
    };
    EXPECT_TRUE(aligned(c.a.x) && aligned(c.a.y) && aligned(c.a.dx) && aligned(c.a.recomputed)) << c;
    EXPECT_TRUE(std::all_of(c.a.operand, c.a.operand + kMaxOperands, aligned)) << c;
    EXPECT_TRUE(std::all_of(c.a.operand_gradient, c.a.operand_gradient + kMaxOperands, aligned)) << c;
    EXPECT_TRUE(std::all_of(c.a.kept, c.a.kept + kMaxKeeps, aligned)) << c;
    EXPECT_TRUE(std::all_of(c.a.kept_gradient, c.a.kept_gradient + kMaxKeeps, aligned)) << c;
  });
}

TEST(Configuration, AlignedRowsMoveSixteenBytesAtOnce) {
  const device_facts chip = facts_of("sm_90a");
  for (const char* text : kLines) {
    const spec::line line = spec::parse(text);
    for (const dtype x : kTypes) {
      const int lanes = 16 / size_of(x);
      const auto access = [&](dtype column, int64 columns, memory at) {
        const call c = call_of(line, false, x, column, 100, columns, at);
        return choose(c.r, c.a, chip).front().with.access;
      };
      EXPECT_EQ(access(x, 4096, {}), lanes) << text;
      EXPECT_EQ(access(dtype::f32, 4096, {}), lanes) << text << ": wider operands take several accesses a lane";
      EXPECT_EQ(access(x, 4096, {0, 8}), lanes) << text;
      EXPECT_EQ(access(x, 4096 + lanes / 2, {}), std::max(lanes / 2, 1)) << text;
      EXPECT_EQ(access(x, 4097, {}), 1) << text;
      EXPECT_EQ(access(x, 4096, {1, 0}), 1) << text;
    }
  }
}

TEST(Configuration, ExpandedTensorsDoNotLimitAccesses) {
  call c = call_of(spec::parse("add | gelu"), true, dtype::f32, dtype::f32, 64, 1024);
  c.a.y = {
      reinterpret_cast<void*>((std::uintptr_t{1} << 20) + 4), {}, dtype::f32, 0};  // one number for the whole gradient
  const configuration with = choose(c.r, c.a, facts_of("sm_90a")).front().with;
  EXPECT_EQ(with.access, 4);
  EXPECT_TRUE(with.single_y);
  EXPECT_FALSE(with.single_x);
  c.a.operand[0].column_stride = 0;
  EXPECT_EQ(choose(c.r, c.a, facts_of("sm_90a")).front().with.single_operand, 1u);
}

// A thread has at most 255 registers, an SM 65536. Values, sums and some forty for addresses and temporaries.
TEST(Configuration, RegistersHoldTheRowAndItsSums) {
  each_plan([](const call& c, const plan& p, const device_facts&) {
    if (!c.r.rowwise) return;
    const int wide = c.r.x == dtype::f64 ? 2 : 1, row = p.with.held_vectors * p.with.vector_size * wide;
    const bool adds = p.with.of == part::whole && p.with.sums_in_registers;
    const int sums = adds ? row * std::popcount(c.r.wants_column) : 0;
    const int held = p.with.recomputes ? 0 : c.r.backward ? 2 : 1;  // values of each number
    const int registers = row * held + sums + 32;
    EXPECT_LE(registers, 255) << c;
    EXPECT_LE(registers * p.with.across * p.with.down, 65536) << c;
  });
}

// Backward of `kl_div` has two rows' values and two gradients: in 32 registers it spilled and took 1.7 times as long.
TEST(Configuration, PairedRowsHaveRegisters) {
  for (const dtype x : {dtype::f32, dtype::bf16}) {
    const call c = call_of(spec::parse("kl_div"), true, x, x, 4096, 128256);
    for (const plan& p : choose(c.r, c.a, facts_of("sm_90a"))) {
      if (p.with.of == part::tiles) {
        EXPECT_LE(p.with.blocks_per_sm * p.with.across * p.with.down, 1024) << c;
      }
    }
  }
}

TEST(Configuration, SharedMemoryFitsTheChip) {
  each_plan_tried([](const call& c, const plan& p, const device_facts& chip) {
    const int number = c.r.x == dtype::f64 ? 8 : 4;
    const configuration& with = p.with;
    const int warps = std::max(with.across / 32, 1), reduction = 3 * warps * with.cluster * 3 * number;
    EXPECT_LE(static_cast<int>(p.shared_bytes) + reduction, chip.shared_per_block) << c;
    const int64 lanes = int64{with.held_vectors} * with.across * with.down;
    const int64 sums = with.sums_in_registers ? 0 : std::popcount(c.r.wants_column) * lanes * with.vector_size * number;
    const int64 windows =
        int64{with.across} * std::max(with.held_vectors, 1) + (with.access < with.vector_size ? 8 : 0);
    const int64 copied = with.stages * std::popcount(with.streams) + std::popcount(with.loaded_once);
    const int64 staged = std::popcount(with.staged) * std::max(with.unroll, 1);
    const bool writes = with.of == part::whole || with.of == part::tiles;
    EXPECT_EQ(p.shared_bytes, static_cast<unsigned>(sums + (copied + (writes ? staged : 0)) * windows *
                                                               with.vector_size * size_of(c.r.x) * with.down))
        << c;
    EXPECT_TRUE(with.staged == 0 || with.access < with.vector_size) << c << ": lanes that are stored as they are";
    EXPECT_TRUE(with.stages > 0 || (with.streams == 0 && with.loaded_once == 0)) << c;
    EXPECT_EQ(with.streams & with.loaded_once << 2, 0u) << c << ": operands are streams from number 2 on";
    EXPECT_TRUE(with.ahead == 0 || with.stages != 1) << c << ": two rows are in flight";
    EXPECT_TRUE(p.parts == 0 || p.with.sums_in_registers || p.with.down == 1) << c << ": rows would share sums";
  });
}

TEST(Configuration, PartsComeWithColumnGradientsOnly) {
  each_plan_tried([](const call& c, const plan& p, const device_facts& chip) {
    const bool rows = c.r.rowwise && p.with.of == part::whole;
    EXPECT_EQ(p.parts, c.r.wants_column == 0 || p.with.of == part::parts || p.with.of == part::combined ? 0
                       : rows ? p.grid_x / static_cast<unsigned>(p.with.cluster)
                              : p.grid_y)
        << c;
    EXPECT_LE(p.parts, chip.sm_count * 32) << c;  // the second stage's work does not grow with rows
  });
}

TEST(Configuration, ColumnsOfFewRowsHaveOnePart) {
  const device_facts chip = facts_of("sm_90a");
  for (const char* text : {"bias", "bias | gelu"}) {
    for (const int64 rows : {1, 2, 5, 8, 16, 100, 128}) {
      for (const int64 columns : {8, 40, 4096, 16384}) {
        const call c = call_of(spec::parse(text), true, dtype::bf16, dtype::bf16, rows, columns);
        const plan p = choose(c.r, c.a, chip).front();
        EXPECT_EQ(p.parts, 1) << c;
        EXPECT_TRUE(p.with.one_part) << c;
      }
    }
    const call many = call_of(spec::parse(text), true, dtype::bf16, dtype::bf16, 4096, 4096);
    EXPECT_GT(choose(many.r, many.a, chip).front().parts, 1);
  }
}

TEST(Configuration, FewNumbersAreSharedByMoreThreads) {
  const device_facts chip = facts_of("sm_90a");
  const auto plan_of = [&](int64 rows, int64 columns, dtype type) {
    const call c = call_of(spec::parse("gelu"), false, type, type, rows, columns);
    return choose(c.r, c.a, chip).front();
  };
  for (const dtype type : {dtype::bf16, dtype::f32}) {
    for (const int64 rows : {1, 3, 64}) {
      const plan few = plan_of(rows, 1000, type);
      EXPECT_EQ(few.with.unroll, 1) << rows;
      EXPECT_GT(plan_of(4096, 4096, type).with.unroll, few.with.unroll);
    }
  }
}

TEST(Configuration, ARowDoesNotDependOnTheNumberOfRows) {
  const device_facts chip = facts_of("sm_90a");
  each_call([&](const call& c) {
    if (!c.r.rowwise || c.a.rows == 1) return;
    arguments one = c.a;
    one.rows = one.size[kMaxDims - 1] = 1;
    configuration many = choose(c.r, c.a, chip).front().with, few = choose(c.r, one, chip).front().with;
    many.small = few.small, many.dense = few.dense;  // how addresses are computed
    many.one_part = few.one_part;                    // where column sums go
    EXPECT_TRUE(same(few, many)) << c;
  });
}

TEST(Configuration, TheSameCallGivesTheSamePlan) {
  each_plan([](const call& c, const plan& p, const device_facts& chip) {
    const int number = std::max(static_cast<int>(p.with.of) - static_cast<int>(part::parts), 0);
    const plan again = choose(c.r, c.a, chip)[static_cast<std::size_t>(number)];
    EXPECT_TRUE(same(p.with, again.with) && p.grid_x == again.grid_x && p.grid_y == again.grid_y &&
                p.parts == again.parts)
        << c;
  });
}

TEST(FactsOf, AnUnknownChipIsNamedWithTheKnownOnes) {
  try {
    facts_of("sm_7");
    FAIL();
  } catch (const std::invalid_argument& e) {
    EXPECT_NE(std::string(e.what()).find("'sm_7', expected one of sm_80, "), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace onepass::cuda
