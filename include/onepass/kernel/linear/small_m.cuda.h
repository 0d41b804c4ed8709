// Lines with `linear` of few rows in one kernel (sm_80 and later): the matrix is what crosses memory. Every block makes
// all rows of what `linear` takes, which stay in its shared memory, while the first part of the matrix is on its way.
// Then the matrix streams past them: 16 of its rows at a time, the result's columns, whose depth the block's warps
// share, and of which a warp takes the sums to the end of the line while the others go on.
//
// The matrix is the left factor, so that the 16 rows of the tensor cores are full however few rows x has. A thread has
// pieces of 16 bytes of a row of either as they lie in memory: which of the unit's 16 columns they make does not
// matter, as long as it is the same for both.
//
// Config:
//   kX             storage type throughout: bf16 or f16
//   kRowTiles      of 8 rows of x
//   kSteps         of the warps' depth, kStepDepth each: a multiple of
//   kStepsAhead    which are brought ahead
//   kPitch         bytes from a row in shared memory to the next: 64 more than a multiple of 128
//   before, behind what kernel/common/cursor.cuda.h asks for; before: kStepsAhead and kPitch too, and kAtOnce, rows
//   that a thread
//                  makes at a time
#pragma once

#include "onepass/lane/device/warp_matrix.cuda.h"
#include "onepass/kernel/linear/prologue.cuda.h"

ONEPASS_BEGIN

inline constexpr int kStreamedThreads = 512, kStreamedWarps = kStreamedThreads / 32, kStreamedColumns = 16,
                     kWarpDepth = 64, kStepDepth = kStreamedWarps * kWarpDepth;

// Of the matrix what is on its way, behind it the rows.
extern __shared__ __align__(16) char streamed_memory[];
template <class Config>
ONEPASS_FUNCTION char* resident_row(int row) {
  return streamed_memory + Config::kStepsAhead * (4 * kStreamedThreads * 16) + row * Config::kPitch;
}

// Where a row's results stay in shared memory. What else is written, the first block writes.
template <class Config, class Line>
class resident_place : public cursor<Config, Line> {
 public:
  using base = cursor<Config, Line>;
  using base::base;
  using typename base::index;
  using typename base::vector;

  static ONEPASS_FUNCTION bool is_first() { return blockIdx.x == 0; }
  ONEPASS_FUNCTION void set_row(index row, bool exists) {
    base::set_row(row, exists);
    row_ = resident_row<Config>(static_cast<int>(row));
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

// The matrix's rows of a tile as a warp reads them: it brings, of 16 rows, 128 bytes each, and reads them in the unit's
// order.
template <class Config>
class streamed_matrix {
 public:
  // Of two rows, 8 apart, two pieces of 16 bytes each.
  struct pieces {
    uint4 of[2][2];
  };

  explicit ONEPASS_FUNCTION streamed_matrix(const warp_linear_arguments& a)
      : a_(a),
        lane_id_(static_cast<int>(threadIdx.x) % 32),
        own_(static_cast<int>(threadIdx.x) / 32 * kWarpDepth),
        columns_(static_cast<int>(a.behind.columns)) {}

  ONEPASS_FUNCTION int tiles() const { return (columns_ + kStreamedColumns - 1) / kStreamedColumns; }

  // A step of a tile, into a slot of kStepsAhead. One group of copies, be there such a tile or not.
  ONEPASS_FUNCTION void load_async(int tile, int step, int slot) const {
    if (tile < tiles()) {
      const int piece = lane_id_ % 8, at = step * kStepDepth + own_ + piece * 8;
      const bool present = at < a_.depth;
      const auto* from = static_cast<const uint16*>(a_.matrix) + (present ? at : 0);
#pragma unroll
      for (int top = 0; top < kStreamedColumns; top += 4) {
        const int row = top + lane_id_ / 8, of = tile * kStreamedColumns + row;
        copy_or_clear(cursor_type(slot, row, piece), from + (of < columns_ ? of : columns_ - 1) * a_.stride, present);
      }
    }
    close_copy_group();
  }
  // What was brought kStepsAhead groups ago.
  ONEPASS_FUNCTION pieces take(int slot) const {
    wait_for_copy_groups<Config::kStepsAhead - 1>();
    __syncwarp();
    pieces p;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        p.of[r][half] =
            *reinterpret_cast<const uint4*>(cursor_type(slot, lane_id_ / 4 + 8 * r, half * 4 + lane_id_ % 4));
    }
    __syncwarp();  // before others load_async what comes next
    return p;
  }
  // The products of a step with the rows in shared memory.
  ONEPASS_FUNCTION void multiply(float (&d)[Config::kRowTiles][4], const pieces& p, int step) const {
    if (step * kStepDepth + own_ >= a_.depth) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 &above = p.of[0][half], &below = p.of[1][half];
#pragma unroll
      for (int n = 0; n < Config::kRowTiles; ++n) {
        const int row = n * 8 + lane_id_ / 4, last = static_cast<int>(a_.behind.rows) - 1;
        const uint4 x = *reinterpret_cast<const uint4*>(resident_row<Config>(row < last ? row : last) +
                                                        (step * kStepDepth + own_ + half * 32 + lane_id_ % 4 * 8) * 2);
        add_mma<Config::kX>(d[n], above.x, below.x, above.y, below.y, x.x, x.y);
        add_mma<Config::kX>(d[n], above.z, below.z, above.w, below.w, x.z, x.w);
      }
    }
  }

