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

ONEPASS_BEGIN

struct warp_attention_arguments {
  scores_arguments of;
  const void* values;  // [outer, inner, keys, value_depth]
  int64 stride, outer_stride, inner_stride, value_depth;
  void* y;  // [all rows, value_depth]
};

// A tile's values: rows of whole 128 bytes, whose pieces of 16 are exchanged so that those read at a time differ in
// banks. Behind the last key there are zeros, which weights of 0 do not make NaN.
template <class Config>
struct value_tile {
  static constexpr int kPitch = (Config::kValuePieces + 7) / 8 * 128, kMoreBytes = Config::kTile * kPitch;
  const uint16* values;
  int64 stride, depth;

  static ONEPASS_FUNCTION int place(int key, int piece) {
    return key * kPitch + (piece ^ (key / 8 % 4 * 2 + key % 2)) * 16;
  }
  ONEPASS_FUNCTION void operator()(char* to, int64 first, int count) const {
    constexpr int kAtOnce = Config::kThreads / Config::kValuePieces;
    const int piece = static_cast<int>(threadIdx.x) % Config::kValuePieces,
              own = static_cast<int>(threadIdx.x) / Config::kValuePieces;
    if (own >= kAtOnce) return;
    for (int key = own; key < Config::kTile; key += kAtOnce) {
      const bool present = key < count && piece * 8 < depth;
      copy_or_clear(to + place(key, piece), values + (present ? (first + key) * stride + piece * 8 : 0), present);
    }
  }
};

// This thread's part of Σ weight · value of its rows.
template <class Config>
struct sums_of_values {
  static constexpr int kRows = Config::before::kAtOnce, kPieces = (Config::kValuePieces + 1) / 2 * 2;
  float of[kRows / 2][kPieces][4] = {};

  ONEPASS_FUNCTION void scale(int row, float factor) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      of[row / 2][piece][row % 2 * 2] *= factor;
      of[row / 2][piece][row % 2 * 2 + 1] *= factor;
    }
  }
  // weights: of the eight keys from `first` + 8 (thread of the row) on.
  ONEPASS_FUNCTION void add(const uint4 (&weights)[kRows], const char* tile, int first) {
    const int lane = static_cast<int>(threadIdx.x) % 32, row = lane % 8, half = lane / 8 % 2;
#pragma unroll
    for (int step = 0; step < 2; ++step) {  // of 16 keys: four of each thread's eight
      const int key = first + row / 2 * 8 + step * 4 + half * 2 + row % 2;
#pragma unroll
      for (int piece = 0; piece < kPieces; piece += 2) {
        uint32 values[4];
        load_turned_matrices(shared_address(tile + value_tile<Config>::place(key, piece + lane / 16)), values);
#pragma unroll
        for (int i = 0; i < kRows; i += 2) {
          const uint4 &above = weights[i], &below = weights[i + 1];
#pragma unroll
          for (int j = 0; j < 2; ++j)
            add_warp_product<Config::kX>(of[i / 2][piece + j], step ? above.z : above.x, step ? below.z : below.x,
                                         step ? above.w : above.y, step ? below.w : below.y, values[2 * j],
                                         values[2 * j + 1]);
        }
      }
    }
  }
  ONEPASS_FUNCTION void store(void* y, int64 depth, int64 row, int i, float factor) const {
    const int first = static_cast<int>(threadIdx.x) % 4 * 2;
    uint16* to = static_cast<uint16*>(y) + row * depth + first;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece * 8 + first < depth)
        *reinterpret_cast<uint32*>(to + piece * 8) =
            pair_to_storage<Config::kX>(of[i / 2][piece][i % 2 * 2] * factor, of[i / 2][piece][i % 2 * 2 + 1] * factor);
    }
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
  tiles_of tiles(a, batch, count, 1, {values, all.stride, all.value_depth});
  rows queries{};
  input.make(first, a.before.rows, [&](auto&, int i, int k, L v) { queries.set(i, k, v); });

  places<place<behind, Behind>, rows::kRows> at(a.behind);
  numbers<float, 2> statistics[rows::kRows];  // the largest score, and this thread's Σ exp(score - largest)
#pragma unroll
  for (int i = 0; i < rows::kRows; ++i) {
    at.of[i].set_row(static_cast<index>(row_of(i)), row_of(i) < end);
    statistics[i] = merge_exponentials::none<float, 2>();
  }
  sums_of_values<Config> sums;
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
        float largest = max_number(statistics[i].v[0], max_lanes(scores));
        largest = max_number(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = max_number(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        const float shift = shift_of(largest), factor = exp_minus_number(statistics[i].v[0], shift);
        const L of_softmax = exp_minus(scores, shift);
        statistics[i] = {{largest, fmaf(statistics[i].v[1], factor, sum_lanes(of_softmax))}};
        sums.scale(i, factor);
        weights[i] = memory_of::whole(memory_of::buffer_of(Behind::post::forward(of_softmax, at.of[i])));
      }
      sums.add(weights, keys + tiles_of::kKeyBytes, group);
    }
  }
#pragma unroll
  for (int i = 0; i < rows::kRows; ++i) {
    float sum = statistics[i].v[1];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1), sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const stage::pair<float> saved{shift_of(statistics[i].v[0]), sum == 0.0f ? 0.0f : reciprocal_number(sum)};
    if (row_of(i) >= end) continue;
    if (behind::kSavesStatistics && across == 0) save<Behind>(a.behind, row_of(i), saved);
    sums.store(all.y, all.value_depth, row_of(i), i, saved.second);
  }
}

ONEPASS_END
