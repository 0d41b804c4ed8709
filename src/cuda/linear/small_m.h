// A line with `linear` of few rows in one kernel (onepass/kernel/linear/small_m.cuda.h): where it serves, and its
// launch.
#pragma once

#include <string>

#include "src/cuda/linear/warp_gemm.h"

namespace onepass::cuda {

struct streamed_plan : warp_linear_plan {
  int row_tiles, steps, ahead, pitch;
};

// Empty where the kernel can take such rows.
std::string why_not_streamed(int64 rows, int64 depth, const device_facts&);
// How it takes them: rows that a block makes at a time, numbers of a row in a thread, and steps of the matrix that are
// brought ahead.
struct streamed_rows {
  int at_once, numbers, steps_ahead;
};
streamed_rows take_rows(int64 rows, int64 depth, const device_facts&);
streamed_plan plan_streamed(const warp_linear_call&, const device_facts&);  // where why_not_streamed says nothing
std::string source(const warp_linear_call&, const streamed_plan&);
void launch_streamed(const warp_linear_call&, int device, void* stream);

}  // namespace onepass::cuda
