// Backward of lines with `scores`, softmax and `values` in kernels of tiles
// (onepass/kernel/attention/backward_sm90.cuda.h): where they serve, and their launch.
#pragma once

#include <string>
#include <vector>

#include "src/cuda/attention/tiles.h"
#include "src/line/line.h"

namespace onepass::cuda {

struct attention_gradients_call {
  const attention_call& of;  // forward's, but for y; what the request wants are the words' tensors' gradients
  batched_rows gradients{};  // of the result
  const void* result = nullptr;
  softmax_statistics* statistics = nullptr;                     // written, of all rows, in whole tiles of a group
  void *queries = nullptr, *keys = nullptr, *values = nullptr;  // where their gradients go; null: not wanted
};

// Empty where the kernels can take lines that forward's kernel takes.
std::string why_not_attention_gradients(int64 depth, int64 value_depth);
bool fits(const attention_gradients_call&);

enum class gradients_of : int { queries, keys };  // two kernels, of which the first leaves statistics for the second

struct gradients_launch {
  gradients_of which;
  attention_gradients_call call;
};
// The first kernel, and the second: once for keys and values, or, where registers hold one sum, for each of them.
std::vector<gradients_launch> launches_of(const attention_gradients_call&);
tiles_plan plan_attention_gradients(const attention_gradients_call&, gradients_of, const device_facts&);
std::string source(const attention_gradients_call&, gradients_of, const tiles_plan&);
void launch_attention_gradients(const attention_gradients_call&, int device, void* stream);

}  // namespace onepass::cuda
