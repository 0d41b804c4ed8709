// Elementwise lines on the CPU. A task is a block of rows by a block of columns.
#if defined(ONEPASS_KERNEL_ROW_ELEMENTWISE_CPU_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_KERNEL_ROW_ELEMENTWISE_CPU_H_
#undef ONEPASS_KERNEL_ROW_ELEMENTWISE_CPU_H_
#else
#define ONEPASS_KERNEL_ROW_ELEMENTWISE_CPU_H_
#endif

#include "onepass/kernel/row/task.cpu.h"

ONEPASS_BEGIN

struct tile {
  int64 row_block, column_begin, column_end;
};

ONEPASS_FUNCTION tile tile_of(const arguments& a, int64 task) {
  const int64 across = (a.columns + a.task_columns - 1) / a.task_columns;
  const int64 r = task / across, c = task % across, column_end = (c + 1) * a.task_columns;
  return {r, c * a.task_columns, column_end < a.columns ? column_end : a.columns};
}

template <class T, class Line, dtype Stored>
void elementwise_forward(const arguments& a, int64 begin, int64 end) {
  using L = lane_of<T, Line, Stored>;
  typename cursor<T, Line, Stored>::random_sources random;
  cursor<T, Line, Stored> at(a, random);
  static_assert(cursor_of<cursor<T, Line, Stored>, lane_of<T, Line, Stored>>);
  for (int64 task = begin; task < end; ++task) {
    const tile t = tile_of(a, task);
    const int64 last = (t.row_block + 1) * a.task_rows < a.rows ? (t.row_block + 1) * a.task_rows : a.rows;
    for (int64 row = t.row_block * a.task_rows; row < last; ++row) {
      at.set_row(row);
      for_columns<L, Stored != dtype::none>(t.column_begin, t.column_end, [&](int64 column, int count) ONEPASS_LAMBDA {
        at.set_column(column, count);
        at.store_y(Line::pre::forward(at.x(), at));
      });
    }
  }
  if (a.stream_stores) hwy::FlushStream();
}

template <class T, class Line, dtype Stored>
void elementwise_backward(const arguments& a, int64 begin, int64 end) {
  using L = lane_of<T, Line, Stored>;
  typename cursor<T, Line, Stored>::random_sources random;
  cursor<T, Line, Stored> at(a, random);
  for (int64 task = begin; task < end; ++task) {
    const tile t = tile_of(a, task);
    column_sums<T, Line> sums(a, t.column_begin, t.column_end, at);
    sums.start(t.row_block);
    const auto row_body = [&](int64 row) ONEPASS_LAMBDA {
      at.set_row(row);
      for_columns<L, Stored != dtype::none>(t.column_begin, t.column_end, [&](int64 column, int count) ONEPASS_LAMBDA {
        at.set_column(column, count);
        L x{};
        if constexpr (Line::pre::needs_input) x = at.x();
        at.store_dx(Line::pre::backward(x, at.dy(), at));
      });
      sums.end_row();
    };
    for_rows(a, t.row_block, row_body, [&](int64 group) ONEPASS_LAMBDA { sums.end_group(group); });
    sums.finish();
  }
  if (a.stream_stores) hwy::FlushStream();
}

ONEPASS_END
#endif
