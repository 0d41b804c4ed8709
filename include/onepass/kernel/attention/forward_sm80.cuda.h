// Forward of lines with `scores` and softmax in kernels of warp-level mma (sm_80 and later).
//
// probabilities_forward_sm80, without `values`: queries and keys are read, and the probabilities are stored. A warp
// keeps its rows of queries in registers. All warps of a block share tiles of keys and read them twice: once for the
// rows' statistics, once for the result, with the same GEMM.
//
// attention_forward_sm80, with `values`, is flash attention: keys and values are read once, and nothing of the scores'
// size leaves the chip. (Dao et al., "FlashAttention", 2022.) A thread's scores are eight neighbours of a row
// (kernel/common/warp_mma.cuda.h). In pairs they are a left factor of the mma. Its columns may be any keys, as long as
// the rows of values are the same ones.
//
// Config (see kernel/common/warp_mma.cuda.h):
//   kTile, kStages  keys of a tile, a multiple of 32; tiles in shared memory
//   before          configuration of the queries (kernel/common/cursor.cuda.h)
//   behind          configuration of the scores
//   kValueChunks    with values: their head_dim in chunks of 8, rounded up
//   kCausal         with values: row i needs no keys > i
#pragma once

#include "onepass/kernel/attention/matrices.cuda.h"
#include "onepass/kernel/common/online_softmax.cuda.h"
#include "onepass/kernel/common/warp_mma.cuda.h"
#include "onepass/kernel/linear/prologue.cuda.h"

ONEPASS_BEGIN

extern __shared__ __align__(16) char forward_tiles[];

// Iterates `times` times over the first `count` tiles of a batch's keys. `more` loads what a tile has besides its keys:
// more(to, key, count), of kMoreBytes.
struct no_values {
  static constexpr int kMoreBytes = 0;
  ONEPASS_FUNCTION void operator()(char*, int64, int) const {}
};
template <class Config, class More = no_values>
class key_tiles {
 public:
  static constexpr int kKeyBytes = Config::kTile * Config::kPitch, kBytes = kKeyBytes + More::kMoreBytes;

  ONEPASS_FUNCTION key_tiles(const probabilities_sm80_arguments& a, int64 batch, int count, int times, More more = {})
      : a_(a),
        keys_(static_cast<const uint16*>(a.keys) + batch / a.inner * a.outer_stride + batch % a.inner * a.inner_stride),
        more_(more),
        count_(count),
        left_(times * count) {
#pragma unroll
    for (int i = 0; i < Config::kStages - 1; ++i) load_async();
  }
  static ONEPASS_FUNCTION int all(const probabilities_sm80_arguments& a) {
    return static_cast<int>((a.behind.columns + Config::kTile - 1) / Config::kTile);
  }
  ONEPASS_FUNCTION int count() const { return count_; }

  // Waits for the next tile, and until all threads have read the previous one.
  ONEPASS_FUNCTION const char* next() {
    wait_for_copy_groups<Config::kStages - 2>();
    __syncthreads();
    load_async();
    const char* tile = forward_tiles + at_ * kBytes;
    at_ = at_ + 1 < Config::kStages ? at_ + 1 : 0;
    return tile;
  }

 private:
  ONEPASS_FUNCTION void load_async() {
    if (left_ > 0) {
      const int64 first = int64{tile_} * Config::kTile, behind = a_.behind.columns - first;
      const int rows = behind < Config::kTile ? static_cast<int>(behind) : Config::kTile;
      more_(forward_tiles + to_ * kBytes + kKeyBytes, first, rows);
      load_matrix_async<Config>(forward_tiles + to_ * kBytes, keys_ + first * a_.stride, a_.stride, a_.head_dim, rows);
      --left_;
      tile_ = tile_ + 1 < count_ ? tile_ + 1 : 0;
      to_ = to_ + 1 < Config::kStages ? to_ + 1 : 0;
    } else {
      close_copy_group();
    }
  }
  const probabilities_sm80_arguments& a_;
  const uint16* const keys_;
  const More more_;
  const int count_;
  int left_, tile_ = 0, to_ = 0, at_ = 0;
};

// One cursor for each of a thread's rows.
template <class Cursor, int N>
struct cursors;
template <class Cursor>
struct cursors<Cursor, 2> {
  Cursor of[2];
  explicit ONEPASS_FUNCTION cursors(const arguments& a) : of{Cursor(a), Cursor(a)} {}
};
template <class Cursor>
struct cursors<Cursor, 4> {
  Cursor of[4];
  explicit ONEPASS_FUNCTION cursors(const arguments& a) : of{Cursor(a), Cursor(a), Cursor(a), Cursor(a)} {}
};

