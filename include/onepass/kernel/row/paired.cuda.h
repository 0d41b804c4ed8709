// Forward on CUDA of lines whose row word has another row beside its own, such as `kl_div`: kAcross threads pass over
// both rows, kHeldVectors vectors of each at a time, once for the sums of exponentials, and once more where the word
// asks for sums of what these make of both.
#pragma once

#include "onepass/kernel/row/rowwise.cuda.h"

ONEPASS_BEGIN

// Of two rows a and b the largest of each, and, of both less those, Σ exp(a), Σ exp(a) (a - b) and Σ exp(b).
template <class T>
struct differences {
  numbers<T, 2> largest;
  numbers<T, 3> sums;
};
struct larger_of_both {
  ONEPASS_FUNCTION void next_level() {}
  template <class T>
  ONEPASS_FUNCTION numbers<T, 2> operator()(numbers<T, 2> a, numbers<T, 2> b) const {
    return {{max_number(a.v[0], b.v[0]), max_number(a.v[1], b.v[1])}};
  }
};
// A part's sums with what is largest of all.
template <class T>
ONEPASS_FUNCTION numbers<T, 3> moved(const differences<T>& of, numbers<T, 2> largest) {
  const T shift = shift_of(largest.v[0]), other_shift = shift_of(largest.v[1]);
  const T factor = exp_minus_number(of.largest.v[0], shift);
  const T apart = (shift_of(of.largest.v[0]) - shift) - (shift_of(of.largest.v[1]) - other_shift);
  // Where b is -infinity, what is nothing beside all may be infinitely much in its part.
  const T product = factor == T(0) ? T(0) : fma_number(of.sums.v[0], apart, of.sums.v[1]) * factor;
  return {{of.sums.v[0] * factor, product, of.sums.v[2] * exp_minus_number(of.largest.v[1], other_shift)}};
}

// Both rows, as the row word sees them (see word/row.h). Read(column, count, own, other) gives a vector of each.
template <class Config, class Read>
class paired_rows {
 public:
  using T = typename Config::arithmetic;
  using lane = pack<T, Config::kVectorSize>;

  ONEPASS_FUNCTION paired_rows(const arguments& a, int across, row_threads<Config>& threads, const Read& read)
      : a_(a), across_(across), threads_(threads), read_(read) {}

  // In one pass, each thread with its own shifts.
  ONEPASS_FUNCTION word::paired<T> paired_exponentials(bool of_row) { return of_row ? of<true>() : of<false>(); }
  template <class F>
  ONEPASS_FUNCTION word::pair<T> paired_sum(const F& f) {
    const lane none(T(0));
    word::terms<lane> sums{none, none};
    each_step([&](const lane(&own)[kVectors], const lane(&others)[kVectors], const int(&counts)[kVectors]) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const auto present = first_n<lane>(counts[k]);
        const word::terms<lane> here = f(own[k], others[k]);
        sums = sums + word::terms<lane>{where(present, here.first, none), where(present, here.second, none)};
      }
    });
    const auto all = threads_.reduce(numbers<T, 2>{{sum_lanes(sums.first), sum_lanes(sums.second)}}, plus());
    return {all.v[0], all.v[1]};
  }

 private:
  static constexpr int kVectors = Config::kHeldVectors;
  using index = typename Config::index;

  // OfRow: a is the row and b the other, else the other way round.
  template <bool OfRow>
  ONEPASS_FUNCTION word::paired<T> of() {
    constexpr T kLowest = static_cast<T>(-kInfinity);
    differences<T> all{{{kLowest, kLowest}}, {{T(0), T(0), T(0)}}};
    each_step([&](const lane(&own)[kVectors], const lane(&others)[kVectors], const int(&counts)[kVectors]) {
      const auto &as = OfRow ? own : others, &bs = OfRow ? others : own;
      differences<T> next{{{largest(as, counts), largest(bs, counts)}}, {{T(0), T(0), T(0)}}};
      const lane shift_a(shift_of(next.largest.v[0])), shift_b(shift_of(next.largest.v[1])), none(T(0));
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const auto present = first_n<lane>(counts[k]);
        const lane a = as[k] - shift_a, b = bs[k] - shift_b, term = where(present, exp_term(a, T(0)), none);
        next.sums.v[0] += sum_lanes(term);
        next.sums.v[1] += sum_lanes(word::weighted_difference(term, a, b));
        next.sums.v[2] += sum_lanes(where(present, exp_term(b, T(0)), none));
      }
      const numbers<T, 2> both = larger_of_both()(all.largest, next.largest);
      all = {both, plus()(moved(all, both), moved(next, both))};
    });
    const numbers<T, 2> largest_of_all = threads_.reduce(all.largest, larger_of_both());
    const numbers<T, 3> sums = threads_.reduce(moved(all, largest_of_all), plus());
    const T shift_a = shift_of(largest_of_all.v[0]), shift_b = shift_of(largest_of_all.v[1]);
    if constexpr (OfRow) return {shift_a, sums.v[0], shift_b, sums.v[2], sums.v[1]};
    else return {shift_b, sums.v[2], shift_a, sums.v[0], sums.v[1]};
  }
  static ONEPASS_FUNCTION T largest(const lane (&row)[kVectors], const int (&counts)[kVectors]) {
    const lane lowest(static_cast<T>(-kInfinity));
    lane best = lowest;
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      best = ONEPASS_TARGET::max(best, lane(where(first_n<lane>(counts[k]), row[k], lowest)));
    return max_lanes(best);
  }

  // body(own, others, counts) of the thread's vectors that it has at once; a count of 0: there is none.
  template <class Body>
  ONEPASS_FUNCTION void each_step(const Body& body) const {
    constexpr index kColumns = Config::kAcross * kVectors * Config::kVectorSize;
    for (index first = 0; first < static_cast<index>(a_.columns); first += kColumns) {
      lane own[kVectors], others[kVectors];
      int counts[kVectors] = {};
#pragma unroll
      for (int k = 0; k < kVectors; ++k) own[k] = others[k] = lane(T(0));
      for_vectors<Config>(a_, across_, first, [&](int k, index column, int count) {
        counts[k] = count;
        read_(column, count, own[k], others[k]);
      });
      body(own, others, counts);
    }
  }
  const arguments& a_;
  const int across_;
  row_threads<Config>& threads_;
  const Read& read_;
};

template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_forward_paired(const arguments& a) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kVectorSize>;
  using row_word = typename Line::row;
  static_assert(Config::kDown == 1 && Config::kCluster == 1 && Line::segments == 1);
  __shared__ typename row_threads<Config>::slots shared;
  row_threads<Config> threads(shared);
  const rows_of_thread<Config> thread(a);
  const auto weights = row_word::template weights_of<T>(a.parameter + row_word::parameter);
  const L scale(weights.scale);
  cursor<Config, Line> at(a);
  const auto read = [&](typename Config::index column, int count, L& own, L& other) {
    at.set_column(column, count);
    own = Line::pre::recompute(L(at.x()), at) * scale;
    other = at.template operand<L, row_word::operand>() * scale;
  };
  for (int64 row = thread.first; row < a.rows; row += thread.step) {
    at.set_row(row);
    paired_rows<Config, decltype(read)> rows(a, thread.across, threads, read);
    const auto saved = row_word::statistics(rows, weights);
    if (thread.across == 0) {
      if constexpr (Config::kSavesStatistics) save<Line, Config::kX>(a, row, saved);
      store_number<Config, Line>(a, row, saved);
    }
  }
}

ONEPASS_END
