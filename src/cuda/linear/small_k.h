// `linear` with few in_features in one kernel (onepass/kernel/linear/small_k.cuda.h): when it serves, and its launch.
#pragma once

#include <string>

#include "src/cuda/linear/warp_gemm.h"

namespace onepass::cuda {

struct small_k_plan : warp_linear_plan {
  int pitch;
};

// Empty where the kernel serves: few in_features, and a matrix that fits in shared memory.
std::string why_not_small_k(int64 k, int64 columns, const device_facts&);
small_k_plan plan_small_k(const warp_linear_call&, const device_facts&);  // where why_not_small_k is empty
std::string source(const warp_linear_call&, const small_k_plan&);
void launch_small_k(const warp_linear_call&, int device, void* stream);

}  // namespace onepass::cuda