template <class Config, class Behind>
ONEPASS_FUNCTION void probabilities_forward_sm80(const probabilities_sm80_arguments& a) {
  using before = typename Config::before;
  using behind = typename Config::behind;
  using index = typename behind::index;
  using L = pack<float, 8>;
  using rows = rows_in_registers<Config>;
  static_assert(same_type<typename Behind::row, word::softmax>);
  __shared__ typename row_threads<before>::slots slots;
  const int across = static_cast<int>(threadIdx.x) % kThreadsOfRow;
  const int64 batch = blockIdx.x / a.blocks_of_batch, end = (batch + 1) * a.rows_of_batch;
  input_rows<before, line<chain<>>> input(a.before, slots);
  const int64 first = batch * a.rows_of_batch + blockIdx.x % a.blocks_of_batch * input.kRows;
  wait_for_kernel_before();
  key_tiles<Config> tiles(a, batch, key_tiles<Config>::all(a), 2);
  rows queries{};
  input.make(first, a.before.rows, [&](auto&, int i, int k, L v) { queries.set(i, k, v); });

  cursors<cursor<behind, Behind>, rows::kRows> at(a.behind);
#pragma unroll
  for (int i = 0; i < rows::kRows; ++i) {
    const int64 row = first + i * before::kDown + static_cast<int>(threadIdx.x) / kThreadsOfRow;
    at.of[i].set_row(static_cast<index>(row), row < end);
  }
  // Calls body(i, scores, count) for each row and vector of the next tile.
  const auto each_vector = [&](int64 tile, const auto& body) {
    const char* keys = tiles.next();
#pragma unroll 1
    for (int key_offset = 0; key_offset < Config::kTile; key_offset += kResultColumns) {
      const auto column = static_cast<index>(tile * Config::kTile + key_offset + across * 8);
      const int count = behind::kExact ? 8 : count_at<8>(column, a.behind.columns);
      float d[rows::kRows / 2][4][4] = {};
      queries.multiply(d, keys, key_offset);
#pragma unroll
      for (int i = 0; i < rows::kRows; ++i) {
        at.of[i].set_column(column, count);
        body(i, Behind::pre::forward(queries.product(d, i), at.of[i]), count);
      }
    }
  };
  online_softmax sums[rows::kRows];  // over this thread's scores
  for (int tile = 0; tile < tiles.count(); ++tile) {
    each_vector(tile, [&](int i, L scores, int count) {
      if constexpr (!behind::kExact) scores = where(first_n<L>(count), scores, L(-kInfinity));
      sums[i].add(scores, sums[i].raise(max_number(sums[i].largest, max_lanes(scores))));
    });
  }
  word::row_numbers<float> saved[rows::kRows];
#pragma unroll
  for (int i = 0; i < rows::kRows; ++i) {
    const auto of = merge_exponentials::in_warp(numbers<float, 2>{{sums[i].largest, sums[i].sum}}, kThreadsOfRow);
    saved[i] = statistics_of(of.v[0], of.v[1]);
    const int64 row = first + i * before::kDown + static_cast<int>(threadIdx.x) / kThreadsOfRow;
    if (behind::kSavesStatistics && row < end && across == 0) save<Behind>(a.behind, row, saved[i]);
  }
  for (int tile = 0; tile < tiles.count(); ++tile) {
    each_vector(tile, [&](int i, L scores, int) {
      at.of[i].store_y(Behind::post::forward(word::softmax::recompute(scores, saved[i]), at.of[i]));
    });
  }
}

// Loads a tile's values, and zeros behind the last key, which probabilities of 0 do not make NaN.
template <class Config>
struct value_tile : swizzled_tile<Config::kValueChunks> {
  static constexpr int kMoreBytes = Config::kTile * swizzled_tile<Config::kValueChunks>::kPitch;
  const uint16* values;
  int64 stride, head_dim;

  ONEPASS_FUNCTION value_tile(const uint16* values, int64 stride, int64 head_dim)
      : values(values), stride(stride), head_dim(head_dim) {}
  ONEPASS_FUNCTION void operator()(char* to, int64 first, int count) const {
    this->template load_async<Config::kThreads>(to, values + first * stride, stride, head_dim, count, Config::kTile);
  }
};

