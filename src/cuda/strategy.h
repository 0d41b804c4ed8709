// Which way a line with `linear` takes on CUDA: what each way moves, and how long it takes by measured rates.
#pragma once

#include <vector>

#include "src/cuda/driver.h"
#include "src/spec/contraction.h"
#include "src/spec/strategy.h"

namespace onepass::cuda {

// Unfused, tiled, deferred, streamed and resident, in this order.
std::vector<spec::prediction> predict(const spec::contraction&, const spec::linear_case&, const device_facts&);
// The fastest.
const spec::prediction& best(const std::vector<spec::prediction>&);

}  // namespace onepass::cuda
