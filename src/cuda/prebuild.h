// A line's kernels for contiguous tensors, on a chip that need not be here: what they are, and compiled into the cache
// on disk.
#pragma once

#include <string>
#include <vector>

#include "onepass/lane/types.h"
#include "src/cuda/runtime/driver.h"
#include "src/line/line.h"

namespace onepass::cuda {

// The kernels that contiguous tensors of so many columns get, and of many rows or few: forward for training and for
// inference, and backward with every gradient. Tensor operands have x's dtype, column operands `operand`, masks are
// boolean. Returns a label for each, built or found. Of a line with `linear`: of what stands before it and what stands
// behind it, rows alike long.
std::vector<std::string> prebuild(const spec::line&, const std::string& arch_name, dtype x, dtype operand,
                                  int64 columns);

struct launched {
  std::string kernel;  // its function (kernel_name)
  int cluster;         // blocks that share a row
  int threads, rows;   // of a row in a block, and rows of a block; of elementwise lines all threads, and 1
  std::int64_t blocks;
};
// What forward launches, in order: one kernel, or those of a row's parts where rows do not fit on chip. Tensors as in
// prebuild. The line has no `linear`.
std::vector<launched> forward_launches(const spec::line&, const device_facts&, dtype x, int64 rows, int64 columns,
                                       bool saves);

}  // namespace onepass::cuda
