// How a compiled line is called on the CPU.
#pragma once

#include "onepass/skeleton/arguments.h"

namespace onepass {

// Runs tasks [begin, end) of the partition in the arguments.
using cpu_kernel = void (*)(const arguments&, int64 begin, int64 end);

struct cpu_kernels {
  cpu_kernel forward_f32, backward_f32, forward_f64, backward_f64;
  cpu_kernel forward_all_f32, backward_all_f32;  // where every tensor stores float and has a number for each column
};

}  // namespace onepass
