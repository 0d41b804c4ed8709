// Runs a call's arguments on its device.
#pragma once

#include <cstdint>
#include <vector>

#include "src/cpu/panel.h"
#include "src/cuda/row/configuration.h"
#include "src/torch/call/frame.h"

namespace onepass::binding {

void* current_stream(int device_index);  // CUDA
cuda::request request_of(const frame&, bool backward);
cuda::request request_of(const frame&, const spec::gradients&);  // backward
cpu::row_call row_call_of(const frame&);                         // CPU
// CPU: past the caches where so many tensors that are written would not stay in the last level anyway.
int stream_stores(const frame&, std::int64_t tensors);
void run_forward(frame&);
// CUDA: launches the kernels of a call. Rows taken in parts get memory for partial and combined statistics.
void launch(frame&, const cuda::request&, const std::vector<cuda::plan>&, void* stream);
void run_statistics(frame&);  // CUDA: only the row statistics of forward
// column_outputs: 1-D, one for each wanted column operand in operand order.
void run_backward(frame&, const spec::gradients&, const std::vector<view>& column_outputs);

}  // namespace onepass::binding
