// Compiles a line's kernels into the cache on disk for a chip that need not be here.
#pragma once

#include <string>
#include <vector>

#include "onepass/lane/types.h"
#include "src/line/line.h"

namespace onepass::cuda {

// The kernels that contiguous tensors of so many columns get, and of many rows or few: forward for training and for
// inference, and backward with every gradient. Tensor operands have x's dtype, column operands `operand`, masks are
// boolean. Returns a label for each, built or found. Of a line with `linear`: of what stands before it and what stands
// behind it, rows alike long.
std::vector<std::string> prebuild(const spec::line&, const std::string& arch_name, dtype x, dtype operand,
                                  int64 columns);

}  // namespace onepass::cuda
