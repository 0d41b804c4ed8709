// The CUDA kernels by name. Each entry point calls one function of a header in onepass/kernel.
#pragma once

namespace onepass::cuda {

// Sources are made of no others, and tools/sanitize runs every one of them.
inline constexpr const char* kKernels[] = {
    // lines
    "elementwise_forward", "elementwise_backward", "rowwise_forward", "rowwise_backward", "rowwise_forward_streamed",
    "rowwise_forward_paired",
    // rows in parts
    "rowwise_forward_parts", "rowwise_forward_combined", "rowwise_forward_tiles", "rowwise_backward_parts",
    "rowwise_backward_combined", "rowwise_backward_tiles",
    // column sums
    "add_columns",
    // linear
    "linear_forward", "fold", "small_m_forward", "small_k_forward", "small_n_forward", "small_n_backward",
    // scores and values
    "probabilities_forward_sm80", "attention_forward_sm80", "attention_forward_sm90", "probabilities_forward_sm90",
    "probabilities_backward_sm90", "probabilities_backward_reduce_dk", "attention_backward_queries_sm90",
    "attention_backward_keys_sm90", "attention_backward_queries_sm80", "attention_backward_keys_sm80"};

}  // namespace onepass::cuda
