// Rows of what `linear` takes, made by the words before it while other rows are being multiplied (linear.cuda.h).
#pragma once

#include "onepass/skeleton/linear_tiles.cuda.h"
#include "onepass/skeleton/thread_row.cuda.h"

ONEPASS_BEGIN

// Rows of what `linear` takes: kAtOnce for each thread at a time.
template <class Config, class Line>
class input_rows {
 public:
  static constexpr int kRows = Config::kDown * Config::kAtOnce;

  ONEPASS_FUNCTION input_rows(const arguments& a, typename row_threads<Config>::slots& shared)
      : a_(a), threads_(shared) {}

  // kRows rows from `first` on; those from `next` on are asked for.
  ONEPASS_FUNCTION void make(int64 first, int64 next) {
    place<Config, Line> at(a_);
    each_lane(at, next, [&](int, int) { at.announce(); });
    if constexpr (same_type<typename Line::row, void>) {
      each_lane(at, first, [&](int, int) { at.store_y(Line::pre::forward(at.x(), at)); });
    } else {
      L held[Config::kAtOnce][Config::kHeldLanes]{};
      each_lane(at, first, [&](int i, int k) { held[i][k] = Line::pre::forward(at.x(), at); });
      each_row(at, first, [&](int i, int64 row) {
        const auto value = [&](int k, typename Config::index, int) { return held[i][k]; };
        const auto of_row = statistics<Config, Line>(a_, across_, threads_, held[i], value);
        stage::pair<T> saved = of_row.saved;
        if (Config::kSavesStatistics && row < a_.rows && across_ == 0) save<Line>(a_, row, saved);
        saved.second = saved.second * of_row.held_factor;
        for_lanes<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
          at.set_column(column, count);
          using row_of = thread_row<Config, row_threads<Config>, decltype(value)>;
          at.store_y(Line::post::forward(Line::row::template forward<row_of>(held[i][k], saved), at));
        });
      });
    }
    let_copies_see_writes();
  }

 private:
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kLanes>;

  // body(i, row) for each of this thread's rows.
  template <class Body>
  ONEPASS_FUNCTION void each_row(place<Config, Line>& at, int64 first, const Body& body) const {
#pragma unroll
    for (int i = 0; i < Config::kAtOnce; ++i) {
      const int64 row = first + i * Config::kDown + static_cast<int>(threadIdx.x) / Config::kAcross;
      at.set_row(static_cast<typename Config::index>(row), row < a_.rows);
      body(i, row);
    }
  }
  // body(i, k) at lane k of row i.
  template <class Body>
  ONEPASS_FUNCTION void each_lane(place<Config, Line>& at, int64 first, const Body& body) const {
    each_row(at, first, [&](int i, int64) {
      for_lanes<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
        at.set_column(column, count);
        body(i, k);
      });
    });
  }
  const arguments& a_;
  const int across_ = static_cast<int>(threadIdx.x) % Config::kAcross;
  row_threads<Config> threads_;
};

// All blocks hear of rows that this one has made.
ONEPASS_FUNCTION void tell_of_rows(const linear_arguments& a, int64 first, int rows) {
  const int64 left = a.before.rows - first;
  add_for_all(a.ready + first / kTileM, static_cast<uint32>(left < rows ? static_cast<int>(left) : rows));
}

// All threads make the rows before row `end`, the blocks in turn.
template <class Config, class Line>
ONEPASS_FUNCTION void make_first_rows(const linear_arguments& a, int64 end,
                                      typename row_threads<Config>::slots& shared) {
  using rows = input_rows<Config, Line>;
  rows input(a.before, shared);
  const int64 step = static_cast<int64>(gridDim.x) * rows::kRows;
  for (int64 row = static_cast<int64>(blockIdx.x) * rows::kRows; row < end && row < a.before.rows; row += step) {
    input.make(row, row + step);
    __syncthreads();
    if (threadIdx.x == 0) tell_of_rows(a, row, rows::kRows);
  }
}

// The rows behind those, a block's in turn with those of all others: made by a warpgroup...
template <class Config, class Line>
class later_rows {
 public:
  using rows = input_rows<Config, Line>;

  ONEPASS_FUNCTION later_rows(const arguments& a, int64 first, uint64 (&made)[2], uint64 (&told)[2],
                              typename row_threads<Config>::slots& shared)
      : input_(a, shared),
        made_(made),
        told_(told),
        rows_(a.rows),
        next_(first + static_cast<int64>(blockIdx.x) * rows::kRows) {}

  // All of this block's before row `end`.
  ONEPASS_FUNCTION void make_until(int64 end) {
    const int64 step = static_cast<int64>(gridDim.x) * rows::kRows;
    for (; next_ < end && next_ < rows_; next_ += step, ++turn_) {
      wait_for_mail(&told_[turn_ % 2], (turn_ / 2 + 1) & 1);
      input_.make(next_, next_ + step);
      arrive(&made_[turn_ % 2]);
    }
  }

 private:
  rows input_;
  uint64 (&made_)[2];
  uint64 (&told_)[2];
  int64 rows_, next_;
  int turn_ = 0;
};
// ... and told of by another thread, which does not keep it waiting.
template <class Config, class Line, class Shared>
ONEPASS_FUNCTION void tell_of_later_rows(const linear_arguments& a, int64 first, Shared& shared) {
  constexpr int kRows = input_rows<Config, Line>::kRows;
  int64 row = first + static_cast<int64>(blockIdx.x) * kRows;
  for (int turn = 0; row < a.before.rows; row += static_cast<int64>(gridDim.x) * kRows, ++turn) {
    wait_for_mail(&shared.made[turn % 2], turn / 2 & 1);
    tell_of_rows(a, row, kRows);
    arrive(&shared.told[turn % 2]);
  }
}

ONEPASS_END
