// `linear` with few rows in one kernel (onepass/kernel/linear/small_m.cuda.h): when it serves, and its launch.
#pragma once

#include <string>

#include "src/cuda/linear/warp_gemm.h"

namespace onepass::cuda {

struct small_m_plan : warp_linear_plan {
  int row_tiles, steps, ahead, pitch;
};

// Empty where the kernel serves: few rows, which fit in shared memory.
std::string why_not_small_m(int64 rows, int64 k, const device_facts&);
// The rows that a block makes at a time, the elements of a row in a thread, and the steps of the matrix that are
// prefetched.
struct small_m_rows {
  int at_once, elements, steps_ahead;
};
small_m_rows take_rows(int64 rows, int64 k, const device_facts&);
small_m_plan plan_small_m(const warp_linear_call&, const device_facts&);  // where why_not_small_m is empty
std::string source(const warp_linear_call&, const small_m_plan&);
void launch_small_m(const warp_linear_call&, int device, void* stream);

}  // namespace onepass::cuda
