// The closed table: lines compiled ahead of time for the CPU, and prebuilt for CUDA by `onepass cache build`.
#pragma once

#include <string>
#include <vector>

namespace onepass::cpu {

// Every line that the named functions and modules speak with their usual options, numbers left at any value:
// lines that differ only in numbers are one kernel.
const std::vector<std::string>& common_lines();

// Those of them that most transformers have, which come first: all that a build has with ONEPASS_LINES=few, where the
// others are compiled at first use.
const std::vector<std::string>& frequent_lines();

}  // namespace onepass::cpu
