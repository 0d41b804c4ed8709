// Finds or builds a call's kernel, and launches it.
#pragma once

#include "onepass/kernel/row/shapes.h"
#include "src/cuda/row/configuration.h"

namespace onepass::cuda {

// The kernels of a call, some of which may be built here.
std::vector<plan> prepare(const request&, const arguments&, int device, void* stream);
std::vector<plan> prepare(const request&, const arguments&, const configuration& described, int device, void* stream);
void launch(const request&, const std::vector<plan>&, const arguments&, int device, void* stream);
// Of several tensors that share the launch (group.h).
void launch(const request&, const std::vector<plan>&, const arguments* const* members, std::size_t count, int device,
            void* stream);

// The second stage of column gradients.
// Of so many of column_partial's parts. outputs: 1-D, one for each wanted column operand; not where it is null.
std::vector<column_sum> sums_of(const arguments&, dtype type, int64 parts, int slots, const view* outputs);
// type: of the parts. groups: each sum is one of so many, whose parts and results follow each other.
void reduce_columns(const std::vector<column_sum>&, dtype type, int device, void* stream, int64 groups = 0);

}  // namespace onepass::cuda
