// A line with `linear` of short rows and a small matrix in one kernel (onepass/kernel/linear/small_k.cuda.h): where
// it serves, and its launch.
#pragma once

#include <string>

#include "src/cuda/linear/warp_gemm.h"

namespace onepass::cuda {

struct resident_plan : warp_linear_plan {
  int pitch;
};

// Empty where the kernel can take such rows and such a matrix.
std::string why_not_resident(int64 depth, int64 columns, const device_facts&);
resident_plan plan_resident(const warp_linear_call&, const device_facts&);  // where why_not_resident says nothing
std::string source(const warp_linear_call&, const resident_plan&);
void launch_resident(const warp_linear_call&, int device, void* stream);

}  // namespace onepass::cuda
