// Lines that begin with `scores`, have softmax and end with `values`, in one kernel of warps that multiply (sm_80 and
// later): keys and values pass by once, and nothing of the scores' size leaves the chip. (Dao et al., "FlashAttention",
// 2022.)
//
// A thread's scores are eight neighbours of a row (kernel/common/warp_mma.cuda.h). In pairs they are what the unit
// takes as a left factor, whose columns may be any keys as long as the values' rows are the same ones: a row of values
// is read from wherever it is.
//
// Config: that of lines without `values`, below, and
//   kValuePieces  8s of the values' numbers, begun ones too
//   kCausal       rows need no keys behind their own place
#pragma once

#include "onepass/kernel/attention/arguments.h"
#include "onepass/kernel/common/online_softmax.cuda.h"
#include "onepass/kernel/common/warp_mma.cuda.h"
#include "onepass/kernel/linear/prologue.cuda.h"

ONEPASS_BEGIN

// Lines that begin with `scores` and have softmax, in one kernel (sm_80 and later): queries and keys cross memory, and
// the result. A warp keeps its rows of queries in registers; the keys pass by twice, in tiles that all warps of a block
// share: once for the rows' statistics, once for the result, with the same products. (FlashAttention's forward pass
// without the values: Dao et al., 2022.)
//
// Config (see kernel/common/warp_mma.cuda.h):
//   kTile, kStages  keys of a tile, a multiple of 32; tiles in shared memory
//   before          what kernel/common/cursor.cuda.h asks for, of the queries
//   behind          likewise of the scores

extern __shared__ __align__(16) char scores_tiles[];

// The first `count` tiles of a batch's keys in turn, so many times. `more` brings what a tile has behind its keys:
// more(to, key, count), kMoreBytes.
struct nothing_more {
  static constexpr int kMoreBytes = 0;
  ONEPASS_FUNCTION void operator()(char*, int64, int) const {}
};
template <class Config, class More = nothing_more>
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

  // The next tile, when all threads are done with the one before.
  ONEPASS_FUNCTION const char* next() {
    wait_for_copy_groups<Config::kStages - 2>();
    __syncthreads();
    load_async();
    const char* tile = scores_tiles + at_ * kBytes;
    at_ = at_ + 1 < Config::kStages ? at_ + 1 : 0;
    return tile;
  }

 private:
  ONEPASS_FUNCTION void load_async() {
    if (left_ > 0) {
      const int64 first = int64{tile_} * Config::kTile, behind = a_.behind.columns - first;
      const int rows = behind < Config::kTile ? static_cast<int>(behind) : Config::kTile;
      more_(scores_tiles + to_ * kBytes + kKeyBytes, first, rows);
      load_matrix_async<Config>(scores_tiles + to_ * kBytes, keys_ + first * a_.stride, a_.stride, a_.depth, rows);
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

// One for each of a thread's rows.
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
  // body(i, scores, count) for each row and vector of the next tile.
  const auto each_vector = [&](int64 tile, const auto& body) {
    const char* keys = tiles.next();
#pragma unroll 1
    for (int group = 0; group < Config::kTile; group += kResultColumns) {
      const auto column = static_cast<index>(tile * Config::kTile + group + across * 8);
      const int count = behind::kExact ? 8 : count_at<8>(column, a.behind.columns);
      float d[rows::kRows / 2][4][4] = {};
      queries.multiply(d, keys, group);
#pragma unroll
      for (int i = 0; i < rows::kRows; ++i) {
        at.of[i].set_column(column, count);
        body(i, Behind::pre::forward(queries.product(d, i), at.of[i]), count);
      }
    }
  };
  online_softmax sums[rows::kRows];  // of this thread's scores
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

// A tile's values. Behind the last key there are zeros, which weights of 0 do not make NaN.
template <class Config>
struct value_tile : swizzled_tile<Config::kValuePieces> {
  static constexpr int kMoreBytes = Config::kTile * swizzled_tile<Config::kValuePieces>::kPitch;
  const uint16* values;
  int64 stride, depth;

  ONEPASS_FUNCTION value_tile(const uint16* values, int64 stride, int64 depth)
      : values(values), stride(stride), depth(depth) {}
  ONEPASS_FUNCTION void operator()(char* to, int64 first, int count) const {
    this->template load_async<Config::kThreads>(to, values + first * stride, stride, depth, count, Config::kTile);
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
  const probabilities_sm80_arguments& a = all.of;
  const int across = static_cast<int>(threadIdx.x) % kThreadsOfRow;
  const int64 batch = blockIdx.x / a.blocks_of_batch, end = (batch + 1) * a.rows_of_batch;
  input_rows<before, line<chain<>>> input(a.before, slots);
  const int64 in_batch = blockIdx.x % a.blocks_of_batch * input.kRows, first = batch * a.rows_of_batch + in_batch;
  const auto row_of = [&](int i) { return first + i * before::kDown + static_cast<int>(threadIdx.x) / kThreadsOfRow; };
  wait_for_kernel_before();

  using tiles_of = key_tiles<Config, value_tile<Config>>;
  int count = tiles_of::all(a);
  if constexpr (Config::kCausal) {  // those that the block's last row needs, where all its rows are of one matrix
    const int64 last = in_batch % a.behind.matrix_rows + input.kRows;
    const bool of_one = a.behind.matrix_rows % input.kRows == 0 || a.behind.matrix_rows == a.rows_of_batch;
    if (of_one && last < count * int64{Config::kTile})
      count = static_cast<int>((last + Config::kTile - 1) / Config::kTile);
  }
  const auto* values =
      static_cast<const uint16*>(all.values) + batch / a.inner * all.outer_stride + batch % a.inner * all.inner_stride;
  tiles_of tiles(a, batch, count, 1, value_tile<Config>(values, all.stride, all.value_depth));
  rows queries{};
  input.make(first, a.before.rows, [&](auto&, int i, int k, L v) { queries.set(i, k, v); });

  cursors<cursor<behind, Behind>, rows::kRows> at(a.behind);
  online_softmax softmax[rows::kRows];
#pragma unroll
  for (int i = 0; i < rows::kRows; ++i) {
    at.of[i].set_row(static_cast<index>(row_of(i)), row_of(i) < end);
  }
  warp_sums<Config::kX, Config::kValuePieces, rows::kRows / 2> sums;  // of values
  for (int tile = 0; tile < count; ++tile) {
    const char* keys = tiles.next();
#pragma unroll 1
    for (int group = 0; group < Config::kTile; group += kResultColumns) {
      const auto column = static_cast<index>(int64{tile} * Config::kTile + group + across * 8);
      const int there = behind::kExact ? 8 : count_at<8>(column, a.behind.columns);
      float d[rows::kRows / 2][4][4] = {};
      queries.multiply(d, keys, group);
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
      sums.add_of_rows(weights, keys + tiles_of::kKeyBytes, group);
    }
  }
#pragma unroll
  for (int i = 0; i < rows::kRows; ++i) {
    const word::row_numbers<float> saved = statistics_of(softmax[i].largest, sum_of_four(softmax[i].sum));
    if (row_of(i) >= end) continue;
    if (behind::kSavesStatistics && across == 0) save<Behind>(a.behind, row_of(i), saved);
    sums.store(i, static_cast<uint16*>(all.y) + row_of(i) * all.value_depth, all.value_depth, saved.second);
  }
}

ONEPASS_END
