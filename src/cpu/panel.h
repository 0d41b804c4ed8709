// A line's kernel, called for a panel of rows, some of whose tensors are in a core's cache.
#pragma once

#include <initializer_list>

#include "src/cpu/aligned_memory.h"
#include "src/cpu/gemm/matrix.h"
#include "src/cpu/row/run.h"

namespace onepass::cpu {

// A line's kernels and a call of them, laid out as rows.
struct row_call {
  const cpu_kernels& kernels;
  const arguments& a;
  dtype type;  // x's
};

// A tensor of a call that is elsewhere than its arguments say: rows, of which this is the first.
struct elsewhere {
  view arguments::*which;
  void* data;
  dtype type;
  int64 row_stride;
};
inline elsewhere at(view arguments::*which, const matrix& m) { return {which, m.data, m.type, m.row_stride}; }

// A line's kernel, called for tasks of some of a call's rows.
class panel_kernel {
 public:
  panel_kernel(const row_call& of, int64 task_rows, bool backward)
      : kernels_(of.kernels), a_(of.a), type_(of.type), backward_(backward) {
    a_.task_rows = task_rows;
  }
  void column_sums_to(void* partial, int64 parts) { a_.column_partial = partial, a_.parts = parts; }
  const arguments& call() const { return a_; }
  // columns: of the rows the first so many.
  void operator()(int64 begin, int64 end, int64 columns, std::initializer_list<elsewhere> tensors) const {
    arguments here = a_;
    here.columns = here.task_columns = columns;
    for (const elsewhere& e : tensors) {
      if (!e.data) continue;
      const int64 before = begin * a_.task_rows * e.row_stride * size_of(e.type);
      here.*e.which = {static_cast<char*>(e.data) - before, {}, e.type, 1};
      int64 stride = e.row_stride;
      for (int d = kMaxDims - 1; d >= 0; --d) (here.*e.which).stride[d] = stride, stride *= a_.size[d];
    }
    choose(kernels_, here, type_, backward_)(here, begin, end);
  }

 private:
  const cpu_kernels& kernels_;
  arguments a_;
  const dtype type_;
  const bool backward_;
};

// Some rows of a matrix.
inline matrix part(const matrix& m, int64 first, int64 count) {
  return {address(m, first, 0), m.type, count, m.columns, m.row_stride, m.column_stride};
}

// Rows of a panel in a thread's own memory.
class panel_memory {
 public:
  panel_memory(dtype type, int64 rows, int64 columns)
      : rows_{nullptr, type, rows, columns, apart(type, columns), 1}, memory_(rows * rows_.row_stride * size_of(type)) {
    rows_.data = memory_.data();
  }
  matrix first(int64 count) const { return part(rows_, 0, count); }

 private:
  matrix rows_;
  aligned_memory memory_;
};

}  // namespace onepass::cpu
