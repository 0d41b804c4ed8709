// Forward on CUDA of lines whose row word has another row beside its own, such as `kl_div`: kAcross threads pass over
// both rows, kHeldVectors vectors of each at a time, once for the sums of exponentials, and once more where the word
// asks for sums of what these make of both.
#pragma once

#include "onepass/kernel/row/rowwise.cuda.h"

ONEPASS_BEGIN

// Exponents of the terms of a sum, in units of their own: floats are powers of 2 (see exp_term).
template <class T>
struct powers {
  static constexpr T kUnit = T(1), kUnits = T(1);  // in natural ones, and the other way round
  template <class L>
  static ONEPASS_FUNCTION L terms(L exponents) {
    return exp(exponents);
  }
};
template <>
struct powers<float> {
  static constexpr float kUnit = 0.69314718f, kUnits = 1.44269504f;
  template <int V>
  static ONEPASS_FUNCTION pack<float, V> terms(pack<float, V> exponents) {
#pragma unroll
    for (int i = 0; i < V; ++i) exponents.v[i] = exp2_number(exponents.v[i]);
    return exponents;
  }
};

// Of two rows a and b the largest of each, and, of both less those, times the scale, Σ exp(a), Σ exp(a) (a - b) and
// Σ exp(b).
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
ONEPASS_FUNCTION numbers<T, 3> moved(const differences<T>& of, numbers<T, 2> largest, T scale) {
  const T shift = shift_of(largest.v[0]), other_shift = shift_of(largest.v[1]);
  const T factor = exp_number((of.largest.v[0] - shift) * scale);
  const T apart = ((shift_of(of.largest.v[0]) - shift) - (shift_of(of.largest.v[1]) - other_shift)) * scale;
  // Where b is -infinity, what is nothing beside all may be infinitely much in its part.
  const T product = factor == T(0) ? T(0) : fma_number(of.sums.v[0], apart, of.sums.v[1]) * factor;
  return {{of.sums.v[0] * factor, product, of.sums.v[2] * exp_number((of.largest.v[1] - other_shift) * scale)}};
}

// Both rows, as the row word sees them (see word/row.h). Read(column, count, own, other) gives a vector of each.
template <class Config, class Read>
class paired_rows {
 public:
  using T = typename Config::arithmetic;
  using lane = pack<T, Config::kVectorSize>;

  ONEPASS_FUNCTION paired_rows(const arguments& a, int across, row_threads<Config>& threads, T scale, const Read& read)
      : a_(a), across_(across), threads_(threads), scale_(scale), read_(read) {}

