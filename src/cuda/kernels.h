// The CUDA kernels by name. Each entry point calls one function of a header in onepass/kernel.
#pragma once

namespace onepass::cuda {

// Sources are made of no others, and tools/sanitize runs every one of them.
inline constexpr const char* kKernels[] = {
    // lines
    "elementwise_forward", "elementwise_backward", "rowwise_forward", "rowwise_backward",
    // rows in parts
    "rowwise_forward_parts", "rowwise_forward_combined", "rowwise_forward_tiles", "rowwise_backward_parts",
    "rowwise_backward_combined", "rowwise_backward_tiles",
    // column sums
    "add_columns",
    // linear
    "linear_forward", "fold", "streamed_forward", "resident_forward", "few_features_forward", "few_features_backward",
    // scores and values
    "scores_forward", "attention_by_warps", "attention_forward", "held_scores_forward", "gradients_of_scores",
    "add_key_parts", "gradients_of_queries", "gradients_of_keys", "warp_gradients_of_queries",
    "warp_gradients_of_keys"};

}  // namespace onepass::cuda
