// Rows of what `linear` takes, made by the words before it in a kernel that multiplies too.
#pragma once

#include "onepass/kernel/row/statistics.cuda.h"

ONEPASS_BEGIN

// What a kernel takes whose warps multiply the rows that its block makes.
struct warp_linear_arguments {
  const void* matrix;  // [columns, depth], its rows `stride` numbers apart
  int64 stride, depth;
  arguments behind, before;
};

// What a thread holds of a row until it has the row's statistics: a vector of what enters the row word, or, where that
// is x itself (kRecomputes), as it is stored.
template <class Config, bool AsStored = Config::kRecomputes != 0>
struct held_lane {
  using type = pack<typename Config::arithmetic, Config::kVectorSize>;
  static ONEPASS_FUNCTION type numbers(type vector) { return vector; }
  static ONEPASS_FUNCTION type* lanes(type* row) { return row; }
};
template <class Config>
struct held_lane<Config, true> {
  using x = memory<Config::kX, Config::kVectorSize, Config::kAccess>;
  using type = typename x::buffer;
  static ONEPASS_FUNCTION auto numbers(type vector) {
    return x::template numbers_of<typename Config::arithmetic>(vector);
  }
  static ONEPASS_FUNCTION pack<typename Config::arithmetic, Config::kVectorSize>* lanes(type*) { return nullptr; }
};

// Rows of what `linear` takes: Config::kAtOnce for each thread at a time. Cursor: where they go. kAllExist: no thread
// is asked for a row behind the last. kRecomputes: what enters the row word is x, which a thread holds as it is
// stored. kStages: 1 where x (Config::kStreams) is brought ahead into shared memory, each thread's part by itself, else
// 0.
template <class Config, class Line, class Cursor = cursor<Config, Line>>
class input_rows {
 public:
  static constexpr int kRows = Config::kDown * Config::kAtOnce;

  static constexpr int kCopyBytes = Config::kStages * kRows * Cursor::kRunBytes;

  ONEPASS_FUNCTION input_rows(const arguments& a, typename row_threads<Config>::slots& shared, char* copies = nullptr)
      : a_(a), threads_(shared), copies_(copies) {}

  // x of kRows rows from `first` on is on its way.
  ONEPASS_FUNCTION void load_async(int64 first) const {
    Cursor at(a_);
    each_row(at, first, [&](int, int64 row) {
      if (row >= a_.rows) return;
      for_vectors<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
        at.set_column(column, count);
        at.set_vector(k);
        at.load_async();
      });
    });
    close_copy_group();
  }
  // kRows rows from `first` on, which are on their way where kStages says so; those from `next` on are asked for.
  // take(at, i, k, vector): vector k of this thread's row i.
  template <class Take>
  ONEPASS_FUNCTION void make(int64 first, int64 next, const Take& take) {
    Cursor at(a_);
    if constexpr (Config::kStages > 0) wait_for_copy_groups<0>();
    else each_vector(at, next, [&](int, int) { at.prefetch_inputs(); });
    if constexpr (same_type<typename Line::row, void>) {
      each_vector(at, first, [&](int i, int k) { take(at, i, k, Line::pre::forward(at.x(), at)); });
      if constexpr (Config::kStages > 0) load_async(next);
    } else {
      typename holder::type held[Config::kAtOnce][Config::kHeldVectors]{};
      each_vector(at, first, [&](int i, int k) {
        if constexpr (Config::kRecomputes) held[i][k] = at.x_stored();
        else held[i][k] = Line::pre::forward(at.x(), at);
      });
      if constexpr (Config::kStages > 0) load_async(next);
      each_row(at, first, [&](int i, int64 row) {
        const auto value = [&](int k, typename Config::index, int) { return holder::numbers(held[i][k]); };
        const auto of_row = statistics<Config, Line>(a_, across_, threads_, holder::lanes(held[i]), value);
        word::row_numbers<T> saved = of_row.saved;
        if (Config::kSavesStatistics && at.is_first() && row < a_.rows && across_ == 0)
          save<Line, Config::kX>(a_, row, saved);
        if constexpr (!Config::kRecomputes) saved = of_row.for_held;
        for_vectors<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
          at.set_column(column, count);
          using row_of = thread_row<Config, row_threads<Config>, decltype(value)>;
          take(at, i, k, Line::post::forward(Line::row::template forward<row_of>(value(k, column, count), saved), at));
        });
      });
    }
  }
  // And they go to their place.
  ONEPASS_FUNCTION void make(int64 first, int64 next) {
    make(first, next, [](Cursor& at, int, int, L value) { at.store_y(value); });
  }

 private:
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kVectorSize>;
  using holder = held_lane<Config>;

  // body(i, row) for each of this thread's rows.
  template <class Body>
  ONEPASS_FUNCTION void each_row(Cursor& at, int64 first, const Body& body) const {
#pragma unroll
    for (int i = 0; i < Config::kAtOnce; ++i) {
      const int64 row = first + i * Config::kDown + static_cast<int>(threadIdx.x) / Config::kAcross;
      at.set_row(static_cast<typename Config::index>(row), Config::kAllExist || row < a_.rows);
      if constexpr (Config::kStages > 0) {
        at.set_copies(copies_, i * Config::kDown + static_cast<int>(threadIdx.x) / Config::kAcross);
        at.set_stage(0);
      }
      body(i, row);
    }
  }
  // body(i, k) at vector k of row i.
  template <class Body>
  ONEPASS_FUNCTION void each_vector(Cursor& at, int64 first, const Body& body) const {
    each_row(at, first, [&](int i, int64) {
      for_vectors<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
        at.set_column(column, count);
        if constexpr (Config::kStages > 0) at.set_vector(k);
        body(i, k);
      });
    });
  }
  const arguments& a_;
  const int across_ = static_cast<int>(threadIdx.x) % Config::kAcross;
  row_threads<Config> threads_;
  char* const copies_;
};

ONEPASS_END
