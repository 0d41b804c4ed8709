// Tuning of the kernels of lines with `scores`: plain data. What chose each figure is in docs/measured-facts.md,
// "Scores" and "Attention".
#pragma once

namespace onepass::cuda {

// Queries and keys to the end of the line (onepass/kernel/attention/forward_sm80.cuda.h).
struct scores_tuning {
  int depth = 256, depth_of_four = 64;   // at most; and where a thread has four rows
  int threads = 256, blocks_per_sm = 2;  // of a block; that registers and shared memory leave room for
  int threads_with_values = 128, blocks_with_values = 2;
  int stages = 2;                     // tiles of keys in shared memory
  int tile = 128, tile_of_deep = 64;  // keys of one; where they are of more than 128 numbers
};
inline constexpr scores_tuning kScoresTuning{};

// Tiles of keys past rows of queries (onepass/kernel/attention/forward_sm90.cuda.h).
struct attention_tuning {
  int depth = 256;                       // at most
  int groups = 2, groups_of_scores = 3;  // warpgroups of rows; without values, up to 128 numbers
  int keys = 128, keys_of_deep = 64;     // of a tile; where there are more than 128 numbers
  int stream_stages_of_scores = 2;       // tiles of the words' tensors that are on their way or taken
  int stages = 4;                        // at most
};
inline constexpr attention_tuning kAttentionTuning{};

// Without values, where registers hold a row of scores (onepass/kernel/attention/probabilities_sm90.cuda.h).
struct held_tuning {
  int groups, tile, groups_per_sm;  // warpgroups of a block, one where it would hold a row; keys of each; on an SM
};
struct held_scores_tuning {
  int depth = 64, depth_of_easy = 128;  // at most
  held_tuning any = {2, 128, 4};
  held_tuning long_rows = {4, 128, 4};  // of more than eight such blocks
  held_tuning easy = {1, 256, 3};       // where nothing else stands beside the scores, and words take few flops
  int easy_flops = 2;
  int cluster = 16, cluster_of_deep = 8;  // blocks that share a row, at most; where there are more than 64 numbers
  int stages = 3;                         // strips of queries in shared memory, at most
  int turns = 8;                          // clusters that come one after another in the same place, about
  // Seconds: of a score, for each number of the depth, and for each tensor; and before a cluster's first strip.
  double score = .64e-12, score_depth = 3e-15, score_tensor = .34e-12, start = 2e-6;
};

// Backward of attention (onepass/kernel/attention/backward_sm90.cuda.h).
struct attention_gradients_tuning {
  int depth = 256;  // at most: sums are held in registers
  int panels = 4;   // of both depths, up to which a kernel has room for the sums of keys and values
  int groups = 2;   // warpgroups
  int ahead = 2, ahead_of_deep = 1, ahead_for_keys = 1, ahead_of_deep_for_keys = 0;
  int stages = 4;  // at most
};

// The same by warps (onepass/kernel/attention/backward_sm80.cuda.h).
struct warp_gradients_tuning {
  int depth = 128;  // at most: rows and sums are held in registers
};
inline constexpr warp_gradients_tuning kWarpGradientsTuning{};

// Their backward, where nothing stands behind softmax (onepass/kernel/attention/probabilities_backward_sm90.cuda.h).
struct score_gradients_tuning {
  int depth = 128;     // at most
  int keys = 256;      // of a block, of at most 64 numbers; half as many of more
  int few_keys = 128;  // at most, a block's where all keys fit one of these
  int cluster = 16;    // blocks that share a row, at most
  // SMs that may share a cluster, of an H100 or H200: 15 clusters of 8 blocks run at a time.
  int sms[8] = {18, 18, 18, 16, 16, 16, 16, 14};
  // Seconds: of a strip of 64 rows, of more than 64 numbers each, where sixteen blocks share those, and of few keys; of
  // each of a batch's few keys and panels; before a cluster's first strip; of the kernel that adds up what clusters
  // share, and for each of their numbers.
  double strip = 2.65e-6, strip_of_wide = 2.3e-6, strip_of_sixteen = 2.45e-6, strip_of_few = 1.6e-6,
         few_keys_of_batch = 16.5e-9, start = 8e-6, second_launch = 6e-6, part = 1e-12;
  double share_of_copy = 0.75;    // of a copy's bandwidth, where memory is the limit
  double three_launches = 20e-6;  // the other way's, which reaches all of it
};

// Seconds, on the H200, of each score, for each number of the depth, and for each tensor beside them: by warps, in
// tiles, and with values.
struct attention_speed {
  double score = .55e-12, score_depth = 1.03e-14, score_tensor = .42e-12;
  double tile_score = .75e-12, tile_score_depth = 5e-15, tile_score_tensor = .56e-12, tile_block = 1.6e-8;
  double attended = .5e-12, attended_depth = 3.1e-15, attended_tensor = .2e-12;
  double warp_attended = .6e-12, warp_attended_depth = 8e-15, warp_attended_tensor = .45e-12;
};

}  // namespace onepass::cuda
