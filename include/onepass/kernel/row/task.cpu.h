// A task of a kernel of rows on the CPU: its memory, its rows and lanes, and the sums of its columns.
#if defined(ONEPASS_KERNEL_ROW_TASK_CPU_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_KERNEL_ROW_TASK_CPU_H_
#undef ONEPASS_KERNEL_ROW_TASK_CPU_H_
#else
#define ONEPASS_KERNEL_ROW_TASK_CPU_H_
#endif

#include <hwy/cache_control.h>

#include <new>

#include "onepass/kernel/common/cursor.cpu.h"

ONEPASS_BEGIN

// Memory for one task, aligned for whole lanes.
template <class T>
class scratch {
 public:
  explicit scratch(int64 size)
      : data_(static_cast<T*>(::operator new(static_cast<std::size_t>(size) * sizeof(T), std::align_val_t(64)))) {}
  ~scratch() { ::operator delete(data_, std::align_val_t(64)); }
  scratch(const scratch&) = delete;
  scratch& operator=(const scratch&) = delete;
  ONEPASS_FUNCTION T* data() const { return data_; }

 private:
  T* data_;
};

template <class L>
ONEPASS_FUNCTION int64 whole_lanes(int64 columns) {
  return (columns + lanes<L>() - 1) / lanes<L>() * lanes<L>();
}

// Calls body(column, count) for each lane of columns [begin, end). Apart: the whole lanes have code of their own, where
// the compiler knows the count.
template <class L, bool Apart, class Body>
ONEPASS_FUNCTION void for_columns(int64 begin, int64 end, const Body& body) {
  constexpr int kLanes = lanes<L>();
  int64 c = begin;
  if constexpr (Apart) {
    for (; c + kLanes <= end; c += kLanes) body(c, kLanes);
    if (c < end) body(c, static_cast<int>(end - c));
  } else {
    for (; c < end; c += kLanes) body(c, end - c < kLanes ? static_cast<int>(end - c) : kLanes);
  }
}

// Calls body(row) for the rows of a task, and ends_group(g) behind each group of them (row_groups).
template <class Body, class EndsGroup>
ONEPASS_FUNCTION void for_rows(const arguments& a, int64 task, const Body& body, const EndsGroup& ends_group) {
  const bool grouped = a.groups.operands != 0, is_shared = !grouped || a.groups.blocks > 1;
  const row_groups groups = grouped ? a.groups : row_groups{0, 1, a.rows, 1, 1, a.rows, task + 1, 1};
  const int64 first = is_shared ? task / groups.blocks : task * groups.each,
              last = first + groups.each < groups.count ? first + groups.each : groups.count,
              begin = is_shared ? task % groups.blocks * a.task_rows : 0,
              end = is_shared && begin + a.task_rows < groups.rows ? begin + a.task_rows : groups.rows,
              apart = groups.kept * groups.inner;
  for (int64 g = first; g < last; ++g) {
    int64 inner = begin % groups.inner;
    int64 row =
        g / groups.kept * groups.outer * apart + g % groups.kept * groups.inner + begin / groups.inner * apart + inner;
    for (int64 w = begin; w < end; ++w) {
      body(row++);
      if (++inner == groups.inner) inner = 0, row += apart - groups.inner;
    }
    if (grouped) ends_group(g);
  }
}

// Numbers of a row of doubles, stored as what the tensor has.
inline void store_doubles(const double* from, void* to, dtype type, int64 begin, int64 end) {
  using L = vec<double>;
  for_columns<L, true>(begin, end, [&](int64 c, int count) ONEPASS_LAMBDA {
    const L numbers = count == lanes<L>() ? load_lane<L>(from + c) : load_partial<L>(from, dtype::f64, c, count);
    if (count == lanes<L>()) store(to, type, c, numbers);
    else store_partial(to, type, c, numbers, count);
  });
}

// The running column sums of one task over columns [begin, end): short sums in level-one cache, added to the task's
// part, which is double, every kRows rows: the error does not grow with the rows. A group that the task has to itself
// ends in the gradient's row.
template <class T, class Line>
class column_sums {
 public:
  using Order = column_order<Line>;
  static constexpr int kRows = 32;

