// Backward of lines with `scores`, softmax and `values` in kernels of warp-level mma (sm_80 and later). Like
// kernel/attention/backward_sm90.cuda.h it has two kernels that write nothing of the scores' size. A block of the first
// has 64 rows of queries and loops over keys and values; a block of the second has 64 keys and values and loops over
// rows of queries and of grad_output. Each recomputes the scores, 16 rows a warp. In the second, dS and P go through
// shared memory, where they are read transposed. No sum depends on the order of blocks. (Dao, "FlashAttention-2",
// 2023.)
//
// The first kernel stores delta = Σ output · grad_output of each row and softmax's statistics for the second.
//
// Config:
//   kX, kThreads           storage type throughout; attention_backward_sm80_shape::kThreads
//   kChunks, kValueChunks  head_dim and the values' head_dim in chunks of 8, rounded up
//   kCausal                tiles that are all masked are skipped
//   kWantsQueries, kWantsKeys, kWantsValues   which gradients are wanted
//   behind                 forward's, with the tensors whose gradients are wanted
#pragma once

#include "onepass/kernel/attention/matrices.cuda.h"
#include "onepass/kernel/attention/row_softmax.cuda.h"
#include "onepass/kernel/row/statistics.cuda.h"
#include "onepass/kernel/common/warp_mma.cuda.h"

ONEPASS_BEGIN

inline constexpr int kWarpRows = attention_backward_sm80_shape::kWarpRows,
                     kTileRows = attention_backward_sm80_shape::kTileRows;

ONEPASS_FUNCTION uint16* key_of_batch(const strided_matrices& of, const attention_backward_sm80_arguments& a,
                                      int64 batch, int64 key) {
  return row_of_batch(of, batch, a.inner, key, a.behind.columns);
}
ONEPASS_FUNCTION int at_most(int64 left, int most) { return left < most ? static_cast<int>(left) : most; }

// A tile of either side: keys with values, or rows of queries with grad_output.
template <class Config>
struct operand_tile {
  using first = swizzled_tile<Config::kChunks>;
  using second = swizzled_tile<Config::kValueChunks>;
  static constexpr attention_backward_sm80_shape kShape{Config::kChunks, Config::kValueChunks};
  static constexpr int kFirstBytes = kShape.first_bytes(), kBytes = kShape.tile_bytes();

  static ONEPASS_FUNCTION void load_async(char* to, const uint16* of_first, int64 stride, const uint16* of_second,
                                          int64 second_stride, const attention_backward_sm80_arguments& a, int count) {
    first::template load_async<Config::kThreads>(to, of_first, stride, a.head_dim, count, kTileRows);
    second::template load_async<Config::kThreads>(to + kFirstBytes, of_second, second_stride, a.value_head_dim, count,
                                                  kTileRows);
    close_copy_group();
  }
};

extern __shared__ __align__(16) char backward_tiles[];

// A warp's 16 rows: queries and grad_output in registers, and the words' cursors. Quiet: tensors get no gradients.
template <class Config, class Behind, bool Quiet>
class backward_rows {
 public:
  using behind = typename Config::behind;
  using index = typename behind::index;
  using L = pack<float, 8>;
  using memory_of = memory<Config::kX, 8, 8>;
  using tile = operand_tile<Config>;
  warp_rows<Config::kX, Config::kChunks> queries;
  warp_rows<Config::kX, Config::kValueChunks> gradients;
  softmax_statistics statistics[2];

  explicit ONEPASS_FUNCTION backward_rows(const attention_backward_sm80_arguments& a)
      : a_(a), at_{cursor<behind, Behind, Quiet>(a.behind), cursor<behind, Behind, Quiet>(a.behind)} {}
  // This thread's row i; the warp's rows begin at `first`.
  static ONEPASS_FUNCTION int64 row(int64 first, int i) {
    return first + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * i;
  }
  ONEPASS_FUNCTION void set_rows(int64 first, int64 end) {
#pragma unroll
    for (int i = 0; i < 2; ++i) at_[i].set_row(static_cast<index>(row(first, i)), row(first, i) < end);
  }

