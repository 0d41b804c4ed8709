// Lines with a row word on the CPU. A task is a block of rows; a row stays in cache, in the arithmetic's type, between
// its statistics and its result.
#if defined(ONEPASS_KERNEL_ROW_ROWWISE_CPU_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_KERNEL_ROW_ROWWISE_CPU_H_
#undef ONEPASS_KERNEL_ROW_ROWWISE_CPU_H_
#else
#define ONEPASS_KERNEL_ROW_ROWWISE_CPU_H_
#endif

#include "onepass/kernel/row/task.cpu.h"

ONEPASS_BEGIN

// The row as a row word sees it (see word/row.h): values in cache, padded to whole lanes. The first look at them also
// makes them, one pass fewer: make(column, count) gives a lane.
template <class L, class Make>
class held_row {
 public:
  using lane = L;
  using T = typename L::scalar;
  static constexpr bool kHeld = true, kCentred = false;

  ONEPASS_FUNCTION held_row(T* values, const arguments& a, const Make& make)
      : values_(values), columns_(a.columns), inverse_columns_(static_cast<T>(a.inverse_columns)), make_(make) {}
  ONEPASS_FUNCTION T inverse_columns() const { return inverse_columns_; }
  ONEPASS_FUNCTION T squares() {
    return sum([](L u) ONEPASS_LAMBDA { return u * u; });
  }
  ONEPASS_FUNCTION word::row_moments<T> moments() { return word::moments_in_two_passes(*this); }

  template <class F>
  ONEPASS_FUNCTION T sum(const F& f) {
    return sum_lanes(each_sum<L, false>(f));
  }
  template <class F>
  ONEPASS_FUNCTION word::pair<T> sum_pair(const F& f) {
    const word::terms<L> total = each_sum<word::terms<L>, false>(f);
    return {sum_lanes(total.first), sum_lanes(total.second)};
  }
  ONEPASS_FUNCTION word::pair<T> exponentials() { return exponentials_sum<true>(); }
  ONEPASS_FUNCTION word::pair<T> sum_of_exponentials() { return exponentials_sum<false>(); }
  ONEPASS_FUNCTION T total() {
    return sum([](L u) ONEPASS_LAMBDA { return u; });
  }
  ONEPASS_FUNCTION T largest_magnitude() {
    L best(T(0));
    for_columns<L, false>(0, columns_, [&](int64 c, int count) ONEPASS_LAMBDA {
      const L larger = larger_magnitude(best, L(abs(look(c, count))));
      best = HWY_LIKELY(count == kLanes) ? larger : L(where(first_n<L>(count), larger, best));
    });
    made_ = true;
    return largest_magnitude_of(best);
  }
  // A NaN is the largest of all.
  ONEPASS_FUNCTION word::pair<T> largest() {
    const T most = shifts().largest;
    const bool has_nan = sum([](L u) ONEPASS_LAMBDA { return where(u == u, L(T(0)), L(T(1))); }) > T(0);
    const T times = sum([most](L u) ONEPASS_LAMBDA { return where(u == L(most), L(T(1)), L(T(0))); });
    return {has_nan ? static_cast<T>(__builtin_nan("")) : most, times};
  }
  ONEPASS_FUNCTION word::picked<T> picked_exponentials(int64 column) {
    const T shift = shifts().shift;
    const word::pair<T> sums = sum_pair([shift](L u) ONEPASS_LAMBDA {
      return word::terms<L>{exp(L(u - L(shift))), u};
    });
    return {shift, sums.first, column < 0 ? T(0) : values_[column], sums.second};
  }
  ONEPASS_FUNCTION word::weighted<T> weighted_exponentials() {
    const T shift = shifts().shift;
    const word::pair<T> sums = sum_pair([shift](L u) ONEPASS_LAMBDA { return word::weighted_exponential(u, shift); });
    return {shift, sums.first, sums.second};
  }

 private:
  static constexpr int kLanes = lanes<L>();
  static constexpr int kBlock = 512;  // lanes added up apart from the rest: the error does not grow with the row

