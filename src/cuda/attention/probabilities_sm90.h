// Register-resident softmax without values (onepass/kernel/attention/probabilities_sm90.cuda.h): where it serves, and
// its launch.
#pragma once

#include <string>

#include "src/cuda/attention/tiles.h"

namespace onepass::cuda {

// Key-padding masks (bool, broadcast over queries) that come before anything else but factors above 0.
int count_key_masks(const attention_call&);
// Empty where the kernel can take rows of so many scores, of queries of so many numbers; causal: tiles_plan.
std::string why_not_held(const request& behind, int64 depth, int64 keys, bool causal, const device_facts&,
                         int key_masks = 0);
// Its time, with so many tensors beside the scores.
double seconds_of_held(const request& behind, int64 matrices, int64 rows, int64 depth, int64 keys, int64 tensors,
                       const device_facts&, int key_masks = 0);
tiles_plan plan_held_scores(const attention_call&, const device_facts&);
std::string held_source(const attention_call&, const tiles_plan&);
// False: it is not to take these masks after all, or the chip has no room for a cluster.
bool launch_held_scores(const attention_call&, int device, void* stream);

}  // namespace onepass::cuda