  // Calls take(i, dS, P) with eight of row i, of the 32 keys from `key_offset` on in a tile that begins at key `first`.
  // P is the left factor of the values.
  template <class Take>
  ONEPASS_FUNCTION void make(const char* keys, int64 first, int key_offset, const Take& take) {
    const auto column = static_cast<index>(first + key_offset + static_cast<int>(threadIdx.x) % 4 * 8);
    const int count = behind::kExact ? 8 : count_at<8>(column, a_.behind.columns);
    float scores[1][4][4] = {}, of_probabilities[1][4][4] = {};
    queries.multiply(scores, keys, key_offset);
    gradients.multiply(of_probabilities, keys + tile::kFirstBytes, key_offset);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      at_[i].set_column(column, count);
      L score = queries.product(scores, i), gradient = gradients.product(of_probabilities, i);
      softmax_backward<Behind>(score, gradient, statistics[i], at_[i]);
      if constexpr (!behind::kExact) {
        score = where(first_n<L>(count), score, L(0.0f));
        gradient = where(first_n<L>(count), gradient, L(0.0f));
      }
      take(i, memory_of::whole(memory_of::buffer_of(score)), memory_of::whole(memory_of::buffer_of(gradient)));
    }
  }

 private:
  const attention_backward_sm80_arguments& a_;
  cursor<behind, Behind, Quiet> at_[2];
};

template <class Config, class Behind>
ONEPASS_FUNCTION void attention_backward_queries_sm80(const attention_backward_sm80_arguments& a) {
  using rows_of = backward_rows<Config, Behind, false>;
  using tile = operand_tile<Config>;
  const int64 batch = blockIdx.x / a.blocks_of_batch, end = (batch + 1) * a.rows_of_batch,
              in_batch = blockIdx.x % a.blocks_of_batch * kTileRows,
              first = batch * a.rows_of_batch + in_batch + static_cast<int>(threadIdx.x) / 32 * kWarpRows;
  const uint16 *keys = key_of_batch(a.keys, a, batch, 0), *values = key_of_batch(a.values, a, batch, 0);
  const auto own_row_of = [&](const strided_matrices& of, int64 row) {
    return row_of_batch(of, batch, a.inner, row - batch * a.rows_of_batch, a.behind.matrix_rows);
  };
  int tiles = static_cast<int>((a.behind.columns + kTileRows - 1) / kTileRows);
  if constexpr (Config::kCausal) {
    const int64 last = in_batch + kTileRows;
    if (a.behind.matrix_rows == a.rows_of_batch && last < a.behind.columns)
      tiles = static_cast<int>((last + kTileRows - 1) / kTileRows);
  }
  wait_for_kernel_before();
  const auto load_async = [&](int t) {
    if (t < tiles)
      tile::load_async(backward_tiles + t % 2 * tile::kBytes, keys + int64{t} * kTileRows * a.keys.row_stride,
                       a.keys.row_stride, values + int64{t} * kTileRows * a.values.row_stride, a.values.row_stride, a,
                       at_most(a.behind.columns - int64{t} * kTileRows, kTileRows));
    else close_copy_group();
  };
  load_async(0);
  rows_of rows(a);
  rows.set_rows(first, end);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64 row = rows.row(first, i);
    if (row >= end) continue;
    rows.queries.load(i, static_cast<const uint16*>(a.queries) + row * a.head_dim, a.head_dim);
    const uint16* gradient = static_cast<const uint16*>(a.grad_output) + row * a.value_head_dim;
    rows.gradients.load(i, gradient, a.value_head_dim);
    const uint16* output = own_row_of(a.output, row);
    rows.statistics[i] = statistics_of(saved_of<Behind, float>(a.behind, row), 0.0f);
    rows.statistics[i].delta = rows.gradients.product_with(i, output, a.value_head_dim);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows.statistics[i].delta = sum_of_four(rows.statistics[i].delta);
    if (rows.row(first, i) < end && threadIdx.x % 4 == 0) a.statistics[rows.row(first, i)] = rows.statistics[i];
  }
  warp_sums<Config::kX, Config::kChunks> sums;
  for (int t = 0; t < tiles; ++t) {
    load_async(t + 1);
    wait_for_copy_groups<1>();
    __syncthreads();
    const char* here = backward_tiles + t % 2 * tile::kBytes;
#pragma unroll 1
    for (int key_offset = 0; key_offset < kTileRows; key_offset += kResultColumns) {
      uint4 scores[2];
      rows.make(here, int64{t} * kTileRows, key_offset, [&](int i, uint4 score, uint4) { scores[i] = score; });
      if constexpr (Config::kWantsQueries) sums.add_of_rows(scores, here, key_offset);
    }
    __syncthreads();
  }
  if constexpr (Config::kWantsQueries) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (rows.row(first, i) < end) sums.store(i, own_row_of(a.grad_queries, rows.row(first, i)), a.head_dim);
  }
}

