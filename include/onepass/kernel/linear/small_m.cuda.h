// `linear` with few rows in one kernel (sm_80 and later): memory traffic is the matrix. Every block runs the prologue
// for all rows and keeps them in shared memory, while its first tiles of the matrix are prefetched. A tile is 16 rows
// of the matrix, which are 16 columns of the result. The block's warps split K and load the tile with asynchronous
// copies; one warp adds up their partial sums and runs the epilogue while the others go on with the next tile.
//
// The matrix is the left factor (A) of mma, whose 16 rows are then full however few rows x has. A thread loads pieces
// of 16 bytes of a row of either factor as they lie in memory. This permutes the 16 columns of an mma step, the same
// way in both factors, and so does not change the sum.
//
// Config:
//   kX             storage type throughout: bf16 or f16
//   kRowTiles      of 8 rows of x
//   kSteps         steps of kStepK elements of K: a multiple of kStepsAhead
//   kStepsAhead    steps that are prefetched
//   kPitch         bytes from a row in shared memory to the next: 64 more than a multiple of 128
//   before, behind prologue and epilogue: what kernel/common/cursor.cuda.h asks for; before: kStepsAhead and kPitch
//                  too, and kAtOnce, rows that a thread makes at a time
#pragma once

#include "onepass/lane/device/warp_matrix.cuda.h"
#include "onepass/kernel/linear/prologue.cuda.h"

ONEPASS_BEGIN

inline constexpr int kSmallMThreads = 512, kSmallMWarps = kSmallMThreads / 32, kSmallMColumns = 16, kWarpK = 64,
                     kStepK = kSmallMWarps * kWarpK;

// The prefetched steps of the matrix, then the rows.
extern __shared__ __align__(16) char small_m_memory[];
template <class Config>
ONEPASS_FUNCTION char* shared_row(int row) {
  return small_m_memory + Config::kStepsAhead * (4 * kSmallMThreads * 16) + row * Config::kPitch;
}

// The prologue's cursor: stores a row to shared memory. Only the first block writes kept values and statistics.
template <class Config, class Line>
class shared_row_cursor : public cursor<Config, Line> {
 public:
  using base = cursor<Config, Line>;
  using base::base;
  using typename base::index;
  using typename base::vector;

  static ONEPASS_FUNCTION bool is_first() { return blockIdx.x == 0; }
  ONEPASS_FUNCTION void set_row(index row, bool exists) {
    base::set_row(row, exists);
    row_ = shared_row<Config>(static_cast<int>(row));
  }
  ONEPASS_FUNCTION void set_column(index column, int count) {
    base::set_column(column, count);
    column_ = static_cast<int>(column);
  }
  ONEPASS_FUNCTION void store_y(vector v) const {
    using memory_of = memory<Config::kX, base::V, base::V>;
    *reinterpret_cast<uint4*>(row_ + column_ * size_of(Config::kX)) = memory_of::whole(memory_of::buffer_of(v));
  }
  template <int K>
  ONEPASS_FUNCTION vector keep(vector v) const {
    if (is_first()) base::template keep<K>(v);
    return base::rounded(v);
  }

 private:
  char* row_ = nullptr;
  int column_ = 0;
};

// A warp's part of the matrix: of each step 128 bytes of 16 rows, which it copies to shared memory and reads in the
// order of mma.
template <class Config>
class matrix_stream {
 public:
  // Two pieces of 16 bytes of each of two rows, 8 apart.
  struct pieces {
    uint4 of[2][2];
  };

  explicit ONEPASS_FUNCTION matrix_stream(const warp_linear_arguments& a)
      : a_(a),
        lane_id_(static_cast<int>(threadIdx.x) % 32),
        own_(static_cast<int>(threadIdx.x) / 32 * kWarpK),
        columns_(static_cast<int>(a.behind.columns)) {}

  ONEPASS_FUNCTION int tiles() const { return (columns_ + kSmallMColumns - 1) / kSmallMColumns; }

  // Copies a step of a tile to a slot of kStepsAhead: one group of copies, an empty one behind the last tile.
  ONEPASS_FUNCTION void load_async(int tile, int step, int slot) const {
    if (tile < tiles()) {
      const int piece = lane_id_ % 8, at = step * kStepK + own_ + piece * 8;
      const bool present = at < a_.k;
      const auto* from = static_cast<const uint16*>(a_.matrix) + (present ? at : 0);
#pragma unroll
      for (int top = 0; top < kSmallMColumns; top += 4) {
        const int row = top + lane_id_ / 8, of = tile * kSmallMColumns + row;
        copy_or_clear(piece_at(slot, row, piece), from + (of < columns_ ? of : columns_ - 1) * a_.stride, present);
      }
    }
    close_copy_group();
  }
  // The step that was copied kStepsAhead groups ago.
  ONEPASS_FUNCTION pieces take(int slot) const {
    wait_for_copy_groups<Config::kStepsAhead - 1>();
    __syncwarp();
    pieces p;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        p.of[r][half] = *reinterpret_cast<const uint4*>(piece_at(slot, lane_id_ / 4 + 8 * r, half * 4 + lane_id_ % 4));
    }
    __syncwarp();  // before other lanes copy the next step here
    return p;
  }
  // Multiplies a step with the rows in shared memory.
  ONEPASS_FUNCTION void multiply(float (&d)[Config::kRowTiles][4], const pieces& p, int step) const {
    if (step * kStepK + own_ >= a_.k) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 &above = p.of[0][half], &below = p.of[1][half];
#pragma unroll
      for (int n = 0; n < Config::kRowTiles; ++n) {
        const int row = n * 8 + lane_id_ / 4, last = static_cast<int>(a_.behind.rows) - 1;
        const uint4 x = *reinterpret_cast<const uint4*>(shared_row<Config>(row < last ? row : last) +
                                                        (step * kStepK + own_ + half * 32 + lane_id_ % 4 * 8) * 2);
        add_mma<Config::kX>(d[n], above.x, below.x, above.y, below.y, x.x, x.y);
        add_mma<Config::kX>(d[n], above.z, below.z, above.w, below.w, x.z, x.w);
      }
    }
  }

 private:
  // Neighbouring rows, which are read at a time, differ in their banks.
  static ONEPASS_FUNCTION char* piece_at(int slot, int row, int piece) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    return small_m_memory + (((slot * kSmallMWarps + warp) * kSmallMColumns + row) * 8 + (piece ^ (row & 1) * 4)) * 16;
  }
  const warp_linear_arguments& a_;
  const int lane_id_, own_, columns_;
};

