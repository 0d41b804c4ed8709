// Finds or builds a call's kernel, and launches it.
#pragma once

#include "src/cuda/configuration.h"

namespace onepass::cuda {

// The kernels of a call, some of which may be built here.
std::vector<plan> prepare(const request&, const arguments&, int device, void* stream);
void launch(const request&, const std::vector<plan>&, const arguments&, int device, void* stream);

// The second stage of column gradients.
struct column_sum {     // as in onepass/skeleton/column_sum.cuda.h, which only NVRTC reads
  const void* partial;  // [parts][columns]
  int64 columns;
  void* data;
  dtype type;
};
// outputs: 1-D, one for each wanted column operand.
std::vector<column_sum> sums_of(const arguments&, dtype type, int64 parts, int slots, const view* outputs);
// type: of the parts.
void reduce_columns(const std::vector<column_sum>&, dtype type, int64 parts, int device, void* stream);

}  // namespace onepass::cuda
