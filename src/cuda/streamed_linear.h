// A line with `linear` of few rows in one kernel (onepass/skeleton/streamed_linear.cuda.h): where it serves, and its
// launch.
#pragma once

#include <string>

#include "src/cuda/configuration.h"
#include "src/cuda/driver.h"

namespace onepass::cuda {

struct streamed_call {
  const request& before;  // x: what enters the words before `linear`; y is not written
  const arguments& a_before;
  const request& behind;  // y: the result
  const arguments& a_behind;
  const void* matrix;  // [columns, depth]
  int64 matrix_stride, depth;
};
struct streamed_plan {
  configuration before, behind;
  int row_tiles, steps, ahead, pitch;
  unsigned grid, shared_bytes;
};

// Empty where the kernel can take such rows.
std::string why_not_streamed(int64 rows, int64 depth, const device_facts&);
// How it takes them: rows that a block makes at a time, numbers of a row in a thread, and steps of the matrix that are
// brought ahead.
struct streamed_rows {
  int at_once, numbers, steps_ahead;
};
streamed_rows take_rows(int64 rows, int64 depth, const device_facts&);
// Whether addresses and strides suit the kernel.
bool fits(const streamed_call&);
streamed_plan choose(const streamed_call&, const device_facts&);  // where why_not_streamed says nothing
std::string source(const streamed_call&, const streamed_plan&);
void launch(const streamed_call&, int device, void* stream);

}  // namespace onepass::cuda
