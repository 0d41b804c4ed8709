// Tuning of the attention kernels: their tile sizes and limits, and the rates by which a kernel is chosen. Plain data;
// each figure has its unit and names the part of docs/measured-facts.md with the measurement.
#pragma once

namespace onepass::cuda {

// Forward by warp-level mma (onepass/kernel/attention/forward_sm80.cuda.h). "Scores".
struct forward_sm80_tuning {
  int head_dim = 256;              // at most
  int head_dim_of_four_rows = 64;  // up to which a thread has four rows
  int threads = 256;               // of a block
  int blocks_per_sm = 2;           // as registers and shared memory allow
  int threads_with_values = 128;
  int blocks_with_values = 2;
  int stages = 2;                   // tiles of keys in shared memory
  int tile = 128;                   // keys of a tile
  int tile_of_large_head_dim = 64;  // keys of a tile, for head_dim above 128
};
inline constexpr forward_sm80_tuning kForwardSm80Tuning{};

// Flash attention, and probabilities in two passes over the keys (onepass/kernel/attention/forward_sm90.cuda.h).
// "Attention".
struct forward_sm90_tuning {
  int head_dim = 256;                   // of queries and values, at most
  int warpgroups = 2;                   // consumer warpgroups
  int warpgroups_of_probabilities = 3;  // without values, for head_dim up to 128
  int keys = 128;                       // of a tile
  int keys_of_large_head_dim = 64;      // of a tile, for head_dim above 128
  int stream_stages_of_scores = 2;      // tiles of the words' tensors, those in flight and the one in use
  int stages = 4;                       // at most
};
inline constexpr forward_sm90_tuning kForwardSm90Tuning{};

// Register-resident softmax without values (onepass/kernel/attention/probabilities_sm90.cuda.h). "Rows that a cluster
// holds".
struct probabilities_block {
  int warpgroups;         // of a block; one where it has room for a row
  int tile;               // keys of a warpgroup
  int warpgroups_per_sm;  // of all blocks of an SM
};
struct probabilities_sm90_tuning {
  int head_dim = 64;            // at most
  int head_dim_of_light = 128;  // of light blocks, at most
  probabilities_block any = {2, 128, 4};
  probabilities_block long_rows = {4, 128, 4};  // rows of more than eight such blocks
  probabilities_block light = {1, 256, 3};      // lines without tensors beside the scores, whose words take few flops
  int light_flops = 2;                          // of a score, at most
  int cluster = 16;                             // blocks that share a row, at most
  int cluster_of_large_head_dim = 8;            // for head_dim above 64
  int stages = 3;                               // row tiles of queries in shared memory, at most
  int waves = 8;                                // of clusters, about
  double score = .64e-12;                       // seconds of a score
  double score_element = 3e-15;                 // of a score, for each element of head_dim
  double score_tensor = .34e-12;                // of a score, for each tensor beside it
  double start = 2e-6;                          // before a cluster's first row tile
};

// Backward of attention (onepass/kernel/attention/backward_sm90.cuda.h). "Attention".
struct backward_sm90_tuning {
  int head_dim = 256;  // of queries and values, at most: sums are held in registers
  int atoms = 4;       // of 64, of both head_dims, up to which registers hold the sums of dK and dV together
  int warpgroups = 2;  // consumer warpgroups
  int ahead = 2;       // kAhead of the kernel for queries
  int ahead_of_large_head_dim = 1;  // the same for more than two atoms of both head_dims
  int ahead_for_keys = 1;           // kAhead of the kernel for keys
  int ahead_of_large_head_dim_for_keys = 0;
  int stages = 4;  // at most
};

// Backward of attention by warp-level mma (onepass/kernel/attention/backward_sm80.cuda.h). "On an H100".
struct backward_sm80_tuning {
  int head_dim = 128;  // at most: rows and sums are held in registers
};
inline constexpr backward_sm80_tuning kBackwardSm80Tuning{};

// Backward of probabilities, where nothing stands behind softmax
// (onepass/kernel/attention/probabilities_backward_sm90.cuda.h). "Rows that a cluster holds", "On an H100".
struct probabilities_backward_tuning {
  int head_dim = 128;                             // at most
  int keys = 256;                                 // of a block, for head_dim up to 64; half as many above
  int few_keys = 128;                             // of a block, where it has room for all keys
  int cluster = 16;                               // blocks that share a row, at most
  int sms[8] = {18, 18, 18, 16, 16, 16, 16, 14};  // of each GPC: 15 clusters of 8 blocks run at a time
  double row_tile = 2.65e-6;                      // seconds of a row tile of 64 rows
  double row_tile_of_large_head_dim = 2.3e-6;     // for head_dim above 64
  double row_tile_of_sixteen_blocks = 2.45e-6;    // for head_dim above 64, in clusters of sixteen blocks
  double row_tile_of_few_keys = 1.6e-6;           // for few keys
  double few_keys_of_batch = 16.5e-9;             // for few keys, seconds of a key and atom of a batch
  double start = 8e-6;                            // before a cluster's first row tile
  double second_launch = 6e-6;                    // of the kernel that adds up shared batches' partial sums
  double part = 1e-12;                            // of it, for each element of the partial sums
  double share_of_copy = 0.75;                    // of a copy's bandwidth, where memory is the limit
  double three_launches = 20e-6;                  // of softmax's kernel and two GEMMs, which reach all of it
};

// Seconds on the H200 of one fused kernel, which is compared with the library's GEMMs and a kernel between them. Each
// kernel has three rates: of a score; of a score for each element of head_dim (_element); of a score for each tensor
// beside it (_tensor).
struct attention_speed {
  double launch = 2e-6;         // of a kernel
  double product = 4e-6;        // of a GEMM of the library, beside what it moves
  double score_sm80 = .55e-12;  // probabilities, forward_sm80: "Scores"
  double score_sm80_element = 1.03e-14;
  double score_sm80_tensor = .42e-12;
  double score_sm90 = .75e-12;  // probabilities, forward_sm90: "Scores"
  double score_sm90_element = 5e-15;
  double score_sm90_tensor = .56e-12;
  double tile_block = 1.6e-8;      // of a block of it
  double attention_sm90 = .5e-12;  // with values, forward_sm90: "Attention"
  double attention_sm90_element = 3.1e-15;
  double attention_sm90_tensor = .2e-12;
  double attention_sm80 = .6e-12;  // with values, forward_sm80: "On an H100"
  double attention_sm80_element = 8e-15;
  double attention_sm80_tensor = .45e-12;
  double backward_sm90 = 1.1e-12;  // with values: "Attention", "Backward of the same"
  double backward_sm90_element = 1.55e-14;
  double backward_sm90_tensor = .35e-12;
  double backward_sm80 = .6e-12;  // with values: "On an H100"
  double backward_sm80_element = 7e-14;
  double backward_sm80_tensor = 1e-12;
  double odd_product = 4.5;  // factor on the library's GEMMs where rows of scores are no multiple of 8 elements: "On an
                             // H100"
};
inline constexpr attention_speed kAttentionSpeed{};

// Masked attention that torch's engines can compute too is ours where our kernels were measured to be faster, on sm_90a
// in bfloat16: in calls of these kinds. "Beside torch's engines". For odd keys (no multiple of 8) forward is
// forward_sm80; backward_sm80 is slower than an engine, and has no row.
struct beside_engines {
  bool boolean_mask;  // or an additive one
  bool trains;        // some gradient is needed
  bool dropout;
  bool odd_keys;
  int head_dim;            // of queries and values, at most
  int least_head_dim = 0;  // of queries, at least
  int least_queries = 0;   // rows of queries, at least
};
inline constexpr beside_engines kBesideEngines[] = {
    {.boolean_mask = false, .trains = false, .dropout = false, .odd_keys = false, .head_dim = 256},
    {.boolean_mask = false, .trains = false, .dropout = true, .odd_keys = false, .head_dim = 256},
    {.boolean_mask = false, .trains = true, .dropout = false, .odd_keys = false, .head_dim = 256},
    {.boolean_mask = false, .trains = true, .dropout = true, .odd_keys = false, .head_dim = 128},
    {.boolean_mask = true, .trains = false, .dropout = false, .odd_keys = false, .head_dim = 256},
    {.boolean_mask = true, .trains = false, .dropout = true, .odd_keys = false, .head_dim = 256},
    {.boolean_mask = true, .trains = true, .dropout = false, .odd_keys = false, .head_dim = 128},
    {.boolean_mask = true, .trains = true, .dropout = true, .odd_keys = false, .head_dim = 128, .least_head_dim = 128},
    {.boolean_mask = false, .trains = false, .dropout = false, .odd_keys = true, .head_dim = 64, .least_queries = 128},
    {.boolean_mask = true, .trains = false, .dropout = false, .odd_keys = true, .head_dim = 64, .least_queries = 128},
};

}  // namespace onepass::cuda
