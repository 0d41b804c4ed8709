// The prologue of kernels whose warps multiply: the words before `linear` make the rows that their block multiplies.
#pragma once

#include "onepass/kernel/row/statistics.cuda.h"

ONEPASS_BEGIN

// The arguments of those kernels.
struct warp_linear_arguments {
  const void* matrix;  // [columns, k], its rows `stride` elements apart
  int64 stride, k;
  arguments behind, before;
};

// A vector of a row that a thread keeps in registers until it has the row's statistics: what enters the row word, or,
// where that is x itself (kRecomputes), x as it is stored.
template <class Config, bool AsStored = Config::kRecomputes != 0>
struct kept_vector {
  using type = pack<typename Config::arithmetic, Config::kVectorSize>;
  static ONEPASS_FUNCTION type unpack(type vector) { return vector; }
  static ONEPASS_FUNCTION type* lanes(type* row) { return row; }
};
template <class Config>
struct kept_vector<Config, true> {
  using x = memory<Config::kX, Config::kVectorSize, Config::kAccess>;
  using type = typename x::buffer;
  static ONEPASS_FUNCTION auto unpack(type vector) {
    return x::template numbers_of<typename Config::arithmetic>(vector);
  }
  static ONEPASS_FUNCTION pack<typename Config::arithmetic, Config::kVectorSize>* lanes(type*) { return nullptr; }
};

// Makes rows of linear's input, Config::kAtOnce for each thread at a time. Cursor: where they go. kAllExist: every row
// that a thread is asked for exists. kRecomputes: x enters the row word, and a thread keeps it as it is stored.
// kStages: 1 where each thread prefetches its part of x (Config::kStreams) into shared memory, else 0.
template <class Config, class Line, class Cursor = cursor<Config, Line>>
class input_rows {
 public:
  static constexpr int kRows = Config::kDown * Config::kAtOnce;

  static constexpr int kCopyBytes = Config::kStages * kRows * Cursor::kRunBytes;

  ONEPASS_FUNCTION input_rows(const arguments& a, typename row_threads<Config>::slots& shared, char* copies = nullptr)
      : a_(a), threads_(shared), copies_(copies) {}

  // Prefetches x of kRows rows from `first` on: one group of asynchronous copies.
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
  // Makes kRows rows from `first` on, which load_async has prefetched where kStages is 1, and prefetches those from
  // `next` on. take(at, i, k, vector): vector k of this thread's row i.
  template <class Take>
  ONEPASS_FUNCTION void make(int64 first, int64 next, const Take& take) {
    Cursor at(a_);
    if constexpr (Config::kStages > 0) wait_for_copy_groups<0>();
    else each_vector(at, next, [&](int, int) { at.prefetch_inputs(); });
    if constexpr (same_type<typename Line::row, void>) {
      each_vector(at, first, [&](int i, int k) { take(at, i, k, Line::pre::forward(at.x(), at)); });
      if constexpr (Config::kStages > 0) load_async(next);
    } else {
      typename holder::type kept[Config::kAtOnce][Config::kHeldVectors]{};
      each_vector(at, first, [&](int i, int k) {
        if constexpr (Config::kRecomputes) kept[i][k] = at.x_stored();
        else kept[i][k] = Line::pre::forward(at.x(), at);
      });
      if constexpr (Config::kStages > 0) load_async(next);
      each_row(at, first, [&](int i, int64 row) {
        const auto value = [&](int k, typename Config::index, int) { return holder::unpack(kept[i][k]); };
        const auto of_row = statistics<Config, Line>(a_, 0, across_, threads_, holder::lanes(kept[i]), value);
        word::row_numbers<T> saved = of_row.saved;
        if (Config::kSavesStatistics && at.is_first() && row < a_.rows && across_ == 0)
          save<Line, Config::kX>(a_, row, saved);
        if constexpr (!Config::kRecomputes) saved = of_row.for_held;
        for_vectors<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
          at.set_column(column, count);
          using row_of = thread_row<Config, row_threads<Config>, decltype(value)>;
          const L z = row_forward<typename Line::row, row_of>(value(k, column, count), saved, at);
          take(at, i, k, Line::post::forward(z, at));
        });
      });
    }
  }
  // The same, with the rows stored by the cursor.
  ONEPASS_FUNCTION void make(int64 first, int64 next) {
    make(first, next, [](Cursor& at, int, int, L value) { at.store_y(value); });
  }

 private:
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kVectorSize>;
  using holder = kept_vector<Config>;

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
