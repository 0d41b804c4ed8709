// A thread's vectors of a row on CUDA, and the row's statistics: what each thread has of them, combined.
#pragma once

#include "onepass/kernel/common/cursor.cuda.h"
#include "onepass/kernel/common/online_softmax.cuda.h"
#include "onepass/kernel/common/reduce.cuda.h"

ONEPASS_BEGIN

// The first column of this thread's vector k, or of the block's.
template <class Config>
ONEPASS_FUNCTION typename Config::index column_of(int k, int across) {
  const int block = Config::kCluster > 1 ? cluster_rank() : 0;
  return ((block * Config::kHeldVectors + k) * Config::kAcross + across) * Config::kVectorSize;
}

// A thread's vectors of the row from column `first` on: body(k, column, count), k counting from 0. Where the row ends
// with a whole vector, vectors behind it are left out, and the compiler knows the count: no element is masked. `whole`:
// the row has all of them.
template <class Config, class Body>
ONEPASS_FUNCTION void for_vectors(const arguments& a, int across, typename Config::index first, bool whole,
                                  const Body& body) {
  constexpr int V = Config::kVectorSize;
#pragma unroll
  for (int k = 0; k < Config::kHeldVectors; ++k) {
    const auto column = first + column_of<Config>(k, across);
    const bool is_whole = whole || k < Config::kWholeVectors;
    if constexpr (Config::kAccess == V || Config::kInHalves) {
      if (Config::kExact || is_whole || column < static_cast<typename Config::index>(a.columns))
        body(k, column, !Config::kRagged || is_whole ? V : count_at<V>(column, a.columns));
    } else {
      body(k, column, is_whole ? V : count_at<V>(column, a.columns));
    }
  }
}
template <class Config, class Body>
ONEPASS_FUNCTION void for_vectors(const arguments& a, int across, typename Config::index first, const Body& body) {
  for_vectors<Config>(a, across, first, false, body);
}
template <class Config, class Body>
ONEPASS_FUNCTION void for_vectors(const arguments& a, int across, const Body& body) {
  for_vectors<Config>(a, across, 0, body);
}

// A row that its threads pass over, so many vectors of each at a time: body(first, whole), where the row has all of a
// step's columns but of the last one's.
template <class Config, class Body>
ONEPASS_FUNCTION void for_steps(const arguments& a, const Body& body) {
  using index = typename Config::index;
  constexpr index kColumns = Config::kAcross * Config::kHeldVectors * Config::kVectorSize;
  const auto columns = static_cast<index>(a.columns);
  index first = 0;
  for (; first + kColumns <= columns; first += kColumns) body(first, true);
  if (!Config::kExact && first < columns) body(first, false);
}

// What a row word needs beside the sum of its exponentials: each of them times its exponent, the sum of the values,
// the value at its target.
enum beside_exponentials : int { kProducts = 1, kTotal = 2, kTarget = 4 };
// Threads that sum up for several row words at once say what for.
inline constexpr int kOwnNeeds = -1;
template <class Threads>
constexpr int needs_of(int own) {
  if constexpr (requires { Threads::kNeeds; }) return Threads::kNeeds == kOwnNeeds ? own : Threads::kNeeds;
  else return own;
}

// The row as a row word sees it (see word/row.h), each of its statistics in one reduction by Threads (row_threads, or
// a half of it). Value(k, column, count) gives a vector: held, or made anew.
template <class Config, class Threads, class Value>
class thread_row {
 public:
  using T = typename Config::arithmetic;
  using vector = pack<T, Config::kVectorSize>;
  using lane = vector;
  static constexpr bool kHeld = Threads::kAtOnce && !Config::kRecomputes, kCentred = kHeld;

  ONEPASS_FUNCTION thread_row(const arguments& a, int across, Threads& threads, vector* held, const Value& value,
                              typename Config::index first, bool whole)
      : a_(a), across_(across), threads_(threads), held_(held), value_(value), first_(first), whole_(whole) {}