  struct largest_value {
    T largest, shift;
  };
  ONEPASS_FUNCTION largest_value shifts() {
    const L lowest(static_cast<T>(-kInfinity));
    L best = lowest;
    for_columns<L, false>(0, columns_, [&](int64 c, int count) ONEPASS_LAMBDA {
      const L value = look(c, count);
      best = onepass::ONEPASS_TARGET::max(
          best, HWY_LIKELY(count == kLanes) ? value : L(where(first_n<L>(count), value, lowest)));
    });
    made_ = true;
    const T largest = max_lanes(best);
    return {largest, largest == static_cast<T>(-kInfinity) ? T(0) : largest};
  }

  // Replace: each value by its exponential.
  template <bool Replace>
  ONEPASS_FUNCTION word::pair<T> exponentials_sum() {
    const T shift = shifts().shift;
    return {shift, sum_lanes(each_sum<L, Replace>([shift](L u) ONEPASS_LAMBDA { return exp(L(u - L(shift))); }))};
  }

  ONEPASS_FUNCTION L look(int64 column, int count) {
    if (made_) return load_lane<L>(values_ + column);
    const L value = make_(column, count);
    store_lane(value, values_ + column);
    return value;
  }
  template <class Sum>
  static ONEPASS_FUNCTION Sum zero_of() {
    if constexpr (same_type<Sum, L>) return L(T(0));
    else return {L(T(0)), L(T(0))};
  }
  static ONEPASS_FUNCTION L first_of(int count, L v) { return where(first_n<L>(count), v, L(T(0))); }
  static ONEPASS_FUNCTION word::terms<L> first_of(int count, word::terms<L> v) {
    return {first_of(count, v.first), first_of(count, v.second)};
  }

  // Four sums take turns, which hides the adder's latency.
  template <class Sum, bool Replace, class F>
  ONEPASS_FUNCTION Sum each_sum(const F& f) {
    const Sum zero = zero_of<Sum>();
    Sum total = zero;
    for (int64 block = 0; block < columns_; block += kBlock * kLanes) {
      const int64 end = columns_ < block + kBlock * kLanes ? columns_ : block + kBlock * kLanes;
      Sum s0 = zero, s1 = zero, s2 = zero, s3 = zero;
      for_columns<L, false>(block, end, [&](int64 c, int count) ONEPASS_LAMBDA {
        Sum value = f(look(c, count));
        if constexpr (Replace) store_lane(value, values_ + c);
        if (HWY_UNLIKELY(count < kLanes)) value = first_of(count, value);
        const Sum next = s0 + value;
        s0 = s1, s1 = s2, s2 = s3, s3 = next;
      });
      total = total + ((s0 + s1) + (s2 + s3));
    }
    made_ = true;
    return total;
  }

  T* values_;
  const int64 columns_;
  const T inverse_columns_;
  const Make& make_;
  bool made_ = false;
};

