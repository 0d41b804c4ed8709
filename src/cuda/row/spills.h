// Rows whose numbers a thread's registers have no room for.
#pragma once

#include <functional>
#include <vector>

#include "src/cuda/row/configuration.h"

namespace onepass::cuda {

// The table's plans, or others where its kernel spills: a word's registers are not known before it is compiled. 96
// bytes of a thread that memory held took layer_norm's backward of 1280 columns twice its time. kernel_of: finds or
// builds a plan's. What is taken depends on the row's length alone, not on how many there are.
std::vector<plan> without_spills(const request&, const arguments&, const device_facts&, const configuration& described,
                                 std::vector<plan> of_table,
                                 const std::function<const kernel&(const plan&)>& kernel_of);

}  // namespace onepass::cuda