  ONEPASS_FUNCTION T inverse_columns() const { return static_cast<T>(a_.inverse_columns); }
  ONEPASS_FUNCTION T squares() {
    vector total(T(0));
    each([&](int k, typename Config::index column, int count) {
      const vector value = where(first_n<vector>(count), value_(k, column, count), vector(T(0)));
      total = k == 0 ? value * value : fma(value, value, total);
    });
    return threads_.reduce(numbers<T, 1>{{sum_lanes(total)}}, plus()).v[0];
  }
  // In two passes: over the row where a warp has it, else over each thread's own elements, whose results are merged.
  ONEPASS_FUNCTION word::row_moments<T> moments() {
    constexpr bool kInWarp = Threads::kAtOnce && Config::kAcross <= 32 && Config::kCluster == 1;
    vector total(T(0));
    each([&](int k, typename Config::index column, int count) {
      const vector value = where(first_n<vector>(count), value_(k, column, count), vector(T(0)));
      total = k == 0 ? value : total + value;
    });
    T size = T(0), inverse = inverse_columns(), sum = sum_lanes(total);
    if constexpr (kInWarp) sum = threads_.reduce(numbers<T, 1>{{sum}}, plus()).v[0];
    else size = size_of_own(inverse);
    const T mean = sum * inverse;
    vector first(T(0)), second(T(0));
    each([&](int k, typename Config::index column, int count) {
      const vector centred = where(first_n<vector>(count), value_(k, column, count) - vector(mean), vector(T(0)));
      if constexpr (kCentred) held_[k] = centred;
      if constexpr (!kShort) first = k == 0 ? centred : first + centred;
      second = k == 0 ? centred * centred : fma(centred, centred, second);
    });
    constexpr int kSums = kShort ? 1 : 2;
    numbers<T, kSums> sums;
    sums.v[0] = sum_lanes(second);
    if constexpr (!kShort) sums.v[1] = sum_lanes(first);
    if constexpr (kInWarp) sums = threads_.reduce(sums, plus());
    T rest = T(0), squares = sums.v[0];
    if constexpr (!kShort) {
      rest = sums.v[1] * inverse;  // what rounding took from the mean
      squares -= rest * sums.v[1];
    }
    held_are_centred_ = kCentred;
    held_centre_ = rest;
    if constexpr (kInWarp) return {mean, rest, squares * inverse};
    numbers<T, kShort ? 2 : 3> own;
    own.v[0] = squares, own.v[1] = mean;
    if constexpr (!kShort) own.v[2] = rest;
    const word::row_moments<T> all = merged(own, size);
    held_centre_ = (all.mean - mean) + all.rest;
    return {all.mean, all.rest, all.variance * inverse_columns()};
  }
  ONEPASS_FUNCTION word::pair<T> exponentials() { return exponentials_sum<kHeld>(); }
  ONEPASS_FUNCTION word::pair<T> sum_of_exponentials() {
    const auto of = sums_of_exponentials<0>();
    return {of.shift, of.sum};
  }
  ONEPASS_FUNCTION T total() {
    return sum([](vector u) { return u; });
  }
  template <class F>
  ONEPASS_FUNCTION T sum(const F& f) {
    vector sum(T(0));
    each([&](int k, typename Config::index column, int count) {
      sum = sum + where(first_n<vector>(count), f(value_(k, column, count)), vector(T(0)));
    });
    return threads_.reduce(numbers<T, 1>{{sum_lanes(sum)}}, plus()).v[0];
  }
  template <class F>
  ONEPASS_FUNCTION word::pair<T> sum_pair(const F& f) {
    const vector none(T(0));
    word::terms<vector> sums{none, none};
    each([&](int k, typename Config::index column, int count) {
      const word::terms<vector> here = f(value_(k, column, count));
      const auto present = first_n<vector>(count);
      sums = sums + word::terms<vector>{where(present, here.first, none), where(present, here.second, none)};
    });
    const auto all = threads_.reduce(numbers<T, 2>{{sum_lanes(sums.first), sum_lanes(sums.second)}}, plus());
    return {all.v[0], all.v[1]};
  }
  ONEPASS_FUNCTION T largest_magnitude() {
    T best = T(0);
    each([&](int k, typename Config::index column, int count) {
      best = largest_magnitude_of(value_(k, column, count), count, best);
    });
    return threads_.reduce(numbers<T, 1>{{best}}, merge_magnitude()).v[0];
  }
  // A NaN is the largest of all.
  ONEPASS_FUNCTION word::pair<T> largest() {
    T best = static_cast<T>(-kInfinity), times = T(0);
    each([&](int k, typename Config::index column, int count) {
      const vector value = value_(k, column, count);
#pragma unroll
      for (int i = 0; i < Config::kVectorSize; ++i) {
        if (i < count) merge_largest::add(best, times, value.v[i], T(1));
      }
    });
    const auto all = threads_.reduce(numbers<T, 2>{{best, times}}, merge_largest());
    return {all.v[0], all.v[1]};
  }
  ONEPASS_FUNCTION word::picked<T> picked_exponentials(int64 at) {
    const auto of = sums_of_exponentials<kTotal | kTarget>(at);
    return {of.shift, of.sum, of.picked, of.total};
  }
  ONEPASS_FUNCTION word::weighted<T> weighted_exponentials() {
    const auto of = sums_of_exponentials<kProducts>();
    return {of.shift, of.sum, of.products};
  }
  // What forward takes with the values that are held now.
  template <class Row>
  ONEPASS_FUNCTION word::row_numbers<T> for_held(word::row_numbers<T> saved) const {
    if constexpr (word::is_of_sums<Row>) return saved;  // with the third
    return {held_are_centred_ ? held_centre_ : saved.first, saved.second * held_factor_};
  }