// Two rows in cache, as a row word sees them that has another beside its own.
template <class L, class Make, class MakeOther>
class paired_rows {
 public:
  using lane = L;
  using T = typename L::scalar;
  ONEPASS_FUNCTION paired_rows(T* values, T* others, const arguments& a, const Make& make, const MakeOther& make_other)
      : values_(values), others_(others), columns_(a.columns), own_(values, a, make), other_(others, a, make_other) {}
  ONEPASS_FUNCTION word::paired<T> paired_exponentials(bool of_row) {
    const word::pair<T> own = own_.sum_of_exponentials(), other = other_.sum_of_exponentials();
    const word::pair<T> sums = paired_sum([&](L u, L o) ONEPASS_LAMBDA {
      const L from_own = u - L(own.first), from_other = o - L(other.first);
      const L a = of_row ? from_own : from_other, b = of_row ? from_other : from_own;
      const L term = exp(a);
      return word::terms<L>{term * word::counted_difference(term, a, b), L(T(0))};
    });
    return {own.first, own.second, other.first, other.second, sums.first};
  }
  template <class F>
  ONEPASS_FUNCTION word::pair<T> paired_sum(const F& f) const {
    constexpr int kLanes = lanes<L>();
    constexpr int64 kBlock = 512 * kLanes;  // added up apart from the rest: the error does not grow with the row
    const L zero(T(0));
    word::terms<L> total{zero, zero};
    for (int64 block = 0; block < columns_; block += kBlock) {
      const int64 end = columns_ < block + kBlock ? columns_ : block + kBlock;
      word::terms<L> sums{zero, zero};
      for_columns<L, false>(block, end, [&](int64 c, int count) ONEPASS_LAMBDA {
        word::terms<L> here = f(load_lane<L>(values_ + c), load_lane<L>(others_ + c));
        if (HWY_UNLIKELY(count < kLanes)) {
          const auto present = first_n<L>(count);
          here = {where(present, here.first, zero), where(present, here.second, zero)};
        }
        sums = sums + here;
      });
      total = total + sums;
    }
    return {sum_lanes(total.first), sum_lanes(total.second)};
  }

 private:
  const T *values_, *others_;
  const int64 columns_;
  held_row<L, Make> own_;
  held_row<L, MakeOther> other_;
};

template <class T, class Segment>
ONEPASS_FUNCTION T row_parameter(const arguments& a) {
  if constexpr (Segment::row_parameter >= 0) return static_cast<T>(a.parameter[Segment::row_parameter]);
  else return T(0);
}

// The row's target, which has been checked (src/cpu/row/run.cc).
template <class Row>
ONEPASS_FUNCTION word::target target_of(const arguments& a, int64 row, int parameter) {
  if constexpr (target_operand<Row> < 0) {
    return {};
  } else {
    const int64 column = integer_of(a, a.operand[target_operand<Row>], row);
    return {column == static_cast<int64>(a.parameter[parameter + ignore_number<Row>]) ? -1 : column};
  }
}
template <class T, class Segment, class Row>
ONEPASS_FUNCTION word::row_numbers<T> statistics(Row& row, const arguments& a, int64 at) {
  using row_word = typename Segment::row;
  const T parameter = row_parameter<T, Segment>(a);
  if constexpr (word::is_of_sums<row_word>) {
    return row_word::statistics(row, own_numbers_of<row_word>(numbers_of_call<T, arguments>{a}));
  } else if constexpr (target_operand<row_word> < 0) {
    return row_word::statistics(row, parameter);
  } else {
    constexpr int kFirst = Segment::row_parameter;
    return row_word::statistics(row, parameter, target_of<row_word>(a, at, kFirst), a.parameter + kFirst);
  }
}

// A row's numbers in what is saved, [statistics][rows], those of row word I behind those of the row words before it;
// type: x's.
template <class Line, int I>
ONEPASS_FUNCTION int64 statistics_before(dtype type) {
  if constexpr (I == 0) return 0;
  else
    return size_of(type) == 2 ? Line::template statistics_before<I, dtype::bf16>()
                              : Line::template statistics_before<I, dtype::f32>();
}
template <class Line, int I, class T>
ONEPASS_FUNCTION void save(T* statistics, const arguments& a, dtype type, int64 row, word::row_numbers<T> saved) {
  const int numbers = statistics_of(Line::template segment_at<I>::row::about, type);
  statistics += a.rows * statistics_before<Line, I>(type);
  for (int i = 0; i < numbers; ++i) statistics[i * a.rows + row] = word::saved_number(saved, i);
}
template <class Line, int I = 0, class T, class Cursor>
ONEPASS_FUNCTION void read_saved(const T* statistics, const arguments& a, const Cursor& at, int64 row,
                                 saved_numbers<T, Line::segments>& to) {
  using segment = typename Line::template segment_at<I>;
  using row_word = typename segment::row;
  const dtype type = at.stored_type();
  const int numbers = is_resumed<row_word> ? 0 : statistics_of(row_word::about, type);
  const T* own = statistics + a.rows * statistics_before<Line, I>(type);
  word::row_numbers<T>& saved = to.of[I];
  saved = {T(0), T(0)};
  for (int i = 0; i < numbers; ++i) word::saved_number(saved, i) = own[i * a.rows + row];
  if constexpr (gives_number<row_word>) saved.gradient = at.template number_gradient<segment::number>();
  if constexpr (target_operand<row_word> >= 0) {
    constexpr int kFirst = segment::row_parameter;
    saved = row_word::prepared(saved, target_of<row_word>(a, row, kFirst), a.parameter + kFirst,
                               static_cast<T>(a.inverse_columns));
  } else if constexpr (requires { row_word::prepared(saved); }) {
    saved = row_word::prepared(saved);
  }
  if constexpr (I + 1 < Line::segments) read_saved<Line, I + 1>(statistics, a, at, row, to);
}

