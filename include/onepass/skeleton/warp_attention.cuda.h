// Lines that begin with `scores`, have softmax and end with `values`, in one kernel of warps that multiply (sm_80 and
// later): keys and values pass by once, and nothing of the scores' size leaves the chip. (Dao et al., "FlashAttention",
// 2022.)
//
// A thread's scores are eight neighbours of a row (shared_matrix.cuda.h). In pairs they are what the unit takes as a
// left factor, whose columns may be any keys as long as the values' rows are the same ones: a row of values is read
// from wherever it is.
//
// Config: scores.cuda.h, and
//   kValuePieces  8s of the values' numbers, begun ones too
//   kCausal       rows need no keys behind their own place
#pragma once

#include "onepass/skeleton/scores.cuda.h"
#include "onepass/skeleton/warp_rows.cuda.h"

ONEPASS_BEGIN

struct warp_attention_arguments {
  scores_arguments of;
  const void* values;  // [outer, inner, keys, value_depth]
  int64 stride, outer_stride, inner_stride, value_depth;
  void* y;  // [all rows, value_depth]
};

// A tile's values. Behind the last key there are zeros, which weights of 0 do not make NaN.
template <class Config>
struct value_tile : turned_tile<Config::kValuePieces> {
  static constexpr int kMoreBytes = Config::kTile * turned_tile<Config::kValuePieces>::kPitch;
  const uint16* values;
  int64 stride, depth;

  ONEPASS_FUNCTION value_tile(const uint16* values, int64 stride, int64 depth)
      : values(values), stride(stride), depth(depth) {}
  ONEPASS_FUNCTION void operator()(char* to, int64 first, int count) const {
    this->template bring<Config::kThreads>(to, values + first * stride, stride, depth, count, Config::kTile);
  }
};

template <class Config, class Behind>
ONEPASS_FUNCTION void attention_by_warps(const warp_attention_arguments& all) {
  using before = typename Config::before;
  using behind = typename Config::behind;
  using index = typename behind::index;
  using memory_of = memory<Config::kX, 8, 8>;
  using L = pack<float, 8>;
  using rows = rows_in_registers<Config>;
  static_assert(same_type<typename Behind::row, stage::softmax>);
  __shared__ typename row_threads<before>::slots slots;
  const scores_arguments& a = all.of;
  const int across = static_cast<int>(threadIdx.x) % 4;
  const int64 batch = blockIdx.x / a.blocks_of_batch, end = (batch + 1) * a.rows_of_batch;
  input_rows<before, line<chain<>>> input(a.before, slots);
  const int64 in_batch = blockIdx.x % a.blocks_of_batch * input.kRows, first = batch * a.rows_of_batch + in_batch;
  const auto row_of = [&](int i) { return first + i * before::kDown + static_cast<int>(threadIdx.x) / 4; };
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

  places<place<behind, Behind>, rows::kRows> at(a.behind);
  numbers<float, 2> statistics[rows::kRows];  // the largest score, and this thread's Σ exp(score - largest)
#pragma unroll
  for (int i = 0; i < rows::kRows; ++i) {
    at.of[i].set_row(static_cast<index>(row_of(i)), row_of(i) < end);
    statistics[i] = merge_exponentials::none<float, 2>();
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
        const float largest = largest_of_four(max_number(statistics[i].v[0], max_lanes(scores)));
        const float shift = shift_of(largest), factor = exp_minus_number(statistics[i].v[0], shift);
        const L of_softmax = exp_minus(scores, shift);
        statistics[i] = {{largest, fmaf(statistics[i].v[1], factor, sum_lanes(of_softmax))}};
        sums.scale(i, factor);
        weights[i] = memory_of::whole(memory_of::buffer_of(Behind::post::forward(of_softmax, at.of[i])));
      }
      sums.add_of_rows(weights, keys + tiles_of::kKeyBytes, group);
    }
  }
#pragma unroll
  for (int i = 0; i < rows::kRows; ++i) {
    const float sum = sum_of_four(statistics[i].v[1]);
    const stage::row_numbers<float> saved{shift_of(statistics[i].v[0]), sum == 0.0f ? 0.0f : reciprocal_number(sum)};
    if (row_of(i) >= end) continue;
    if (behind::kSavesStatistics && across == 0) save<Behind>(a.behind, row_of(i), saved);
    sums.store(i, static_cast<uint16*>(all.y) + row_of(i) * all.value_depth, all.value_depth, saved.second);
  }
}

ONEPASS_END