// The warps' partial sums of a tile: [warp][row of x][column]. Rows are 20 elements apart, so that neither stores nor
// loads have bank conflicts.
template <class Config>
struct tile_sums {
  static constexpr int kRowElements = 20;
  float of[kSmallMWarps][8 * Config::kRowTiles][kRowElements];

  ONEPASS_FUNCTION void store(const float (&d)[Config::kRowTiles][4]) {
    const int lane_id = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int n = 0; n < Config::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) of[warp][n * 8 + lane_id % 4 * 2 + i % 2][lane_id / 4 + i / 2 * 8] = d[n][i];
    }
  }
  // The sum over all warps of eight columns of a row.
  ONEPASS_FUNCTION pack<float, 8> sum(int row, int column) const {
    pack<float, 8> total(0.0f);
#pragma unroll
    for (int warp = 0; warp < kSmallMWarps; ++warp) {
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(&of[warp][row][column + i]);
        total.v[i] += four.x, total.v[i + 1] += four.y, total.v[i + 2] += four.z, total.v[i + 3] += four.w;
      }
    }
    return total;
  }
};

// A warp's epilogue of a tile.
template <class Config, class Line, class Sums>
ONEPASS_FUNCTION void run_tile_epilogue(const arguments& a, const Sums& sums, int tile) {
  using index = typename Config::index;
  constexpr int kPieces = kSmallMColumns / 8;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < static_cast<int>(a.rows) * kPieces; i += 32) {
    const int row = i / kPieces, column = i % kPieces * 8;
    cursor<Config, Line> at(a);
    at.set_row(static_cast<index>(row), true);
    at.set_column(static_cast<index>(tile * kSmallMColumns + column),
                  count_at<8>(static_cast<index>(tile * kSmallMColumns + column), a.columns));
    at.store_y(Line::pre::forward(at.rounded(sums.sum(row, column)), at));
  }
}

template <class Config, class Before, class Behind>
ONEPASS_FUNCTION void small_m_forward(const warp_linear_arguments& a) {
  using before = typename Config::before;
  __shared__ typename row_threads<before>::slots slots;
  __shared__ tile_sums<Config> sums[2];
  const matrix_stream<Config> matrix(a);
  const int first = static_cast<int>(blockIdx.x), stride = static_cast<int>(gridDim.x);
  wait_for_kernel_before();
#pragma unroll
  for (int i = 0; i < Config::kStepsAhead; ++i) matrix.load_async(first, i, i);
  input_rows<before, Before, shared_row_cursor<before, Before>> rows(a.before, slots);
  constexpr int kRows = decltype(rows)::kRows;
  for (int64 row = 0; row < a.before.rows; row += kRows) {
    if (row + static_cast<int>(threadIdx.x) / before::kAcross < a.before.rows) rows.make(row, row + kRows);
  }
  if constexpr (!before::kExact) {  // mma reads zeros behind the rows' ends
    const int row = static_cast<int>(threadIdx.x) / 8, at = static_cast<int>(a.k + threadIdx.x % 8 * 8) * 2;
    if (row < static_cast<int>(a.before.rows) && at < Config::kPitch - 64)
      *reinterpret_cast<uint4*>(shared_row<Config>(row) + at) = uint4{};
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (int tile = first, turn = 0; tile < matrix.tiles(); tile += stride, ++turn) {
    float d[Config::kRowTiles][4] = {};
    for (int step = 0; step < Config::kSteps; step += Config::kStepsAhead) {
      const bool is_last = step + Config::kStepsAhead == Config::kSteps;
#pragma unroll
      for (int i = 0; i < Config::kStepsAhead; ++i) {
        const auto pieces = matrix.take(i);
        matrix.load_async(is_last ? tile + stride : tile, is_last ? i : step + Config::kStepsAhead + i, i);
        matrix.multiply(d, pieces, step + i);
      }
    }
    sums[turn % 2].store(d);
    __syncthreads();  // sums[turn % 2] is stored again two turns later, behind the next turn's barrier
    if (warp == turn % kSmallMWarps) run_tile_epilogue<typename Config::behind, Behind>(a.behind, sums[turn % 2], tile);
  }
}

ONEPASS_END