  template <class Cursor>
  ONEPASS_FUNCTION column_sums(const arguments& a, int64 begin, int64 end, Cursor& at)
      : a_(a),
        slots_(static_cast<int>(hwy::PopCount(a.wants_column))),
        begin_(begin),
        columns_(end - begin),
        stride_(whole_lanes<L>(end - begin)),
        part_(static_cast<double*>(a.column_partial) + begin),
        part_stride_(a.columns),
        slot_stride_(a.parts * a.columns),
        lanes_of_unit_(lanes<typename Cursor::lane>()),
        running_(stride_ * slots_ + 1) {
    for (int i = 0, slot = 0; i < kMaxOperands; ++i) {
      if ((a.wants_column >> i & 1) == 0) continue;
      by_units_ |= static_cast<uint64>(a.unit > 1 && (Line::channels >> i & 1) != 0) << slot++;
    }
    for (int64 i = 0; i < stride_ * slots_; i += lanes<L>()) store_lane(L(T(0)), running_.data() + i);
    at.set_column_sums(running_.data() - begin, stride_);
  }
  // Which part the rows that follow belong to.
  ONEPASS_FUNCTION void start(int64 part) { to_ = part_ + part * part_stride_, first_ = ~uint64{0}; }
  ONEPASS_FUNCTION void end_row() {
    if (slots_ != 0 && ++rows_ == kRows) flush();
  }
  ONEPASS_FUNCTION void end_group(int64 group) {
    if (a_.groups.blocks > 1) return;
    if (rows_ != 0) flush();
    int slot = 0;
    for (int i = 0; i < kMaxOperands; ++i) {
      if ((a_.wants_column >> i & 1) == 0) continue;
      if ((a_.groups.operands >> i & 1) != 0) {
        const view& gradient = a_.operand_gradient[i];
        const bool by_units = (by_units_ >> slot & 1) != 0;  // these have whole rows
        const int64 numbers = by_units ? a_.columns / a_.unit : a_.columns;
        store_doubles(to_ + slot * slot_stride_ - begin_,
                      static_cast<char*>(gradient.data) + group * numbers * size_of(gradient.type), gradient.type,
                      begin_, by_units ? numbers : begin_ + columns_);
        first_ |= uint64{1} << slot;
      }
      ++slot;
    }
  }
  ONEPASS_FUNCTION void finish() {
    if (slots_ != 0 && (rows_ != 0 || (first_ & 1) != 0)) flush();
  }

 private:
  using L = vec<T>;

  ONEPASS_FUNCTION void flush() {
    for (int s = 0; s < slots_; ++s) {
      if ((by_units_ >> s & 1) != 0) {
        flush_units(running_.data() + s * stride_, to_ + s * slot_stride_, (first_ >> s & 1) != 0);
        continue;
      }
      for_columns<L, true>(0, columns_, [&](int64 c, int count) ONEPASS_LAMBDA {
        T* from = running_.data() + s * stride_ + c;
        if constexpr (!Order::kZips) {
          add_to_doubles(load_lane<L>(from), to_ + s * slot_stride_ + c, count, (first_ >> s & 1) != 0);
        } else {  // these have whole rows
          for (int i = 0; i < count; ++i) {
            double& sum = to_[s * slot_stride_ + Order::column_at(a_, c + i)];
            sum = ((first_ >> s & 1) != 0 ? 0.0 : sum) + static_cast<double>(from[i]);
          }
        }
        store_lane(L(T(0)), from);
      });
    }
    rows_ = 0;
    first_ = 0;
  }

  ONEPASS_FUNCTION void flush_units(T* from, double* to, bool begins) {
    for (int64 unit = 0; unit < a_.columns / a_.unit; ++unit, from += lanes_of_unit_) {
      L sum(T(0));
      for (int i = 0; i < lanes_of_unit_; i += lanes<L>()) {
        sum = sum + load_lane<L>(from + i);
        store_lane(L(T(0)), from + i);
      }
      to[unit] = (begins ? 0.0 : to[unit]) + static_cast<double>(sum_lanes(sum));
    }
  }

  const arguments& a_;
  const int slots_;
  int rows_ = 0;
  uint64 by_units_ = 0;        // bits by slot
  uint64 first_ = ~uint64{0};  // bits by slot: nothing is in the part yet
  const int64 begin_, columns_, stride_;
  double* const part_;
  const int64 part_stride_, slot_stride_;
  const int lanes_of_unit_;
  double* to_ = nullptr;
  scratch<T> running_;
};

ONEPASS_END
#endif
