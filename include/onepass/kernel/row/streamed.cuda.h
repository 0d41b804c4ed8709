// Forward of lines whose row words are all endings, with no rows among the results, on CUDA: a row passes through the
// threads that share it, kHeldVectors vectors of each at a time, and only what its numbers are made of stays.
#pragma once

#include "onepass/kernel/row/rowwise.cuda.h"
#include "onepass/kernel/row/shapes.h"

ONEPASS_BEGIN

// What a row's statistics are taken with in place of row_threads: adds up what this thread has of the row so far...
template <class Config>
struct gatherer {
  static constexpr bool kHasNumbers = true, kAtOnce = false;
  static constexpr int kCombined = 0;
  using T = typename Config::arithmetic;
  T total[kPartNumbers];
  bool any = false;
  template <int N, class Combine>
  ONEPASS_FUNCTION numbers<T, N> reduce(numbers<T, N> own, Combine combine) {
    store_numbers(any ? combine(load_numbers<N>(total), own) : own, total);
    any = true;
    return own;
  }
};
// ... and what all threads have, which it leaves at `to` where that is given.
template <class Config>
struct gathered_by_all {
  static constexpr bool kHasNumbers = false, kAtOnce = false;
  static constexpr int kCombined = 0;
  using T = typename Config::arithmetic;
  row_threads<Config>& threads;
  const gatherer<Config>& gathered;
  T* to = nullptr;
  template <int N, class Combine>
  ONEPASS_FUNCTION numbers<T, N> reduce(numbers<T, N>, Combine combine) {
    const auto all = threads.reduce(load_numbers<N>(gathered.total), combine);
    if (to && threadIdx.x == 0) store_numbers(all, to);
    return all;
  }
};

template <class Chain>
inline constexpr bool has_words = true;
template <>
inline constexpr bool has_words<chain<>> = false;

// Of the vectors in `held`, which begin at column `first`, what endings from I on are made of.
template <class Config, class Line, int I, class Value>
ONEPASS_FUNCTION void gather(const arguments& a, int64 row, int across, gatherer<Config> (&to)[Line::segments],
                             cursor<Config, Line>& at, pack<typename Config::arithmetic, Config::kVectorSize>* held,
                             const Value& value, typename Config::index first) {
  using segment = typename Line::template segment_at<I>;
  static_assert(gives_number<typename segment::row>, "the row goes on unchanged");
  statistics<Config, segment>(a, row, across, to[I], held, value, first);
  if constexpr (has_words<typename segment::post>) {
    for_vectors<Config>(a, across, first, [&](int k, typename Config::index column, int count) {
      at.set_column(column, count);
      held[k] = segment::post::recompute(held[k], at);
    });
  }
  if constexpr (I + 1 < Line::segments) gather<Config, Line, I + 1>(a, row, across, to, at, held, value, first);
}

template <class Config, class Line, int I, class Value>
ONEPASS_FUNCTION void finish_gathered(const arguments& a, int64 row, int across, row_threads<Config>& threads,
                                      const gatherer<Config> (&of)[Line::segments],
                                      pack<typename Config::arithmetic, Config::kVectorSize>* held,
                                      const Value& value) {
  using segment = typename Line::template segment_at<I>;
  gathered_by_all<Config> whole{threads, of[I]};
  const auto saved = statistics<Config, segment>(a, row, across, whole, held, value).saved;
  if (across == 0) {
    if constexpr (Config::kSavesStatistics) save<Line, Config::kX, I>(a, row, saved);
    store_number<Config, segment>(a, row, saved);
  }
  if constexpr (I + 1 < Line::segments) finish_gathered<Config, Line, I + 1>(a, row, across, threads, of, held, value);
}

template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_forward_streamed(const arguments& a) {
  using L = pack<typename Config::arithmetic, Config::kVectorSize>;
  using index = typename Config::index;
  static_assert(Config::kDown == 1 && Config::kCluster == 1);
  __shared__ typename row_threads<Config>::slots shared;
  row_threads<Config> threads(shared);
  const rows_of_thread<Config> thread(a);
  constexpr index kColumns = Config::kAcross * Config::kHeldVectors * Config::kVectorSize;
  cursor<Config, Line> at(a);
  L held[Config::kHeldVectors];
  const auto value = [&](int k, index, int) { return held[k]; };
  const saved_numbers<typename Config::arithmetic, Line::segments> none{};
  for (int64 row = thread.first; row < a.rows; row += thread.step) {
    at.set_row(row);
    gatherer<Config> gathered[Line::segments];
    for (index first = 0; first < static_cast<index>(a.columns); first += kColumns) {
      for_vectors<Config>(a, thread.across, first, [&](int k, index column, int count) {
        at.set_column(column, count);
        held[k] = value_before<Line, 0>(L(at.x()), none, at);
      });
      gather<Config, Line, 0>(a, row, thread.across, gathered, at, held, value, first);
    }
    finish_gathered<Config, Line, 0>(a, row, thread.across, threads, gathered, held, value);
  }
}

ONEPASS_END
