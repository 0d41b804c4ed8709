// The ways of each kind of call, each with its bytes, its seconds, and the reason why it does not serve.
#pragma once

#include "src/choose/choose.h"

namespace onepass::choice {

std::vector<way> linear_ways(const call&, const cuda::device_facts&);
std::vector<way> attention_ways(const call&, const cuda::device_facts&);  // `scores`, with `values` or without
std::vector<way> cpu_ways(const call&);
std::vector<way> linear_gradient_ways(const call&, bool on_cpu);           // of backward
std::vector<way> ways_to_numbers(const call&, const cuda::device_facts*);  // of endings behind `linear`; null: the CPU

// The reason why only the library can take a call; empty where there is none.
std::string why_not_in_one_kernel(const call&, const way&);
// Prologue, the library's GEMM, and epilogue, each a kernel of its own.
way unfused(const call&, const cuda::device_facts&);
// The number of tensors of the line's size that it reads besides its input or writes besides its result.
int64 other_tensors(const spec::line&);
double seconds_for(int64 bytes, const cuda::device_facts&);

}  // namespace onepass::choice
