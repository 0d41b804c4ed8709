// Finds or builds a call's kernel, and launches it.
#pragma once

#include "src/cuda/configuration.h"

namespace onepass::cuda {

std::vector<plan> prepare(const request&, const arguments&, int device);
void launch(const request&, const std::vector<plan>&, const arguments&, int device, void* stream);

// The second stage of column gradients: outputs are 1-D, one for each wanted column operand.
void reduce_columns(const arguments&, int64 parts, int slots, const view* outputs, int device, void* stream);

}  // namespace onepass::cuda