 private:
  // Neighbouring rows are read at a time: they differ in their banks.
  static ONEPASS_FUNCTION char* cursor_type(int slot, int row, int piece) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    return streamed_memory +
           (((slot * kStreamedWarps + warp) * kStreamedColumns + row) * 8 + (piece ^ (row & 1) * 4)) * 16;
  }
  const warp_linear_arguments& a_;
  const int lane_id_, own_, columns_;
};

// What the warps have of a tile's sums: [warp][row of x][column], rows 20 numbers apart, so that neither who stores nor
// who loads meets others in a bank.
template <class Config>
struct tile_sums {
  static constexpr int kRowNumbers = 20;
  float of[kStreamedWarps][8 * Config::kRowTiles][kRowNumbers];

  ONEPASS_FUNCTION void store(const float (&d)[Config::kRowTiles][4]) {
    const int lane_id = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int n = 0; n < Config::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) of[warp][n * 8 + lane_id % 4 * 2 + i % 2][lane_id / 4 + i / 2 * 8] = d[n][i];
    }
  }
  // Eight columns of a row, of all warps.
  ONEPASS_FUNCTION pack<float, 8> sum(int row, int column) const {
    pack<float, 8> total(0.0f);
#pragma unroll
    for (int warp = 0; warp < kStreamedWarps; ++warp) {
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(&of[warp][row][column + i]);
        total.v[i] += four.x, total.v[i + 1] += four.y, total.v[i + 2] += four.z, total.v[i + 3] += four.w;
      }
    }
    return total;
  }
};

// A warp takes a tile to the end of the line.
template <class Config, class Line, class Sums>
ONEPASS_FUNCTION void finish_tile(const arguments& a, const Sums& sums, int tile) {
  using index = typename Config::index;
  constexpr int kPieces = kStreamedColumns / 8;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < static_cast<int>(a.rows) * kPieces; i += 32) {
    const int row = i / kPieces, column = i % kPieces * 8;
    cursor<Config, Line> at(a);
    at.set_row(static_cast<index>(row), true);
    at.set_column(static_cast<index>(tile * kStreamedColumns + column),
                  count_at<8>(static_cast<index>(tile * kStreamedColumns + column), a.columns));
    at.store_y(Line::pre::forward(at.rounded(sums.sum(row, column)), at));
  }
}

template <class Config, class Before, class Behind>
ONEPASS_FUNCTION void streamed_forward(const warp_linear_arguments& a) {
  using before = typename Config::before;
  __shared__ typename row_threads<before>::slots slots;
  __shared__ tile_sums<Config> sums[2];
  const streamed_matrix<Config> matrix(a);
  const int first = static_cast<int>(blockIdx.x), stride = static_cast<int>(gridDim.x);
  wait_for_kernel_before();
#pragma unroll
  for (int i = 0; i < Config::kStepsAhead; ++i) matrix.load_async(first, i, i);
  input_rows<before, Before, resident_place<before, Before>> rows(a.before, slots);
  constexpr int kRows = decltype(rows)::kRows;
  for (int64 row = 0; row < a.before.rows; row += kRows) {
    if (row + static_cast<int>(threadIdx.x) / before::kAcross < a.before.rows) rows.make(row, row + kRows);
  }
  if constexpr (!before::kExact) {  // what the products read behind the rows' ends
    const int row = static_cast<int>(threadIdx.x) / 8, at = static_cast<int>(a.depth + threadIdx.x % 8 * 8) * 2;
    if (row < static_cast<int>(a.before.rows) && at < Config::kPitch - 64)
      *reinterpret_cast<uint4*>(resident_row<Config>(row) + at) = uint4{};
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
    __syncthreads();  // who stores the sums of the turn after the next has passed the next one's
    if (warp == turn % kStreamedWarps) finish_tile<typename Config::behind, Behind>(a.behind, sums[turn % 2], tile);
  }
}

ONEPASS_END
