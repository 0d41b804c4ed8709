// A line with `linear` of few rows in one kernel (onepass/skeleton/streamed_linear.cuda.h): where it serves, and its
// launch.
#include "src/cuda/streamed_linear.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "src/cuda/known_kernels.h"
#include "src/cuda/linear.h"
#include "src/cuda/packed_arguments.h"
#include "src/cuda/tuning.h"

namespace onepass::cuda {
namespace {

// As in streamed_linear.cuda.h.
constexpr int kThreads = 512, kTileColumns = 16, kWarpDepth = 64, kStepDepth = kThreads / 32 * kWarpDepth, kRowTile = 8,
              kSumBytes = 2 * kThreads / 32 * kRowTile * 20 * 4;
constexpr int kReserved = 2048;  // of shared memory, for a row's threads

int threads_of_row(int64 depth) {
  const int64 wanted = ceil_div(depth, kStreamedTuning.numbers);
  return std::clamp(static_cast<int>(std::bit_ceil(static_cast<std::uint64_t>(wanted))), 32, kThreads);
}
int pitch_of(int64 depth) { return static_cast<int>(ceil_div(depth, kWarpDepth) * kWarpDepth * 2 + 64); }
int row_tiles_of(int64 rows) { return static_cast<int>(ceil_div(rows, kRowTile)); }
constexpr int kStepBytes = kThreads * 64;  // of the matrix, in shared memory

}  // namespace

streamed_rows take_rows(int64 rows, int64 depth, const device_facts& chip) {
  const int threads = threads_of_row(depth);
  const int64 taken = rows * pitch_of(depth) + row_tiles_of(rows) * kSumBytes + kReserved;
  const int64 room = (chip.shared_per_block - taken) / kStepBytes;
  return {.at_once = kThreads / threads,
          .numbers = static_cast<int>(ceil_div(depth, threads)),
          .steps_ahead = static_cast<int>(std::min<int64>({room, kStreamedTuning.ahead, ceil_div(depth, kStepDepth)}))};
}

std::string why_not_streamed(int64 rows, int64 depth, const device_facts& chip) {
  if (rows > kStreamedTuning.rows) return "it is for at most " + std::to_string(kStreamedTuning.rows) + " rows";
  const streamed_rows way = take_rows(rows, depth, chip);
  if (way.numbers > kStreamedTuning.numbers || way.steps_ahead < 1) return "the rows do not fit in shared memory";
  return "";
}

bool fits(const streamed_call& call) {
  return is_aligned(call.matrix, call.matrix_stride) && describe(call.behind, call.a_behind).access == kTileLanes &&
         describe(call.before, call.a_before).access == kTileLanes;
}

streamed_plan choose(const streamed_call& call, const device_facts& chip) {
  streamed_plan p{};
  const int64 rows = call.a_behind.rows;
  p.row_tiles = row_tiles_of(rows);
  p.ahead = take_rows(rows, call.depth, chip).steps_ahead;
  p.steps = static_cast<int>(ceil_div(ceil_div(call.depth, kStepDepth), p.ahead) * p.ahead);
  p.pitch = pitch_of(call.depth);
  p.shared_bytes = static_cast<unsigned>(p.ahead * kStepBytes + rows * p.pitch);
  p.grid = static_cast<unsigned>(std::min<int64>(ceil_div(call.a_behind.columns, kTileColumns), chip.sm_count));

  p.behind = describe(call.behind, call.a_behind);
  p.behind.across = kTileColumns / kTileLanes;
  p.behind.down = 32 / p.behind.across;
  p.behind.threads = kThreads;

  p.before = describe(call.before, call.a_before);
  p.before.across = threads_of_row(call.depth);
  p.before.down = kThreads / p.before.across;
  const int64 each = int64{p.before.across} * kTileLanes;
  p.before.held_lanes = static_cast<int>(ceil_div(call.depth, each));
  p.before.exact = call.depth % each == 0;
  p.before.whole_lanes = static_cast<int>(call.depth / each);
  return p;
}

std::string source(const streamed_call& call, const streamed_plan& p) {
  std::string text = heading(widest(call.behind, call.before), "streamed_linear");
  const auto number = [&](const char* name, int value) { text += number_field(name, value); };
  text += "using line_before = " + call.before.line + ";\nusing line_behind = " + call.behind.line +
          ";\nstruct config_before {\n" + fields(call.before, p.before);
  number("kAtOnce", 1), number("kAllExist", 1), number("kStepsAhead", p.ahead), number("kPitch", p.pitch);
  text += "};\nstruct config_behind {\n" + fields(call.behind, p.behind) + "};\nstruct config {\n";
  text += type_field("kX", call.behind.x);
  number("kRowTiles", p.row_tiles), number("kSteps", p.steps), number("kStepsAhead", p.ahead),
      number("kPitch", p.pitch);
  text +=
      "  using before = config_before;\n  using behind = config_behind;\n};\nextern \"C\" __global__ void "
      "__launch_bounds__(" +
      std::to_string(kThreads) + ", 1) " + kKernelName +
      "(const __grid_constant__ streamed_arguments a) {\n  streamed_forward<config, line_before, line_behind>(a);\n"
      "}\nONEPASS_END\n";
  return text;
}

void launch(const streamed_call& call, int device, void* stream) {
  const device_facts& chip = facts(device);
  const streamed_plan p = choose(call, chip);
  static known_kernels known;
  const request &before = call.before, &behind = call.behind;
  const kernel_key key(device, before.line, before.x, before.operand, p.before, behind.line, behind.x, behind.operand,
                       p.behind, p.row_tiles, p.steps, p.ahead, p.pitch);
  const kernel& built = known.find_or_build(key, [&]() -> const kernel& {
    return load(source(call, p), kKernelName, device, stream, chip.arch_name + " streamed linear " + behind.line);
  });
  std::string packed;
  append_value(packed, call.matrix), append_value(packed, call.matrix_stride), append_value(packed, call.depth);
  const request both = widest(behind, before);
  append_packed(packed, both, call.a_behind), append_packed(packed, both, call.a_before);
  launch(built, {p.grid, 1}, {kThreads, 1}, p.shared_bytes, chip.arch >= 90, stream, packed.data());
}

}  // namespace onepass::cuda
