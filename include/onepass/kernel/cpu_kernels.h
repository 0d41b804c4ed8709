// How a compiled line is called on the CPU.
#pragma once

#include "onepass/kernel/arguments.h"

namespace onepass {

// Runs tasks [begin, end) of the partition in the arguments.
using cpu_kernel = void (*)(const arguments&, int64 begin, int64 end);

struct cpu_kernel_pair {
  cpu_kernel forward, backward;
};

struct cpu_kernels {
  cpu_kernel_pair f32, f64;
  // Where every tensor stores float, or bf16, and has a number for each column.
  cpu_kernel_pair all_f32, all_bf16;
};

}  // namespace onepass
