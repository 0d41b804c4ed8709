// Lines that begin with `scores` in one kernel of tiles, with `values` or without
// (onepass/kernel/attention/forward_sm90.cuda.h): where it serves, and its launch.
#pragma once

#include <string>

#include "src/cuda/attention/tiles.h"
#include "src/line/line.h"

namespace onepass::cuda {

// Empty where the kernel can take lines of these words, sizes and dtype; value_depth 0: without `values`.
std::string why_not_attention(const spec::line& behind, int64 depth, int64 value_depth, int64 keys, dtype,
                              const device_facts&);
int rows_of_attention(int64 depth, int64 value_depth);  // of a block
tiles_plan plan_attention(const attention_call&, const device_facts&);
std::string source(const attention_call&, const tiles_plan&);
void launch_attention(const attention_call&, int device, void* stream);

}  // namespace onepass::cuda
