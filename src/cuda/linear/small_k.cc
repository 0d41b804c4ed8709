// `linear` with few in_features in one kernel (onepass/kernel/linear/small_k.cuda.h): when it serves, and its launch.
#include "src/cuda/linear/small_k.h"

#include <algorithm>

#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/runtime/source.h"
#include "src/cuda/linear/tuning.h"

namespace onepass::cuda {
namespace {

constexpr int kThreadsOfRow = 4, kResultColumns = 32;  // as in kernel/linear/small_k.cuda.h
constexpr int kAtOnce = 2;                             // rows of a thread
constexpr int kSpareVectors = 4;  // padding of a row: rows that are read at a time differ in their banks
constexpr int kReserved = 1024;   // shared memory of the row reductions

int64 matrix_bytes(int64 k, int64 columns) { return ceil_div(columns, kResultColumns) * kResultColumns * pitch_of(k); }

}  // namespace

std::string why_not_small_k(int64 k, int64 columns, const device_facts& chip) {
  const small_k_tuning& t = kSmallKTuning;
  if (k > t.k) return "it is for rows of at most " + std::to_string(t.k) + " elements";
  if (matrix_bytes(k, columns) > chip.shared_per_block - kReserved) return "the matrix does not fit in shared memory";
  return "";
}

small_k_plan plan_small_k(const warp_linear_call& call, const device_facts& chip) {
  const small_k_tuning& t = kSmallKTuning;
  small_k_plan p{};
  const int64 rows = call.a_behind.rows;
  const auto rows_of_block = [&] { return int64{p.threads} / kThreadsOfRow * kAtOnce; };
  const bool single = call.a_before.x.column_stride == 0, keeps_stored = call.before.begins_with_row && !single;
  p.threads = keeps_stored ? t.threads : t.threads_computing;
  if (ceil_div(rows, rows_of_block()) < chip.sm_count) p.threads = t.few_threads;
  describe_rows(call, kThreadsOfRow, p);
  p.behind.across = kThreadsOfRow;
  p.behind.down = p.before.down;
  p.behind.exact = call.a_behind.columns % kResultColumns == 0;
  p.pitch = pitch_of(call.k);
  const int64 matrix = matrix_bytes(call.k, call.a_behind.columns);
  const int64 copies = rows_of_block() * (kThreadsOfRow * p.before.held_vectors + kSpareVectors) * kTileLanes * 2;
  p.before.stages = !single && matrix + copies + kReserved <= chip.shared_per_block;
  p.before.streams = static_cast<uint64>(p.before.stages);  // x
  p.before.recomputes = keeps_stored;
  p.before.spare_vectors = p.before.stages * kSpareVectors;
  p.shared_bytes = static_cast<unsigned>(matrix + p.before.stages * copies);
  p.grid = static_cast<unsigned>(std::min<int64>(ceil_div(rows, rows_of_block()), chip.sm_count));
  return p;
}

std::string source(const warp_linear_call& call, const small_k_plan& p) {
  return source(call, p, "small_k", "small_k_forward", number_field("kAtOnce", kAtOnce) + number_field("kAllExist", 0),
                number_field("kPitch", p.pitch) + number_field("kThreads", static_cast<int>(p.threads)));
}

void launch_small_k(const warp_linear_call& call, int device, void* stream) {
  const small_k_plan p = plan_small_k(call, facts(device));
  launch(
      call, p, "small_k", {static_cast<int>(p.threads)}, [&] { return source(call, p); }, device, stream);
}

}  // namespace onepass::cuda
