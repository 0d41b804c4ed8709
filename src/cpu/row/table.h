// What the generated sources of the ahead-of-time table provide.
#pragma once

#include "onepass/kernel/cpu_kernels.h"

namespace onepass::cpu {

// Calls add(structure, kernels) for every line of the table, with the kernels of the CPU's best SIMD target.
void fill_table(void (*add)(const char* structure, const cpu_kernels&));

}  // namespace onepass::cpu