template <class Config, class Behind>
ONEPASS_FUNCTION void attention_backward_keys_sm80(const attention_backward_sm80_arguments& a) {
  using rows_of = backward_rows<Config, Behind, true>;
  using tile = operand_tile<Config>;
  using scores_tile = swizzled_tile<kTileRows / 8>;
  constexpr int kScoreBytes = attention_backward_sm80_shape::score_bytes();
  char *const own = backward_tiles, *const ring = own + tile::kBytes, *const scores = ring + 2 * tile::kBytes,
              *const weights = scores + kScoreBytes;
  const int lane_id = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64 batch = blockIdx.x / a.blocks_of_batch, begin = batch * a.rows_of_batch, end = begin + a.rows_of_batch,
              key = blockIdx.x % a.blocks_of_batch * kTileRows;
  const int tiles = static_cast<int>((a.rows_of_batch + kTileRows - 1) / kTileRows);
  int from = 0;
  if constexpr (Config::kCausal) {
    if (a.behind.matrix_rows == a.rows_of_batch) from = at_most(key / kTileRows, tiles);
  }
  tile::load_async(own, key_of_batch(a.keys, a, batch, key), a.keys.row_stride, key_of_batch(a.values, a, batch, key),
                   a.values.row_stride, a, at_most(a.behind.columns - key, kTileRows));
  const auto load_async = [&](int t) {
    const int64 row = begin + int64{t} * kTileRows;
    if (t < tiles)
      tile::load_async(ring + t % 2 * tile::kBytes, static_cast<const uint16*>(a.queries) + row * a.head_dim,
                       a.head_dim, static_cast<const uint16*>(a.grad_output) + row * a.value_head_dim, a.value_head_dim,
                       a, at_most(end - row, kTileRows));
    else close_copy_group();
  };
  load_async(from);
  wait_for_kernel_before();
  rows_of rows(a);
  warp_sums<Config::kX, Config::kChunks> of_keys;
  warp_sums<Config::kX, Config::kValueChunks> of_values;
  for (int t = from; t < tiles; ++t) {
    load_async(t + 1);
    wait_for_copy_groups<1>();
    __syncthreads();
    const char* here = ring + t % 2 * tile::kBytes;
    const int64 first = begin + int64{t} * kTileRows + warp * kWarpRows;
    rows.set_rows(first, end);
    rows.queries.take(here, warp * kWarpRows), rows.gradients.take(here + tile::kFirstBytes, warp * kWarpRows);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      rows.statistics[i] =
          rows.row(first, i) < end ? load_statistics(a.statistics + rows.row(first, i)) : softmax_statistics{};
#pragma unroll 1
    for (int key_offset = 0; key_offset < kTileRows; key_offset += kResultColumns) {
      rows.make(own, key, key_offset, [&](int i, uint4 score, uint4 weight) {
        const int at = scores_tile::offset(warp * kWarpRows + lane_id / 4 + 8 * i, key_offset / 8 + lane_id % 4);
        *reinterpret_cast<uint4*>(scores + at) = score, *reinterpret_cast<uint4*>(weights + at) = weight;
      });
    }
    __syncthreads();
#pragma unroll
    for (int row = 0; row < kTileRows; row += kResultColumns) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32 left[1][4];
        if constexpr (Config::kWantsKeys) {
          scores_tile::load_columns(scores, row, step, 2 * warp, left[0]);
          of_keys.add(left, here, row, step);
        }
        if constexpr (Config::kWantsValues) {
          scores_tile::load_columns(weights, row, step, 2 * warp, left[0]);
          of_values.add(left, here + tile::kFirstBytes, row, step);
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64 own_key = key + warp * kWarpRows + lane_id / 4 + 8 * i;
    if (own_key >= a.behind.columns) continue;
    if constexpr (Config::kWantsKeys) of_keys.store(i, key_of_batch(a.grad_keys, a, batch, own_key), a.head_dim);
    if constexpr (Config::kWantsValues)
      of_values.store(i, key_of_batch(a.grad_values, a, batch, own_key), a.value_head_dim);
  }
}

ONEPASS_END
