// A line's kernel, called for a panel of rows on the CPU.
#pragma once

#include <initializer_list>

#include "src/cpu/aligned_memory.h"
#include "src/cpu/run.h"
#include "src/torch/frame.h"

namespace onepass::binding {

// A tensor of a call that is elsewhere than its frame says: rows in one dtype, of which this is the first.
struct elsewhere {
  view arguments::*which;
  void* data;
  std::int64_t row_stride;
};

// A line's kernel, called for tasks of some of a frame's rows.
class panel_kernel {
 public:
  panel_kernel(const frame& f, dtype of_elsewhere, std::int64_t task_rows, bool backward)
      : kernels_(f.line.cpu(f.boolean_masks)),
        a_(f.a),
        type_(f.type),
        of_elsewhere_(of_elsewhere),
        backward_(backward) {
    a_.task_rows = task_rows;
  }
  // columns: of the rows the first so many.
  void operator()(std::int64_t begin, std::int64_t end, std::int64_t columns,
                  std::initializer_list<elsewhere> tensors) const {
    arguments here = a_;
    here.columns = here.task_columns = columns;
    for (const elsewhere& e : tensors) {
      if (!e.data) continue;
      const std::int64_t before = begin * a_.task_rows * e.row_stride * size_of(of_elsewhere_);
      here.*e.which = {static_cast<char*>(e.data) - before, {}, of_elsewhere_, 1};
      std::int64_t stride = e.row_stride;
      for (int d = kMaxDims - 1; d >= 0; --d) (here.*e.which).stride[d] = stride, stride *= a_.size[d];
    }
    cpu::choose(kernels_, here, type_, backward_)(here, begin, end);
  }

 private:
  const cpu_kernels& kernels_;
  arguments a_;
  const dtype type_, of_elsewhere_;
  const bool backward_;
};

}  // namespace onepass::binding