template <class Config, class Behind>
ONEPASS_FUNCTION void attention_forward_sm80(const attention_sm80_arguments& all) {
  using before = typename Config::before;
  using behind = typename Config::behind;
  using index = typename behind::index;
  using memory_of = memory<Config::kX, 8, 8>;
  using L = pack<float, 8>;
  using rows = rows_in_registers<Config>;
  static_assert(same_type<typename Behind::row, word::softmax>);
  __shared__ typename row_threads<before>::slots slots;
  const probabilities_sm80_arguments& a = all.probabilities;
  const int across = static_cast<int>(threadIdx.x) % kThreadsOfRow;
  const int64 batch = blockIdx.x / a.blocks_of_batch, end = (batch + 1) * a.rows_of_batch;
  input_rows<before, line<chain<>>> input(a.before, slots);
  const int64 in_batch = blockIdx.x % a.blocks_of_batch * input.kRows, first = batch * a.rows_of_batch + in_batch;
  const auto row_of = [&](int i) { return first + i * before::kDown + static_cast<int>(threadIdx.x) / kThreadsOfRow; };
  wait_for_kernel_before();

  using tiles_of = key_tiles<Config, value_tile<Config>>;
  int count = tiles_of::all(a);
  if constexpr (Config::kCausal) {  // only tiles that the block's last row needs, if its rows are of one matrix
    const int64 last = in_batch % a.behind.matrix_rows + input.kRows;
    const bool same_matrix = a.behind.matrix_rows % input.kRows == 0 || a.behind.matrix_rows == a.rows_of_batch;
    if (same_matrix && last < count * int64{Config::kTile})
      count = static_cast<int>((last + Config::kTile - 1) / Config::kTile);
  }
  const auto* values =
      static_cast<const uint16*>(all.values) + batch / a.inner * all.outer_stride + batch % a.inner * all.inner_stride;
  tiles_of tiles(a, batch, count, 1, value_tile<Config>(values, all.stride, all.value_head_dim));
  rows queries{};
  input.make(first, a.before.rows, [&](auto&, int i, int k, L v) { queries.set(i, k, v); });

  cursors<cursor<behind, Behind>, rows::kRows> at(a.behind);
  online_softmax softmax[rows::kRows];
#pragma unroll
  for (int i = 0; i < rows::kRows; ++i) {
    at.of[i].set_row(static_cast<index>(row_of(i)), row_of(i) < end);
  }
  warp_sums<Config::kX, Config::kValueChunks, rows::kRows / 2> sums;  // P·V
  for (int tile = 0; tile < count; ++tile) {
    const char* keys = tiles.next();
#pragma unroll 1
    for (int key_offset = 0; key_offset < Config::kTile; key_offset += kResultColumns) {
      const auto column = static_cast<index>(int64{tile} * Config::kTile + key_offset + across * 8);
      const int there = behind::kExact ? 8 : count_at<8>(column, a.behind.columns);
      float d[rows::kRows / 2][4][4] = {};
      queries.multiply(d, keys, key_offset);
      uint4 weights[rows::kRows];
#pragma unroll
      for (int i = 0; i < rows::kRows; ++i) {
        at.of[i].set_column(column, there);
        L scores = Behind::pre::forward(queries.product(d, i), at.of[i]);
        if constexpr (!behind::kExact) scores = where(first_n<L>(there), scores, L(-kInfinity));
        const float factor = softmax[i].raise(largest_of_four(max_number(softmax[i].largest, max_lanes(scores))));
        const L of_softmax = softmax[i].add(scores, factor);
        sums.scale(i, factor);
        weights[i] = memory_of::whole(memory_of::buffer_of(Behind::post::forward(of_softmax, at.of[i])));
      }
      sums.add_of_rows(weights, keys + tiles_of::kKeyBytes, key_offset);
    }
  }
#pragma unroll
  for (int i = 0; i < rows::kRows; ++i) {
    const word::row_numbers<float> saved = statistics_of(softmax[i].largest, sum_of_four(softmax[i].sum));
    if (row_of(i) >= end) continue;
    if (behind::kSavesStatistics && across == 0) save<Behind>(a.behind, row_of(i), saved);
    const int64 row = row_of(i) - batch * a.rows_of_batch;
    sums.store(i, row_of_batch(all.y, batch, a.inner, row, a.behind.matrix_rows), all.value_head_dim, saved.second);
  }
}

ONEPASS_END
