// The ways of each kind of call, each with what it moves, how long it takes, and why it does not serve.
#pragma once

#include "src/choose/choose.h"

namespace onepass::choice {

std::vector<way> linear_ways(const call&, const cuda::device_facts&);
std::vector<way> attention_ways(const call&, const cuda::device_facts&);  // `scores`, with `values` or without
std::vector<way> cpu_ways(const call&);

// What no way but the library's can take: empty where there is nothing of the kind.
std::string why_not_in_one_kernel(const call&, const way&);
// The words before, the library's product, and the words behind.
way unfused(const call&, const cuda::device_facts&);
// Tensors of the line's size that it reads beside what enters it, or writes beside its result.
int64 other_tensors(const spec::line&);
double seconds_for(int64 bytes, const cuda::device_facts&);

}  // namespace onepass::choice
