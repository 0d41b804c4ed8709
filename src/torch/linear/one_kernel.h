// A line with `linear` in one kernel on CUDA (src/cuda/linear).
#pragma once

#include <optional>
#include <vector>

#include "src/choose/choose.h"
#include "src/torch/call/call.h"

namespace onepass::binding {

// Returns the tensors of forward_with_linear, computed in this way; nothing where the tensors do not suit its kernel.
std::optional<std::vector<Tensor>> forward_in_one_kernel(const forward_call&, const choice::way&);

}  // namespace onepass::binding