 private:
  template <class Body>
  ONEPASS_FUNCTION void each(const Body& body) const {
    if constexpr (Threads::kHasNumbers) for_vectors<Config>(a_, across_, first_, whole_, body);
  }
  ONEPASS_FUNCTION T own_largest() const {
    const vector lowest(static_cast<T>(-kInfinity));
    vector best = lowest;
    each([&](int k, typename Config::index column, int count) {
      const vector value = where(first_n<vector>(count), value_(k, column, count), lowest);
      best = k == 0 ? value : ONEPASS_TARGET::max(best, value);
    });
    return max_lanes(best);
  }
  // Exponentials take no value's place. at: the target's column, or -1.
  struct exponential_sums {
    T shift, sum, products = T(0), total = T(0), picked = T(0);
  };
  template <int Needs>
  ONEPASS_FUNCTION exponential_sums sums_of_exponentials([[maybe_unused]] int64 at = -1) {
    constexpr int kNeeds = needs_of<Threads>(Needs);
    constexpr bool kHasProducts = kNeeds & kProducts, kHasTotal = kNeeds & kTotal,
                   kPicks = kNeeds & kTarget && Threads::kPick == pick::in_passing;
    static_assert((Needs & ~kNeeds & ~kTotal) == 0, "what gathers for this row word does not know of it");
    constexpr int kAt = 2 + kHasProducts, kCount = kAt + kHasTotal + kPicks;
    using merge = merge_exponentials_and<kHasProducts>;
    numbers<T, kCount> own = merge::template none<T, kCount>();
    if constexpr (Threads::kHasNumbers) {
      T largest = own_largest();
      if constexpr (Threads::kGathers) largest = max_number(largest, threads_.total[0]);
      const T shift = shift_of(largest);
      vector sum(T(0)), products(T(0)), total(T(0));
      T picked = T(0);
      each([&](int k, typename Config::index column, int count) {
        const vector value = value_(k, column, count);
        const auto present = first_n<vector>(count);
        const vector term = where(present, exp_term(value, shift), vector(T(0)));
        sum = k == 0 ? term : sum + term;
        if constexpr (kHasProducts) {
          const vector exponent = ONEPASS_TARGET::max(value - vector(shift), vector(T(-1000)));  // not -inf times 0
          products = fma(term, where(present, exponent, vector(T(0))), products);
        }
        if constexpr (kHasTotal) total = total + where(present, value, vector(T(0)));
        if constexpr (kPicks) picked += element_of(value, at - static_cast<int64>(column));
      });
      own.v[0] = largest, own.v[1] = sum_lanes(sum);
      if constexpr (kHasProducts) own.v[2] = sum_lanes(products);
      if constexpr (kHasTotal) own.v[kAt] = sum_lanes(total);
      if constexpr (kPicks) own.v[kCount - 1] = picked;
      if constexpr (Threads::kGathers) own = merge::onto(own, load_numbers<kCount>(threads_.total));
    }
    const auto all = threads_.reduce(own, merge());
    exponential_sums of{shift_of(all.v[0]), all.v[1]};
    if constexpr (kHasProducts) of.products = all.v[2];
    if constexpr (kHasTotal) of.total = all.v[kAt];
    if constexpr (kPicks) of.picked = all.v[kCount - 1];
    if constexpr (Threads::kPick == pick::again) of.picked = element_at(at);
    return of;
  }
  // The vector's element i, 0 where it has none.
  static ONEPASS_FUNCTION T element_of(vector of, int64 i) {
    constexpr int V = Config::kVectorSize;
    static_assert((V & (V - 1)) == 0);
    if (static_cast<uint64>(i) >= V) return T(0);
    const auto at = static_cast<int>(i);
#pragma unroll
    for (int half = V / 2; half > 0; half /= 2) {
#pragma unroll
      for (int k = 0; k < half; ++k) of.v[k] = (at & half) != 0 ? of.v[k + half] : of.v[k];
    }
    return of.v[0];
  }
  // The row's, for its first thread.
  ONEPASS_FUNCTION T element_at(int64 column) const {
    if (across_ != 0 || column < 0) return T(0);
    constexpr int V = Config::kVectorSize;
    const auto first = static_cast<typename Config::index>(column / V * V);
    return element_of(value_(0, first, count_at<V>(first, a_.columns)), column % V);
  }
  // Replace: each value by its exponential. Each thread has its own shift at first, and keeps it in what it holds.
  template <bool Replace>
  ONEPASS_FUNCTION word::pair<T> exponentials_sum() {
    const T largest = own_largest(), shift = shift_of(largest);
    vector total(T(0));
    each([&](int k, typename Config::index column, int count) {
      const vector given = value_(k, column, count);
      const vector value = Replace ? exp_minus(given, shift) : exp_term(given, shift);
      if constexpr (Replace) held_[k] = value;
      const vector present = where(first_n<vector>(count), value, vector(T(0)));
      total = k == 0 ? present : total + present;
    });
    const auto all = threads_.reduce(numbers<T, 2>{{largest, sum_lanes(total)}}, merge_exponentials());
    const T whole_shift = shift_of(all.v[0]);
    if constexpr (Replace) held_factor_ = exp_minus_number(largest, whole_shift);  // 0 where all is -infinity
    return {whole_shift, all.v[1]};
  }
  // Of all threads; a variance times the row's length.
  template <int N>
  ONEPASS_FUNCTION word::row_moments<T> merged(numbers<T, N> own, T size) {
    const auto moments = [](const auto& of) {
      if constexpr (N > 2) return word::row_moments<T>{of.v[1], of.v[2], of.v[0]};
      else return word::row_moments<T>{of.v[1], T(0), of.v[0]};
    };
    if constexpr (Config::kExact && Threads::kCombined > 0 && power_of_two_from(Config::kAcross) == Config::kAcross) {
      return moments(threads_.reduce(own, merge_equal<T>{size * T(Threads::kCombined)}));
    } else {
      numbers<T, N + 1> with_size;
#pragma unroll
      for (int i = 0; i < N; ++i) with_size.v[i] = own.v[i];
      with_size.v[N] = size;
      return moments(threads_.reduce(with_size, merge()));
    }
  }
  // How many elements this thread has, and the inverse.
  ONEPASS_FUNCTION T size_of_own(T& inverse) const {
    if constexpr (Config::kExact) {
      inverse = T(1.0 / (Config::kHeldVectors * Config::kVectorSize));
      return Config::kHeldVectors * Config::kVectorSize;
    } else {
      int present = 0;
      each([&](int, typename Config::index, int count) { present += count; });
      const T size = static_cast<T>(present);
      inverse = size > T(0) ? reciprocal_number(size) : T(0);
      return size;
    }
  }
  const arguments& a_;
  int across_;
  Threads& threads_;
  vector* held_;
  const Value& value_;
  const typename Config::index first_;
  const bool whole_;
  bool held_are_centred_ = false;
  T held_centre_ = T(0), held_factor_ = T(1);
};

