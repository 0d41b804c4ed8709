// Which way a line with `linear` takes on CUDA: what each way moves, and how long it takes by measured rates.
#pragma once

#include <vector>

#include "src/cuda/runtime/driver.h"
#include "src/plan/contraction.h"
#include "src/plan/strategy.h"

namespace onepass::cuda {

// Unfused, tiled, deferred, streamed, resident and dots, in this order.
std::vector<spec::prediction> predict(const spec::contraction&, const spec::linear_case&, const device_facts&);
// Of a line with `values`, of which these are what `scores` begins: unfused and streamed. Values are taken to be as
// long as the keys.
std::vector<spec::prediction> predict_attention(const spec::contraction&, const spec::linear_case&,
                                                const device_facts&);
// The fastest.
const spec::prediction& best(const std::vector<spec::prediction>&);

}  // namespace onepass::cuda
