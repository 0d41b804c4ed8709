// The second stage of column gradients.
#pragma once

#include "onepass/kernel/arguments.h"

namespace onepass::cpu {

// output[c] = sum over parts of partial[part * columns + c], in order, for c in [begin, end).
void sum_parts(const double* partial, int64 parts, int64 columns, int64 begin, int64 end, const view& output);

}  // namespace onepass::cpu
