// Lines with a row word on the CPU. A task is a block of rows; a row stays in cache, in the arithmetic's type, between
// its statistics and its result.
#if defined(ONEPASS_SKELETON_ROWWISE_CPU_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_SKELETON_ROWWISE_CPU_H_
#undef ONEPASS_SKELETON_ROWWISE_CPU_H_
#else
#define ONEPASS_SKELETON_ROWWISE_CPU_H_
#endif

#include "onepass/skeleton/place.cpu.h"

ONEPASS_BEGIN

// The row as a row word sees it (see stage/row.h): values in cache, padded to whole lanes.
template <class L>
class held_row {
 public:
  using lane = L;
  using T = typename L::scalar;
  static constexpr bool kHeld = true;

  ONEPASS_FUNCTION held_row(T* values, int64 columns) : values_(values), columns_(columns) {}
  ONEPASS_FUNCTION T columns() const { return static_cast<T>(columns_); }

  template <class F>
  ONEPASS_FUNCTION T sum(const F& f) {
    return sum_lanes(each_sum<L>([&](T* at) ONEPASS_LAMBDA { return f(load_lane<L>(at)); }));
  }
  template <class F>
  ONEPASS_FUNCTION stage::pair<T> sum_pair(const F& f) {
    using two = stage::terms<L>;
    const two total = each_sum<two>([&](T* at) ONEPASS_LAMBDA { return f(load_lane<L>(at)); });
    return {sum_lanes(total.first), sum_lanes(total.second)};
  }
  template <class F>
  ONEPASS_FUNCTION T replace_sum(const F& f) {
    return sum_lanes(each_sum<L>([&](T* at) ONEPASS_LAMBDA {
      const L value = f(load_lane<L>(at));
      store_lane(value, at);
      return value;
    }));
  }
  template <class F>
  ONEPASS_FUNCTION T max(const F& f) {
    const T lowest = static_cast<T>(-kInfinity);
    L best(lowest);
    for_columns<L>(0, columns_, [&](int64 c, int count) ONEPASS_LAMBDA {
      L value = f(load_lane<L>(values_ + c));
      if (count < lanes<L>()) value = where(first_n<L>(count), value, L(lowest));
      best = onepass::ONEPASS_TARGET::max(best, value);
    });
    return max_lanes(best);
  }

 private:
  template <class Sum>
  static ONEPASS_FUNCTION Sum zero_of() {
    if constexpr (same_type<Sum, L>) return L(T(0));
    else return {L(T(0)), L(T(0))};
  }
  static ONEPASS_FUNCTION L first_of(int count, L v) { return where(first_n<L>(count), v, L(T(0))); }
  static ONEPASS_FUNCTION stage::terms<L> first_of(int count, stage::terms<L> v) {
    return {first_of(count, v.first), first_of(count, v.second)};
  }

  // Four sums side by side hide the adder's latency; blocks of kBlock lanes keep the error from growing with the row.
  template <class Sum, class F>
  ONEPASS_FUNCTION Sum each_sum(const F& f) {
    constexpr int kLanes = lanes<L>(), kBlock = 128;
    const Sum zero = zero_of<Sum>();
    Sum total = zero;
    int64 c = 0;
    while (c + 4 * kLanes <= columns_) {
      Sum s0 = zero, s1 = zero, s2 = zero, s3 = zero;
      for (int i = 0; i < kBlock && c + 4 * kLanes <= columns_; ++i, c += 4 * kLanes) {
        s0 = s0 + f(values_ + c);
        s1 = s1 + f(values_ + c + kLanes);
        s2 = s2 + f(values_ + c + 2 * kLanes);
        s3 = s3 + f(values_ + c + 3 * kLanes);
      }
      total = total + ((s0 + s1) + (s2 + s3));
    }
    for (; c < columns_; c += kLanes) {
      const Sum value = f(values_ + c);
      total = total + (c + kLanes <= columns_ ? value : first_of(static_cast<int>(columns_ - c), value));
    }
    return total;
  }

  T* values_;
  const int64 columns_;
};

template <class T, class Line>
ONEPASS_FUNCTION T row_parameter(const arguments& a) {
  if constexpr (Line::row_parameter >= 0) return static_cast<T>(a.parameter[Line::row_parameter]);
  else return T(0);
}

