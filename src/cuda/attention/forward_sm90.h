// Launcher of forward on sm_90a (onepass/kernel/attention/forward_sm90.cuda.h): flash attention with `values`,
// probabilities in two passes over the keys without.
#pragma once

#include <string>

#include "src/cuda/attention/tiles.h"
#include "src/line/line.h"

namespace onepass::cuda {

// Why the kernel cannot take such words, sizes and dtype; empty where it can. value_head_dim 0: without `values`.
std::string why_not_forward_sm90(const spec::line& behind, int64 head_dim, int64 value_head_dim, int64 keys, dtype,
                                 const device_facts&);
int block_rows_sm90(int64 head_dim, int64 value_head_dim);  // rows of a block
tiles_plan plan_forward_sm90(const attention_call&, const device_facts&);
std::string source(const attention_call&, const tiles_plan&);
void launch_forward_sm90(const attention_call&, int device, void* stream);

}  // namespace onepass::cuda
