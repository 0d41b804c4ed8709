// Rows of what `linear` takes, made by the words before it in a kernel that multiplies too.
#pragma once

#include "onepass/skeleton/thread_row.cuda.h"

ONEPASS_BEGIN

// Rows of what `linear` takes: Config::kAtOnce for each thread at a time. Place: where they go. kAllExist: no thread is
// asked for a row behind the last.
template <class Config, class Line, class Place = place<Config, Line>>
class input_rows {
 public:
  static constexpr int kRows = Config::kDown * Config::kAtOnce;

  ONEPASS_FUNCTION input_rows(const arguments& a, typename row_threads<Config>::slots& shared)
      : a_(a), threads_(shared) {}

  // kRows rows from `first` on; those from `next` on are asked for.
  ONEPASS_FUNCTION void make(int64 first, int64 next) {
    Place at(a_);
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
        if (Config::kSavesStatistics && at.is_first() && row < a_.rows && across_ == 0) save<Line>(a_, row, saved);
        saved.second = saved.second * of_row.held_factor;
        for_lanes<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
          at.set_column(column, count);
          using row_of = thread_row<Config, row_threads<Config>, decltype(value)>;
          at.store_y(Line::post::forward(Line::row::template forward<row_of>(held[i][k], saved), at));
        });
      });
    }
  }

 private:
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kLanes>;

  // body(i, row) for each of this thread's rows.
  template <class Body>
  ONEPASS_FUNCTION void each_row(Place& at, int64 first, const Body& body) const {
#pragma unroll
    for (int i = 0; i < Config::kAtOnce; ++i) {
      const int64 row = first + i * Config::kDown + static_cast<int>(threadIdx.x) / Config::kAcross;
      at.set_row(static_cast<typename Config::index>(row), Config::kAllExist || row < a_.rows);
      body(i, row);
    }
  }
  // body(i, k) at lane k of row i.
  template <class Body>
  ONEPASS_FUNCTION void each_lane(Place& at, int64 first, const Body& body) const {
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

ONEPASS_END