template <class T, class Line, bool Uniform>
void rowwise_forward(const arguments& a, int64 begin, int64 end) {
  using L = vec<T>;
  using held = held_row<L>;
  place<T, Line, Uniform> at(a);
  scratch<T> values(whole_lanes<L>(a.columns));
  T* statistics = static_cast<T*>(a.statistics);
  const int64 first = begin * a.task_rows, last = end * a.task_rows < a.rows ? end * a.task_rows : a.rows;
  for (int64 row = first; row < last; ++row) {
    at.set_row(row);
    for_columns<L>(0, a.columns, [&](int64 c, int count) ONEPASS_LAMBDA {
      at.set_column(c, count);
      store_lane(Line::pre::forward(at.x(), at), values.data() + c);
    });
    held whole(values.data(), a.columns);
    const stage::pair<T> saved = Line::row::statistics(whole, row_parameter<T, Line>(a));
    if (statistics) {
      statistics[row] = saved.first;
      if constexpr (Line::row::about.statistics > 1) statistics[a.rows + row] = saved.second;
    }
    for_columns<L>(0, a.columns, [&](int64 c, int count) ONEPASS_LAMBDA {
      at.set_column(c, count);
      const L z = Line::row::template forward<held>(load_lane<L>(values.data() + c), saved);
      at.store_y(Line::post::forward(z, at));
    });
  }
  if (a.stream_stores) hwy::FlushStream();
}

// One row: dz and the terms summed over it, then dx.
template <class T, class Line, class Place>
ONEPASS_FUNCTION void rowwise_backward_row(const arguments& a, Place& at, stage::pair<T> saved, T* z_row, T* dz_row) {
  using L = vec<T>;
  L first(T(0)), second(T(0));
  for_columns<L>(0, a.columns, [&](int64 c, int count) ONEPASS_LAMBDA {
    at.set_column(c, count);
    L x{};
    if constexpr (!Line::pre::resumes) x = at.x();
    const L z = Line::row::recompute(Line::pre::recompute(x, at), saved);
    const L dz = Line::post::backward(z, at.dy(), at);
    store_lane(z, z_row + c);
    store_lane(dz, dz_row + c);
    stage::terms<L> term = Line::row::backward_terms(z, dz);
    if (HWY_UNLIKELY(count < lanes<L>())) {
      term.first = where(first_n<L>(count), term.first, L(T(0)));
      term.second = where(first_n<L>(count), term.second, L(T(0)));
    }
    first = first + term.first;
    second = second + term.second;
  });
  const stage::pair<T> sums{sum_lanes(first), sum_lanes(second)};
  for_columns<L>(0, a.columns, [&](int64 c, int count) ONEPASS_LAMBDA {
    at.set_column(c, count);
    const L du =
        Line::row::backward(load_lane<L>(z_row + c), load_lane<L>(dz_row + c), saved, sums, static_cast<T>(a.columns));
    L x{};
    if constexpr (Line::pre::needs_input) x = at.x();
    at.store_dx(Line::pre::backward(x, du, at));
  });
}

template <class T, class Line, bool Uniform>
void rowwise_backward(const arguments& a, int64 begin, int64 end) {
  using L = vec<T>;
  place<T, Line, Uniform> at(a);
  const int64 padded = whole_lanes<L>(a.columns);
  scratch<T> rows(2 * padded);
  const T* statistics = static_cast<const T*>(a.statistics);
  column_sums<T> sums(a, 0, a.columns, at);
  for (int64 task = begin; task < end; ++task) {
    sums.start(a, task);
    const int64 last = (task + 1) * a.task_rows < a.rows ? (task + 1) * a.task_rows : a.rows;
    for (int64 row = task * a.task_rows; row < last; ++row) {
      at.set_row(row);
      const stage::pair<T> saved{statistics[row], Line::row::about.statistics > 1 ? statistics[a.rows + row] : T(0)};
      rowwise_backward_row<T, Line>(a, at, saved, rows.data(), rows.data() + padded);
      sums.end_row();
    }
    sums.flush();
  }
  if (a.stream_stores) hwy::FlushStream();
}

ONEPASS_END
#endif
