// A line with `linear` in one kernel on CUDA (src/cuda/linear/gemm_sm90.h).
#pragma once

#include <optional>
#include <vector>

#include "src/torch/call.h"

namespace onepass::binding {

// The tensors of forward_with_linear; nothing where the line names another strategy, or leaves the choice and another
// one is faster, or the kernel cannot take the call. Throws where the line names this one and it cannot.
std::optional<std::vector<Tensor>> forward_in_one_kernel(const forward_call&);

}  // namespace onepass::binding
