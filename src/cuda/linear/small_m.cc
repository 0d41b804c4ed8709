// `linear` with few rows in one kernel (onepass/kernel/linear/small_m.cuda.h): when it serves, and its launch.
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
constexpr int kThreads = 512, kTileColumns = 16, kWarpK = 64, kStepK = kThreads / 32 * kWarpK, kRowTile = 8,
              kSumBytes = 2 * kThreads / 32 * kRowTile * 20 * 4;
constexpr int kReserved = 2048;  // shared memory of the row reductions

int threads_of_row(int64 k) {
  const int64 wanted = ceil_div(k, kSmallMTuning.elements);
  return std::clamp(static_cast<int>(std::bit_ceil(static_cast<std::uint64_t>(wanted))), 32, kThreads);
}
int row_tiles_of(int64 rows) { return static_cast<int>(ceil_div(rows, kRowTile)); }
constexpr int kStepBytes = kThreads * 64;  // of the matrix, in shared memory

}  // namespace

small_m_rows take_rows(int64 rows, int64 k, const device_facts& chip) {
  const int threads = threads_of_row(k);
  const int64 taken = rows * pitch_of(k) + row_tiles_of(rows) * kSumBytes + kReserved;
  const int64 room = (chip.shared_per_block - taken) / kStepBytes;
  return {.at_once = kThreads / threads,
          .elements = static_cast<int>(ceil_div(k, threads)),
          .steps_ahead = static_cast<int>(std::min<int64>({room, kSmallMTuning.ahead, ceil_div(k, kStepK)}))};
}

std::string why_not_small_m(int64 rows, int64 k, const device_facts& chip) {
  if (rows > kSmallMTuning.rows) return "it is for at most " + std::to_string(kSmallMTuning.rows) + " rows";
  const small_m_rows way = take_rows(rows, k, chip);
  if (way.elements > kSmallMTuning.elements || way.steps_ahead < 1) return "the rows do not fit in shared memory";
  return "";
}

small_m_plan plan_small_m(const warp_linear_call& call, const device_facts& chip) {
  small_m_plan p{};
  const int64 rows = call.a_behind.rows;
  p.threads = kThreads;
  describe_rows(call, threads_of_row(call.k), p);
  p.behind.across = kTileColumns / kTileLanes;
  p.behind.down = 32 / p.behind.across;
  p.row_tiles = row_tiles_of(rows);
  p.ahead = take_rows(rows, call.k, chip).steps_ahead;
  p.steps = static_cast<int>(ceil_div(ceil_div(call.k, kStepK), p.ahead) * p.ahead);
  p.pitch = pitch_of(call.k);
  p.shared_bytes = static_cast<unsigned>(p.ahead * kStepBytes + rows * p.pitch);
  p.grid = static_cast<unsigned>(std::min<int64>(ceil_div(call.a_behind.columns, kTileColumns), chip.sm_count));
  return p;
}

std::string source(const warp_linear_call& call, const small_m_plan& p) {
  const std::string in_both = number_field("kStepsAhead", p.ahead) + number_field("kPitch", p.pitch);
  return source(call, p, "small_m", "small_m_forward",
                number_field("kAtOnce", 1) + number_field("kAllExist", 1) + in_both,
                number_field("kRowTiles", p.row_tiles) + number_field("kSteps", p.steps) + in_both);
}

void launch_small_m(const warp_linear_call& call, int device, void* stream) {
  const small_m_plan p = plan_small_m(call, facts(device));
  launch(
      call, p, "small_m", {p.row_tiles, p.steps, p.ahead, p.pitch}, [&] { return source(call, p); }, device, stream);
}

}  // namespace onepass::cuda