// What enters row word I in forward: the row's values in the cache, where a row word stands before it.
template <class Line, class L, int I, class Cursor, class T>
ONEPASS_FUNCTION L value_entering(Cursor& at, const T* values, int64 column, int count) {
  if constexpr (I > 0) return load_lane<L>(values + column);
  at.set_column(column, count);
  return Line::pre::forward(at.x(), at);
}

// Forward of the segments before the last, over a row's values in the cache.
template <class T, class Line, class L, int I = 0, class Cursor>
ONEPASS_FUNCTION void earlier_segments(const arguments& a, Cursor& at, T* values, T* statistics, int64 row) {
  if constexpr (I + 1 < Line::segments) {
    using segment = typename Line::template segment_at<I>;
    const auto make = [&](int64 c, int count)
                          ONEPASS_LAMBDA { return value_entering<Line, L, I>(at, values, c, count); };
    using held = held_row<L, decltype(make)>;
    held whole(values, a, make);
    const word::row_numbers<T> saved = onepass::ONEPASS_TARGET::statistics<T, segment>(whole, a, row);
    if (statistics) save<Line, I>(statistics, a, a.x.type, row, saved);
    if constexpr (gives_number<typename segment::row>) {
      at.template store_number<segment::number>(segment::row::number(saved));
      return earlier_segments<T, Line, L, I + 1>(a, at, values, statistics, row);
    }
    for_columns<L, Cursor::kUniform>(0, a.columns, [&](int64 c, int count) ONEPASS_LAMBDA {
      at.set_column(c, count);
      const L z = row_forward<typename segment::row, held>(load_lane<L>(values + c), saved, at);
      store_lane(L(segment::post::forward(z, at)), values + c);
    });
    earlier_segments<T, Line, L, I + 1>(a, at, values, statistics, row);
  }
}

// The statistics of a row and of that beside it, which lies behind it in the cache.
template <class T, class Line, class L, class Cursor>
ONEPASS_FUNCTION word::row_numbers<T> paired_statistics(const arguments& a, Cursor& at, T* values) {
  using row = typename Line::row;
  const auto weights = row::template weights_of<T>(a.parameter + row::parameter);
  const L scale(weights.scale);
  const auto make = [&](int64 c, int count) ONEPASS_LAMBDA {
    at.set_column(c, count);
    return L(Line::pre::forward(at.x(), at) * scale);
  };
  const auto make_other = [&](int64 c, int count) ONEPASS_LAMBDA {
    at.set_column(c, count);
    return L(at.template operand<L, row::operand>() * scale);
  };
  paired_rows<L, decltype(make), decltype(make_other)> rows(values, values + whole_lanes<L>(a.columns), a, make,
                                                            make_other);
  return row::statistics(rows, weights);
}

