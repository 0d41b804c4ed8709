// Launcher of register-resident softmax, without values (onepass/kernel/attention/probabilities_sm90.cuda.h).
#pragma once

#include <string>

#include "src/cuda/attention/tiles.h"

namespace onepass::cuda {

// The number of key-padding masks (bool, broadcast over queries) with nothing before them but factors above 0.
int count_key_masks(const attention_call&);
// Why the kernel cannot take rows of `keys` scores; empty where it can.
std::string why_not_probabilities_sm90(const request& behind, int64 head_dim, int64 keys, bool causal,
                                       const device_facts&, int key_masks = 0);
// Predicted time; tensors: those beside the scores.
double seconds_of_probabilities_sm90(const request& behind, int64 matrices, int64 rows, int64 head_dim, int64 keys,
                                     int64 tensors, const device_facts&, int key_masks = 0);
tiles_plan plan_probabilities_sm90(const attention_call&, const device_facts&);
std::string probabilities_sm90_source(const attention_call&, const tiles_plan&);
// False: the kernel does not take these masks, or the chip has no room for a cluster.
bool launch_probabilities_sm90(const attention_call&, int device, void* stream);

}  // namespace onepass::cuda