  // In one pass, each thread with its own shifts.
  ONEPASS_FUNCTION word::paired<T> paired_exponentials(bool of_row) { return of_row ? of<true>() : of<false>(); }
  template <class F>
  ONEPASS_FUNCTION word::pair<T> paired_sum(const F& f) {
    const lane none(T(0));
    word::terms<lane> sums{none, none};
    each_step(none, [&](const lane(&own)[kVectors], const lane(&others)[kVectors], const int(&counts)[kVectors]) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const auto present = first_n<lane>(counts[k]);
        const word::terms<lane> here = f(own[k] * lane(scale_), others[k] * lane(scale_));
        sums = sums + word::terms<lane>{where(present, here.first, none), where(present, here.second, none)};
      }
    });
    const auto all = threads_.reduce(numbers<T, 2>{{sum_lanes(sums.first), sum_lanes(sums.second)}}, plus());
    return {all.v[0], all.v[1]};
  }

 private:
  static constexpr int kVectors = Config::kHeldVectors;
  using index = typename Config::index;

  // OfRow: a is the row and b the other, else the other way round. What is not there is -infinity, of which nothing
  // comes.
  template <bool OfRow>
  ONEPASS_FUNCTION word::paired<T> of() {
    constexpr T kLowest = static_cast<T>(-kInfinity);
    differences<T> all{{{kLowest, kLowest}}, {{T(0), T(0), T(0)}}};
    each_step(lane(kLowest), [&](const lane(&own)[kVectors], const lane(&others)[kVectors], const int(&)[kVectors]) {
      const auto &as = OfRow ? own : others, &bs = OfRow ? others : own;
      const numbers<T, 2> both{
          {max_number(all.largest.v[0], largest_of(as)), max_number(all.largest.v[1], largest_of(bs))}};
      const lane shift_a(shift_of(both.v[0])), shift_b(shift_of(both.v[1])), units(scale_ * powers<T>::kUnits);
      lane sum, products, other_sum;
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const lane a = (as[k] - shift_a) * units, b = (bs[k] - shift_b) * units;
        const lane term = powers<T>::terms(a), other = powers<T>::terms(b);
        const lane apart = word::counted_difference(term, a, b);
        sum = k == 0 ? term : sum + term;
        products = k == 0 ? term * apart : fma(term, apart, products);
        other_sum = k == 0 ? other : other_sum + other;
      }
      const numbers<T, 3> next{{sum_lanes(sum), sum_lanes(products) * powers<T>::kUnit, sum_lanes(other_sum)}};
      all = {both, plus()(moved(all, both, scale_), next)};
    });
    const numbers<T, 2> largest = threads_.reduce(all.largest, larger_of_both());
    const numbers<T, 3> sums = threads_.reduce(moved(all, largest, scale_), plus());
    // The shifts are rounded products with the scale, and the sums those beside them.
    const T largest_a = shift_of(largest.v[0]), shift_a = largest_a * scale_, rest_a = rest_of(largest_a, shift_a);
    const T largest_b = shift_of(largest.v[1]), shift_b = largest_b * scale_, rest_b = rest_of(largest_b, shift_b);
    const T sum = sums.v[0] * exp_number(rest_a), other_sum = sums.v[2] * exp_number(rest_b);
    const T product = fma_number(rest_a - rest_b, sums.v[0], sums.v[1]) * exp_number(rest_a);
    if constexpr (OfRow) return {shift_a, sum, shift_b, other_sum, product};
    else return {shift_b, other_sum, shift_a, sum, product};
  }
  // What rounding took from the shift: nothing where that is so large that it says nothing of the rest.
  ONEPASS_FUNCTION T rest_of(T largest, T shift) const {
    const T rest = fma_number(largest, scale_, -shift);
    return rest > T(-1) && rest < T(1) ? rest : T(0);
  }
  static ONEPASS_FUNCTION T largest_of(const lane (&row)[kVectors]) {
    lane best = row[0];
#pragma unroll
    for (int k = 1; k < kVectors; ++k) best = ONEPASS_TARGET::max(best, row[k]);
    return max_lanes(best);
  }

  // body(own, others, counts) of the thread's vectors that it has at once; behind so many elements stands `none`.
  template <class Body>
  ONEPASS_FUNCTION void each_step(lane none, const Body& body) const {
    for_steps<Config>(a_, [&](index first, bool whole) {
      lane own[kVectors], others[kVectors];
      int counts[kVectors] = {};
#pragma unroll
      for (int k = 0; k < kVectors; ++k) own[k] = others[k] = none;
      for_vectors<Config>(a_, across_, first, whole, [&](int k, index column, int count) {
        counts[k] = count;
        read_(column, count, own[k], others[k]);
        own[k] = where(first_n<lane>(count), own[k], none), others[k] = where(first_n<lane>(count), others[k], none);
      });
      body(own, others, counts);
    });
  }
  const arguments& a_;
  const int across_;
  row_threads<Config>& threads_;
  const T scale_;
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
  cursor<Config, Line> at(a);
  const auto read = [&](typename Config::index column, int count, L& own, L& other) {
    at.set_column(column, count);
    own = Line::pre::recompute(L(at.x()), at);
    other = at.template operand<L, row_word::operand>();
  };
  for (int64 row = thread.first; row < a.rows; row += thread.step) {
    at.set_row(row);
    paired_rows<Config, decltype(read)> rows(a, thread.across, threads, weights.scale, read);
    const auto saved = row_word::statistics(rows, weights);
    if (thread.across == 0) {
      if constexpr (Config::kSavesStatistics) save<Line, Config::kX>(a, row, saved);
      store_number<Config, Line>(a, row, saved);
    }
  }
}

ONEPASS_END
