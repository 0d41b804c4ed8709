// The statistics of a deferred norm's rows (deferred_norm.cuda.h), made from memory beside the product that needs them:
// every row once, by the blocks in turn, for all. A warp has four rows, one after the other, and asks for the next
// numbers before it counts those that it has.
#pragma once

#include "onepass/skeleton/linear_tiles.cuda.h"
#include "onepass/skeleton/thread_row.cuda.h"

ONEPASS_BEGIN

// For Row::statistics: of numbers that come some at a time, their mean and squares (about it, or about zero).
template <class Row>
class running_moments {
 public:
  static constexpr bool kCentres = Row::about.statistics > 1;

  explicit ONEPASS_FUNCTION running_moments(float inverse_columns) : inverse_columns_(inverse_columns) {}

  // Of x[k] those with present(k).
  template <int N, class Lane, class Present>
  ONEPASS_FUNCTION void take(const Lane (&x)[N], const Present& present) {
    Lane sum(0.0f), squares(0.0f);
    int count = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (!present(k)) continue;
      sum = sum + x[k];
      if constexpr (!kCentres) squares = fma(x[k], x[k], squares);
      count += 8;
    }
    const float size = static_cast<float>(count), mean = count > 0 ? sum_lanes(sum) / size : 0.0f;
    if constexpr (kCentres) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const Lane centred = x[k] - Lane(mean);
        if (present(k)) squares = fma(centred, centred, squares);
      }
      all_ = merge()(all_, numbers<float, 3>{{mean, sum_lanes(squares), size}});
    } else {
      all_.v[1] += sum_lanes(squares);
    }
  }
  // With those of the other threads of the warp.
  ONEPASS_FUNCTION void combine() {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      numbers<float, 3> others;
#pragma unroll
      for (int i = 0; i < 3; ++i) others.v[i] = __shfl_xor_sync(0xffffffffu, all_.v[i], distance);
      if constexpr (kCentres) all_ = merge()(all_, others);
      else all_.v[1] += others.v[1];
    }
  }

  ONEPASS_FUNCTION float inverse_columns() const { return inverse_columns_; }
  ONEPASS_FUNCTION float squares() const { return all_.v[1]; }
  ONEPASS_FUNCTION stage::pair<float> moments() const { return {all_.v[0], all_.v[1] * inverse_columns_}; }

 private:
  float inverse_columns_;
  numbers<float, 3> all_{{0.0f, 0.0f, 0.0f}};  // mean, squares, how many
};

template <class Config, class Line>
class statistics_ahead {
 public:
  explicit ONEPASS_FUNCTION statistics_ahead(const linear_arguments& a) : a_(a) {}

  // All of this block's before row `end`.
  ONEPASS_FUNCTION void make_until(int64 end) {
    for (; next_ < end && next_ < a_.before.rows; next_ += static_cast<int64>(gridDim.x) * kBlockRows)
      make(next_ + static_cast<int>(threadIdx.x) / 32 * kRows);
  }

 private:
  static constexpr int V = 8, kLanes = 4, kRows = 4, kBlockRows = kGroupThreads / 32 * kRows;
  using stored_x = memory<Config::kX, V, V>;
  using buffer = typename stored_x::buffer;
  using lane = pack<float, V>;

  ONEPASS_FUNCTION bool present(int column, int k) const { return column + k * 32 * V < a_.depth; }
  ONEPASS_FUNCTION void ask(int64 row, int column, buffer (&into)[kLanes]) const {
    const auto* from = static_cast<const uint16*>(a_.x) + row * a_.x_stride + column;
#pragma unroll
    for (int k = 0; k < kLanes; ++k)
      into[k] = present(column, k) ? stored_x::load(from + k * 32 * V, V) : stored_x::buffer_of(lane(0.0f));
  }
  ONEPASS_FUNCTION void make(int64 first) {
    const int64 left = a_.before.rows - first, end = first + (left < kRows ? left : kRows);
    const int own = static_cast<int>(threadIdx.x) % 32 * V;
    int64 row = first;
    int column = own;
    buffer now[kLanes], next[kLanes];
    if (row < end) ask(row, column, next);
    running_moments<typename Line::row> moments(static_cast<float>(a_.before.inverse_columns));
    while (row < end) {
      lane x[kLanes];
#pragma unroll
      for (int k = 0; k < kLanes; ++k) now[k] = next[k];
      const int64 of_row = row;
      const int at = column;
      column += 32 * V * kLanes;
      const bool ends = column - own >= a_.depth;
      if (ends) column = own, ++row;
      if (row < end) ask(row, column, next);
#pragma unroll
      for (int k = 0; k < kLanes; ++k) x[k] = stored_x::template numbers_of<float>(now[k]);
      moments.take(x, [&](int k) { return present(at, k); });
      if (!ends) continue;
      moments.combine();
      float eps = 0;
      if constexpr (Line::row_parameter >= 0) eps = static_cast<float>(a_.before.parameter[Line::row_parameter]);
      if (own == 0) save<Line>(a_.before, of_row, Line::row::statistics(moments, eps));
      moments = running_moments<typename Line::row>(static_cast<float>(a_.before.inverse_columns));
    }
    if (own == 0 && first < end) add_for_all(a_.ready + first / kTileM, static_cast<uint32>(end - first));
  }

  const linear_arguments& a_;
  int64 next_ = static_cast<int64>(blockIdx.x) * kBlockRows;
};

ONEPASS_END
