// Forward of lines whose row words are all endings, with no rows among the results, on CUDA: a row passes through the
// threads that share it, kHeldVectors vectors of each at a time, and only what its numbers are made of stays.
#pragma once

#include "onepass/kernel/row/rowwise.cuda.h"
#include "onepass/kernel/row/shapes.h"

ONEPASS_BEGIN

// What a row's statistics are taken with in place of row_threads: adds up what this thread has of the row so far...
template <class Config, int Needs = kOwnNeeds>
struct gatherer {
  static constexpr bool kHasNumbers = true, kAtOnce = false, kGathers = true;
  static constexpr pick kPick = pick::elsewhere;
  static constexpr int kCombined = 0, kNeeds = Needs;
  using T = typename Config::arithmetic;
  T total[kPartNumbers] = {static_cast<T>(-kInfinity)};  // of exponentials, none
  bool any = false;
  template <int N, class Combine>
  ONEPASS_FUNCTION numbers<T, N> reduce(numbers<T, N> own, Combine combine) {
    store_numbers(any ? combine(load_numbers<N>(total), own) : own, total);
    any = true;
    return own;
  }
  // Those are what there was, too.
  template <int N, bool Products>
  ONEPASS_FUNCTION numbers<T, N> reduce(numbers<T, N> all, merge_exponentials_and<Products>) {
    store_numbers(all, total);
    return all;
  }
};
// ... and what all threads have, which takes its place: those that gathered are combined once.
template <class Config, class Gatherer, bool Combined>
struct gathered_by_all {
  static constexpr bool kHasNumbers = false, kAtOnce = false;
  static constexpr pick kPick = pick::again;
  static constexpr int kCombined = 0, kNeeds = Gatherer::kNeeds;
  row_threads<Config>& threads;
  Gatherer& gathered;
  template <int N, class Combine>
  ONEPASS_FUNCTION auto reduce(numbers<typename Config::arithmetic, N>, Combine combine) {
    const auto own = load_numbers<N>(gathered.total);
    if constexpr (Combined) {
      return own;
    } else {
      const auto all = threads.reduce(own, combine);
      store_numbers(all, gathered.total);
      return all;
    }
  }
};

// Several endings have one sum of exponentials: the first of them gathers what all need.
template <class Ending>
inline constexpr int needs_of_ending = -1;  // none of it
template <>
inline constexpr int needs_of_ending<word::logsumexp> = 0;
template <>
inline constexpr int needs_of_ending<word::entropy> = kProducts;
template <int I>
inline constexpr int needs_of_ending<word::with_target<word::logprob, I>> = kTarget;
template <int I>
inline constexpr int needs_of_ending<word::with_target<word::cross_entropy, I>> = kTotal | kTarget;

template <class Line>
struct gathering {
  template <int I>
  static constexpr int needs_at = needs_of_ending<typename Line::template segment_at<I>::row>;
  // What endings from I on need, and the first that needs any.
  template <int I = 0>
  static constexpr int needs() {
    if constexpr (I == Line::segments) return 0;
    else return needs_at<I> < 0 ? needs<I + 1>() : needs_at<I> | needs<I + 1>();
  }
  template <int I = 0>
  static constexpr int first() {
    if constexpr (needs_at<I> >= 0) return I;
    else return first<I + 1>();
  }
  // Which ending gathers for ending I.
  template <int I>
  static constexpr int by() {
    if constexpr (needs_at<I> < 0) return I;
    else return first();
  }
};
template <class Config, class Line>
using line_gatherer = gatherer<Config, gathering<Line>::needs()>;

// Of the vectors in `held`, which begin at column `first`, what endings from I on are made of.
template <class Config, class Line, int I, class Value>
ONEPASS_FUNCTION void gather(const arguments& a, int64 row, int across,
                             line_gatherer<Config, Line> (&to)[Line::segments],
                             pack<typename Config::arithmetic, Config::kVectorSize>* held, const Value& value,
                             typename Config::index first, bool whole) {
  using segment = typename Line::template segment_at<I>;
  static_assert(gives_number<typename segment::row> && same_type<typename segment::post, chain<>>);
  if constexpr (gathering<Line>::template by<I>() == I)
    statistics<Config, segment>(a, row, across, to[I], held, value, first, whole);
  if constexpr (I + 1 < Line::segments) gather<Config, Line, I + 1>(a, row, across, to, held, value, first, whole);
}

// value(k, column, count): the vector at this column, read again.
template <class Config, class Line, int I, class Value>
ONEPASS_FUNCTION void finish_gathered(const arguments& a, int64 row, int across, row_threads<Config>& threads,
                                      line_gatherer<Config, Line> (&of)[Line::segments],
                                      pack<typename Config::arithmetic, Config::kVectorSize>* held,
                                      const Value& value) {
  using segment = typename Line::template segment_at<I>;
  constexpr int kBy = gathering<Line>::template by<I>();
  gathered_by_all<Config, line_gatherer<Config, Line>, kBy != I> whole{threads, of[kBy]};
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
  cursor<Config, Line> at(a);
  L held[Config::kHeldVectors];
  const saved_numbers<typename Config::arithmetic, Line::segments> none{};
  const auto read = [&](int, index column, int count) {
    at.set_column(column, count);
    return value_before<Line, 0>(L(at.x()), none, at);
  };
  const auto value = [&](int k, index, int) { return held[k]; };
  for (int64 row = thread.first; row < a.rows; row += thread.step) {
    at.set_row(row);
    line_gatherer<Config, Line> gathered[Line::segments];
    for_steps<Config>(a, [&](index first, bool whole) {
      for_vectors<Config>(a, thread.across, first, whole,
                          [&](int k, index column, int count) { held[k] = read(k, column, count); });
      gather<Config, Line, 0>(a, row, thread.across, gathered, held, value, first, whole);
    });
    finish_gathered<Config, Line, 0>(a, row, thread.across, threads, gathered, held, read);
  }
}

ONEPASS_END
