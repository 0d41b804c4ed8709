// Finds or builds a call's kernel, and launches it.
#pragma once

#include "src/cuda/configuration.h"

namespace onepass::cuda {

// The kernels of a call, some of which may be built here.
std::vector<plan> prepare(const request&, const arguments&, int device, void* stream);
void launch(const request&, const std::vector<plan>&, const arguments&, int device, void* stream);

// The second stage of column gradients: outputs are 1-D, one for each wanted column operand.
void reduce_columns(const arguments&, dtype type, int64 parts, int slots, const view* outputs, int device,
                    void* stream);

}  // namespace onepass::cuda