// The statistics of a row, or of its vectors from column `first` on, all of which there are where `whole`: those to
// save, and those that forward uses on the values that this thread holds. Segment: one of a line's, or the line itself,
// which stands for its last.
template <class T>
struct row_statistics {
  word::row_numbers<T> saved, for_held;
};
template <class Config, class Segment, class Threads, class Value>
ONEPASS_FUNCTION row_statistics<typename Config::arithmetic> statistics(
    const arguments& a, int64 row, int across, Threads& threads,
    pack<typename Config::arithmetic, Config::kVectorSize>* held, const Value& value, typename Config::index first = 0,
    bool whole = false) {
  using T = typename Config::arithmetic;
  T parameter = T(0);
  if constexpr (Segment::row_parameter >= 0) parameter = static_cast<T>(a.parameter[Segment::row_parameter]);
  thread_row<Config, Threads, Value> of_row(a, across, threads, held, value, first, whole);
  using row_word = typename Segment::row;
  word::row_numbers<T> saved;
  if constexpr (word::is_of_sums<row_word>) {
    saved = row_word::statistics(of_row, own_numbers_of<row_word>(numbers_of_call<T, arguments>{a}));
  } else if constexpr (target_operand<row_word> < 0) {
    saved = row_word::statistics(of_row, parameter);
  } else {
    word::target at;
    if constexpr (Threads::kPick != pick::elsewhere)
      at = row_target<Config, row_word, false>(a, row).of(Segment::row_parameter);
    saved = row_word::statistics(of_row, parameter, at, a.parameter + Segment::row_parameter);
  }
  return {saved, of_row.template for_held<row_word>(saved)};
}

