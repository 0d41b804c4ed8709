// How a compiled line is called on the CPU.
#pragma once

#include "onepass/kernel/arguments.h"

namespace onepass {

// Runs tasks [begin, end) of the partition in the arguments.
using cpu_kernel = void (*)(const arguments&, int64 begin, int64 end);

struct cpu_kernels {
  cpu_kernel forward_f32, backward_f32, forward_f64, backward_f64;
  // Where every tensor stores float, or bf16, and has a number for each column.
  cpu_kernel forward_all_f32, backward_all_f32, forward_all_bf16, backward_all_bf16;
};

}  // namespace onepass