template <class T, class Line, dtype Stored>
void rowwise_forward(const arguments& a, int64 begin, int64 end) {
  using L = lane_of<T, Line, Stored>;
  typename cursor<T, Line, Stored>::random_sources random;
  cursor<T, Line, Stored> at(a, random);
  static_assert(cursor_of<cursor<T, Line, Stored>, lane_of<T, Line, Stored>>);
  constexpr int kRows = paired_operand<typename Line::row> >= 0 ? 2 : 1;
  scratch<T> values(kRows * whole_lanes<L>(a.columns));
  T* statistics = static_cast<T*>(a.statistics);
  const int64 first = begin * a.task_rows, last = end * a.task_rows < a.rows ? end * a.task_rows : a.rows;
  for (int64 row = first; row < last; ++row) {
    at.set_row(row);
    earlier_segments<T, Line, L>(a, at, values.data(), statistics, row);
    const auto make = [&](int64 c, int count) ONEPASS_LAMBDA {
      return value_entering<Line, L, Line::segments - 1>(at, values.data(), c, count);
    };
    using held = held_row<L, decltype(make)>;
    const auto statistics_of_row = [&] {
      if constexpr (paired_operand<typename Line::row> >= 0) {
        return paired_statistics<T, Line, L>(a, at, values.data());
      } else {
        held whole(values.data(), a, make);
        return onepass::ONEPASS_TARGET::statistics<T, Line>(whole, a, row);
      }
    };
    const word::row_numbers<T> saved = statistics_of_row();
    if (statistics) save<Line, Line::segments - 1>(statistics, a, a.x.type, row, saved);
    if constexpr (gives_number<typename Line::row>) at.template store_number<Line::number>(Line::row::number(saved));
    if constexpr (Line::gives_number) continue;
    at.clear_features();
    for_columns<L, Stored != dtype::none>(0, a.columns, [&](int64 c, int count) ONEPASS_LAMBDA {
      at.set_column(c, count);
      L u;
      if constexpr (Line::row::about.statistics > 0) u = load_lane<L>(values.data() + c);
      else u = make(c, count);  // no one has looked at it
      const L y = Line::post::forward(row_forward<typename Line::row, held>(u, saved, at), at);
      if constexpr (Line::features == 0) at.store_y(y);
    });
    at.store_features();
  }
  if (a.stream_stores) hwy::FlushStream();
}

// Whether z and dz cost less to compute again than a trip through the cache; not where types are looked up.
template <class Line, bool Uniform>
inline constexpr bool kComputesAgain =
    Uniform&& Line::segments == 1 &&
    (is_resumed<typename Line::row> ? 0 : Line::pre::flops + Line::row::about.flops_recompute) + Line::post::flops <= 8;

// Backward of the segments before the last, down to the first: in z_row and dz_row come the result of row word I + 1
// and its gradient, with their sums over the row; those of the first row word are left there, and their sums are
// returned.
template <class T, class Line, int I, class Cursor>
ONEPASS_FUNCTION word::pair<T> earlier_gradients(const arguments& a, Cursor& at,
                                                 const saved_numbers<T, Line::segments>& saved, word::pair<T> sums,
                                                 T* z_row, T* dz_row) {
  if constexpr (I < 0) {
    return sums;
  } else {
    using L = typename Cursor::lane;
    using behind = typename Line::template segment_at<I + 1>::row;
    word::terms<L> total{L(T(0)), L(T(0))};
    for_columns<L, Cursor::kUniform>(0, a.columns, [&](int64 c, int count) ONEPASS_LAMBDA {
      at.set_column(c, count);
      const L du = gradient_before<behind>(load_lane<L>(z_row + c), load_lane<L>(dz_row + c), saved.of[I + 1], sums,
                                           static_cast<T>(a.inverse_columns), at);
      const word::terms<L> here = value_and_gradient<Line, I, L>(at, saved, du);
      store_lane(here.first, z_row + c);
      store_lane(here.second, dz_row + c);
      L dz = here.second;
      if (HWY_UNLIKELY(count < lanes<L>())) dz = where(first_n<L>(count), dz, L(T(0)));
      add_row_terms<typename Line::template segment_at<I>::row>(here.first, dz, saved.of[I], at, total);
    });
    return earlier_gradients<T, Line, I - 1>(a, at, saved, {sum_lanes(total.first), sum_lanes(total.second)}, z_row,
                                             dz_row);
  }
}

