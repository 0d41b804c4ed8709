// Lines that begin with `scores` on CUDA: what their kernels are compiled with, and what decides who computes them.
// Plain data; beside each figure its unit, and the part of docs/measured-facts.md that has the measurement.
#pragma once

namespace onepass::cuda {

// Probabilities and attention by warps (onepass/kernel/attention/forward_sm80.cuda.h). "Scores".
struct scores_tuning {
  int depth = 256;         // numbers of a query at most
  int depth_of_four = 64;  // numbers up to which a thread has four rows
  int threads = 256;       // of a block
  int blocks_per_sm = 2;   // that registers and shared memory leave room for
  int threads_with_values = 128;
  int blocks_with_values = 2;
  int stages = 2;         // tiles of keys in shared memory
  int tile = 128;         // keys of a tile
  int tile_of_deep = 64;  // keys of a tile, of more than 128 numbers
};
inline constexpr scores_tuning kScoresTuning{};

// Tiles of keys past rows of queries (onepass/kernel/attention/forward_sm90.cuda.h). "Attention".
struct attention_tuning {
  int depth = 256;                  // numbers of a query, and of a value, at most
  int groups = 2;                   // warpgroups of rows
  int groups_of_scores = 3;         // without values, up to 128 numbers
  int keys = 128;                   // of a tile
  int keys_of_deep = 64;            // of a tile, of more than 128 numbers
  int stream_stages_of_scores = 2;  // tiles of the words' tensors that are on their way or taken
  int stages = 4;                   // at most
};
inline constexpr attention_tuning kAttentionTuning{};

// Without values, where registers hold a row of scores (onepass/kernel/attention/probabilities_sm90.cuda.h). "Rows that
// a cluster holds".
struct held_tuning {
  int groups, tile, groups_per_sm;  // warpgroups of a block, one where it would hold a row; keys of each; on an SM
};
struct held_scores_tuning {
  int depth = 64;           // numbers of a query at most
  int depth_of_easy = 128;  // where blocks are the easy ones
  held_tuning any = {2, 128, 4};
  held_tuning long_rows = {4, 128, 4};  // of more than eight such blocks
  held_tuning easy = {1, 256, 3};       // where nothing else stands beside the scores, and words take few flops
  int easy_flops = 2;                   // of a score, at most
  int cluster = 16;                     // blocks that share a row, at most
  int cluster_of_deep = 8;              // where there are more than 64 numbers
  int stages = 3;                       // strips of queries in shared memory, at most
  int turns = 8;                        // clusters that come one after another in the same place, about
  double score = .64e-12;               // seconds of a score
  double score_depth = 3e-15;           // of a score, for each number of the depth
  double score_tensor = .34e-12;        // of a score, for each tensor beside it
  double start = 2e-6;                  // before a cluster's first strip
};

// Backward of attention (onepass/kernel/attention/backward_sm90.cuda.h). "Attention".
struct attention_gradients_tuning {
  int depth = 256;         // at most: sums are held in registers
  int panels = 4;          // of both depths, up to which a kernel has room for the sums of keys and values
  int groups = 2;          // warpgroups
  int ahead = 2;           // tiles of products under way in the kernel for queries
  int ahead_of_deep = 1;   // of more than two panels of both depths
  int ahead_for_keys = 1;  // in the kernel for keys
  int ahead_of_deep_for_keys = 0;
  int stages = 4;  // at most
};

// The same by warps (onepass/kernel/attention/backward_sm80.cuda.h). "On an H100".
struct warp_gradients_tuning {
  int depth = 128;  // at most: rows and sums are held in registers
};
inline constexpr warp_gradients_tuning kWarpGradientsTuning{};

// Backward of probabilities, where nothing stands behind softmax
// (onepass/kernel/attention/probabilities_backward_sm90.cuda.h). "Rows that a cluster holds", "On an H100".
struct score_gradients_tuning {
  int depth = 128;                                // at most
  int keys = 256;                                 // of a block, of at most 64 numbers; half as many of more
  int few_keys = 128;                             // at most, a block's where all keys fit one of these
  int cluster = 16;                               // blocks that share a row, at most
  int sms[8] = {18, 18, 18, 16, 16, 16, 16, 14};  // that may share a cluster: 15 clusters of 8 blocks at a time
  double strip = 2.65e-6;                         // seconds of a strip of 64 rows
  double strip_of_wide = 2.3e-6;                  // of more than 64 numbers each
  double strip_of_sixteen = 2.45e-6;              // where sixteen blocks share those
  double strip_of_few = 1.6e-6;                   // of few keys
  double few_keys_of_batch = 16.5e-9;             // seconds of each of a batch's few keys and panels
  double start = 8e-6;                            // before a cluster's first strip
  double second_launch = 6e-6;                    // of the kernel that adds up what clusters share
  double part = 1e-12;                            // for each number that they share
  double share_of_copy = 0.75;                    // of a copy's bandwidth, where memory is the limit
  double three_launches = 20e-6;                  // of softmax's kernel and two products, which reach all of it
};

// Seconds on the H200 of one kernel for all, by which it is compared with products and a kernel between them. Of a
// score; of a score for each number of the depth; of a score for each tensor beside it.
struct attention_speed {
  double launch = 2e-6;    // of a kernel
  double product = 4e-6;   // of a product of the library, beside what it moves
  double score = .55e-12;  // probabilities by warps: "Scores"
  double score_depth = 1.03e-14;
  double score_tensor = .42e-12;
  double tile_score = .75e-12;  // probabilities by tiles: "Scores"
  double tile_score_depth = 5e-15;
  double tile_score_tensor = .56e-12;
  double tile_block = 1.6e-8;  // of a block
  double attended = .5e-12;    // with values, by tiles: "Attention"
  double attended_depth = 3.1e-15;
  double attended_tensor = .2e-12;
  double warp_attended = .6e-12;  // with values, by warps: "On an H100"
  double warp_attended_depth = 8e-15;
  double warp_attended_tensor = .45e-12;
  double gradient = 1.1e-12;  // backward with values, by tiles: "Attention", "Backward of the same"
  double gradient_depth = 1.55e-14;
  double gradient_tensor = .35e-12;
  double warp_gradient = .6e-12;  // backward with values, by warps: "On an H100"
  double warp_gradient_depth = 7e-14;
  double warp_gradient_tensor = 1e-12;
  double odd_product = 4.5;  // times: the library's products of rows of scores that are no multiples of 8
                             // numbers, beside those that are: "On an H100"
};
inline constexpr attention_speed kAttentionSpeed{};

// An attention with a mask that torch's engines can compute is computed here where our kernels were measured to be
// faster, on sm_90a in bfloat16: calls of this kind, with rows of so many numbers. "Beside torch's engines". Of odd
// keys (no multiple of 8), forward is by warps; backward by warps is slower than an engine, and in no row.
struct beside_engines {
  bool boolean_mask;  // or an additive one
  bool trains;        // some gradient is needed
  bool dropout;
  bool odd_keys;
  int features;           // numbers of a query, and of a value, at most
  int least_depth = 0;    // numbers of a query, at least
  int least_queries = 0;  // rows of queries, at least
};
inline constexpr beside_engines kBesideEngines[] = {
    {.boolean_mask = false, .trains = false, .dropout = false, .odd_keys = false, .features = 256},
    {.boolean_mask = false, .trains = false, .dropout = true, .odd_keys = false, .features = 256},
    {.boolean_mask = false, .trains = true, .dropout = false, .odd_keys = false, .features = 256},
    {.boolean_mask = false, .trains = true, .dropout = true, .odd_keys = false, .features = 128},
    {.boolean_mask = true, .trains = false, .dropout = false, .odd_keys = false, .features = 256},
    {.boolean_mask = true, .trains = false, .dropout = true, .odd_keys = false, .features = 256},
    {.boolean_mask = true, .trains = true, .dropout = false, .odd_keys = false, .features = 128},
    {.boolean_mask = true, .trains = true, .dropout = true, .odd_keys = false, .features = 128, .least_depth = 128},
    {.boolean_mask = false, .trains = false, .dropout = false, .odd_keys = true, .features = 64, .least_queries = 128},
    {.boolean_mask = true, .trains = false, .dropout = false, .odd_keys = true, .features = 64, .least_queries = 128},
};

}  // namespace onepass::cuda