// Adds the terms of a vector's first `count` elements to the sums of a row in backward. Segment: a line's, or the line
// in the place of its last.
template <class Segment, class L, class T, class Cursor>
ONEPASS_FUNCTION void add_terms(word::terms<L> here, const word::row_numbers<T>& saved, Cursor& at, int count,
                                word::terms<L>& to) {
  const auto present = first_n<L>(count);
  const L none(0);
  add_row_terms<typename Segment::row>(where(present, here.first, none), where(present, here.second, none), saved, at,
                                       to);
}

// What statistics are saved, [statistics][rows], those of row word I behind those of the row words before it. X: x's
// dtype, or one of its size.
template <class Line, dtype X = dtype::bf16, int I = Line::segments - 1, class T>
ONEPASS_FUNCTION void save(const arguments& a, int64 row, word::row_numbers<T> saved) {
  constexpr int kNumbers = statistics_of(Line::template segment_at<I>::row::about, X);
  T* statistics = static_cast<T*>(a.statistics) + a.rows * Line::template statistics_before<I, X>();
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) statistics[i * a.rows + row] = word::saved_number(saved, i);
}
// The number that row word I gives, if it is an ending.
template <class Config, class Segment, class T>
ONEPASS_FUNCTION void store_number(const arguments& a, int64 row, word::row_numbers<T> of) {
  if constexpr (gives_number<typename Segment::row>)
    *row_number<Config, Segment::number, false>(a, static_cast<typename Config::index>(row)) = Segment::row::number(of);
}
template <class Line, class T, dtype X = dtype::bf16, int I = Line::segments - 1>
ONEPASS_FUNCTION word::row_numbers<T> saved_of(const arguments& a, int64 row) {
  using row_word = typename Line::template segment_at<I>::row;
  constexpr int kNumbers = is_resumed<row_word> ? 0 : statistics_of(row_word::about, X);
  const T* statistics = static_cast<const T*>(a.statistics) + a.rows * Line::template statistics_before<I, X>();
  word::row_numbers<T> saved{T(0), T(0)};
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) word::saved_number(saved, i) = statistics[i * a.rows + row];
  return saved;
}
// Of row words [I, End), in backward with the gradients of the numbers that endings give; of a row past the last one
// nothing is read.
template <class Config, class Line, bool Backward, int I = 0, int End = Line::segments, class T>
ONEPASS_FUNCTION void read_saved(const arguments& a, int64 row, saved_numbers<T, Line::segments>& to) {
  using segment = typename Line::template segment_at<I>;
  to.of[I] = row < a.rows ? saved_of<Line, T, Config::kX, I>(a, row) : word::row_numbers<T>{T(0), T(0)};
  if constexpr (Backward && gives_number<typename segment::row>) {
    if (row < a.rows)
      to.of[I].gradient = *row_number<Config, segment::number, true>(a, static_cast<typename Config::index>(row));
  }
  if constexpr (Backward && target_operand<typename segment::row> >= 0) {
    const word::target at = row_target<Config, typename segment::row, true>(a, row).of(segment::row_parameter);
    to.of[I] =
        segment::row::prepared(to.of[I], at, a.parameter + segment::row_parameter, static_cast<T>(a.inverse_columns));
  } else if constexpr (Backward && requires { segment::row::prepared(to.of[I]); }) {
    to.of[I] = segment::row::prepared(to.of[I]);
  }
  if constexpr (I + 1 < End) read_saved<Config, Line, Backward, I + 1, End>(a, row, to);
}
template <class Config, class Line, bool Backward>
ONEPASS_FUNCTION auto all_saved_of(const arguments& a, int64 row) {
  saved_numbers<typename Config::arithmetic, Line::segments> all;
  read_saved<Config, Line, Backward>(a, row, all);
  if constexpr (Backward) share_probabilities<Line>(all);
  return all;
}

ONEPASS_END