// One row: the terms summed over it, where there are some, then dx. `again` stands where `at` does, and is quiet.
template <class T, class Line, class Cursor>
ONEPASS_FUNCTION void rowwise_backward_row(const arguments& a, Cursor& at, Cursor& again,
                                           const saved_numbers<T, Line::segments>& saved, T* z_row, T* dz_row) {
  using L = typename Cursor::lane;
  constexpr bool kApart = Cursor::kUniform;
  using first = typename Line::template segment_at<0>::row;
  const auto store = [&](word::terms<L> here, word::pair<T> sums) ONEPASS_LAMBDA {
    const L du =
        gradient_before<first>(here.first, here.second, saved.of[0], sums, static_cast<T>(a.inverse_columns), at);
    L x{};
    if constexpr (Line::pre::needs_input) x = at.x();
    at.store_dx(Line::pre::backward(x, du, at));
  };
  if constexpr (Line::segments == 1 && first::about.sums == 0) {
    for_columns<L, kApart>(0, a.columns, [&](int64 c, int count) ONEPASS_LAMBDA {
      at.set_column(c, count);
      store(value_and_gradient<Line, L>(at, saved), {T(0), T(0)});
    });
    return;
  }
  word::terms<L> total{L(T(0)), L(T(0))};
  for_columns<L, kApart>(0, a.columns, [&](int64 c, int count) ONEPASS_LAMBDA {
    at.set_column(c, count);
    const word::terms<L> here = value_and_gradient<Line, L>(at, saved);
    if constexpr (!kComputesAgain<Line, Cursor::kUniform>) {
      store_lane(here.first, z_row + c);
      store_lane(here.second, dz_row + c);
    }
    L dz = here.second;
    if (HWY_UNLIKELY(count < lanes<L>())) dz = where(first_n<L>(count), dz, L(T(0)));
    add_row_terms<typename Line::row>(here.first, dz, saved.of[Line::segments - 1], at, total);
  });
  const word::pair<T> sums = earlier_gradients<T, Line, Line::segments - 2>(
      a, at, saved, {sum_lanes(total.first), sum_lanes(total.second)}, z_row, dz_row);
  for_columns<L, kApart>(0, a.columns, [&](int64 c, int count) ONEPASS_LAMBDA {
    at.set_column(c, count);
    again.set_column(c, count);
    word::terms<L> here;
    if constexpr (kComputesAgain<Line, Cursor::kUniform>) here = value_and_gradient<Line, L>(again, saved);
    else here = {load_lane<L>(z_row + c), load_lane<L>(dz_row + c)};
    store(here, sums);
  });
}

template <class T, class Line, dtype Stored>
void rowwise_backward(const arguments& a, int64 begin, int64 end) {
  using L = lane_of<T, Line, Stored>;
  typename cursor<T, Line, Stored>::random_sources random;
  cursor<T, Line, Stored> at(a, random), again(a, random, true);
  const int64 padded = whole_lanes<L>(a.columns);
  scratch<T> rows(2 * padded);
  const T* statistics = static_cast<const T*>(a.statistics);
  column_sums<T, Line> sums(a, 0, a.columns, at);
  for (int64 task = begin; task < end; ++task) {
    sums.start(task);
    const auto row_body = [&](int64 row) ONEPASS_LAMBDA {
      at.set_row(row);
      again.set_row(row);
      at.load_feature_gradients();
      again.load_feature_gradients();
      saved_numbers<T, Line::segments> saved;
      read_saved<Line>(statistics, a, at, row, saved);
      share_probabilities<Line>(saved);
      rowwise_backward_row<T, Line>(a, at, again, saved, rows.data(), rows.data() + padded);
      sums.end_row();
    };
    for_rows(a, task, row_body, [&](int64 group) ONEPASS_LAMBDA { sums.end_group(group); });
    sums.finish();
  }
  if (a.stream_stores) hwy::FlushStream();
}

ONEPASS_END
#endif
