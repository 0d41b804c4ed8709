// A line with `linear` of few rows in one kernel (onepass/kernel/linear/small_m.cuda.h): where it serves, and its
// launch.
#include "src/cuda/linear/small_m.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/runtime/source.h"
#include "src/cuda/linear/tuning.h"

namespace onepass::cuda {
namespace {

// As in kernel/linear/small_m.cuda.h.
constexpr int kThreads = 512, kTileColumns = 16, kWarpDepth = 64, kStepDepth = kThreads / 32 * kWarpDepth, kRowTile = 8,
              kSumBytes = 2 * kThreads / 32 * kRowTile * 20 * 4;
constexpr int kReserved = 2048;  // of shared memory, for a row's threads

int threads_of_row(int64 depth) {
  const int64 wanted = ceil_div(depth, kStreamedTuning.numbers);
  return std::clamp(static_cast<int>(std::bit_ceil(static_cast<std::uint64_t>(wanted))), 32, kThreads);
}
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

streamed_plan plan_streamed(const warp_linear_call& call, const device_facts& chip) {
  streamed_plan p{};
  const int64 rows = call.a_behind.rows;
  p.threads = kThreads;
  describe_rows(call, threads_of_row(call.depth), p);
  p.behind.across = kTileColumns / kTileLanes;
  p.behind.down = 32 / p.behind.across;
  p.row_tiles = row_tiles_of(rows);
  p.ahead = take_rows(rows, call.depth, chip).steps_ahead;
  p.steps = static_cast<int>(ceil_div(ceil_div(call.depth, kStepDepth), p.ahead) * p.ahead);
  p.pitch = pitch_of(call.depth);
  p.shared_bytes = static_cast<unsigned>(p.ahead * kStepBytes + rows * p.pitch);
  p.grid = static_cast<unsigned>(std::min<int64>(ceil_div(call.a_behind.columns, kTileColumns), chip.sm_count));
  return p;
}

std::string source(const warp_linear_call& call, const streamed_plan& p) {
  const std::string in_both = number_field("kStepsAhead", p.ahead) + number_field("kPitch", p.pitch);
  return source(call, p, "small_m", "streamed_forward",
                number_field("kAtOnce", 1) + number_field("kAllExist", 1) + in_both,
                number_field("kRowTiles", p.row_tiles) + number_field("kSteps", p.steps) + in_both);
}

void launch_streamed(const warp_linear_call& call, int device, void* stream) {
  const streamed_plan p = plan_streamed(call, facts(device));
  launch(
      call, p, "small_m", {p.row_tiles, p.steps, p.ahead, p.pitch}, [&] { return source(call, p); }, device, stream);
}

}  // namespace onepass::cuda
