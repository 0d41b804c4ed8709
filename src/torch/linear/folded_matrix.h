// A norm folded into the matrix behind it, on CUDA (onepass/kernel/linear/folded_norm.cuda.h).
#pragma once

#include "src/torch/frame.h"

namespace onepass::binding {

struct folded_matrix {
  Tensor matrix, sums;  // [features, columns]; its rows' sums, then the norm's bias through it: [2, padded features]
};
// before: the norm's line, its operands entered. `ready`: counters that are set to 0 on the way, or none.
folded_matrix fold_norm(const spec::contraction::affine_norm&, const frame& before, const Tensor& w,
                        const std::optional<Tensor>& ready, void* stream);

}  // namespace onepass::binding
