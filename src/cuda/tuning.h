// The CUDA kernels' tuning: plain data. What chose each figure is in docs/measured-facts.md, "Tuning on the H200".
#pragma once

namespace onepass::cuda {

struct elementwise_tuning {
  int threads;        // of a block
  int unroll;         // lanes in flight a thread
  int resident;       // threads that registers must leave room for on an SM
  int blocks_per_sm;  // with column sums, where blocks stride over the rows
};

// With column sums of few rows: one block has all rows of its columns, which is one kernel less.
struct few_rows_tuning {
  int unroll;    // lanes in flight a thread
  int down;      // threads down the rows, at most
  int resident;  // threads that registers must leave room for on an SM
};

inline constexpr int kAnyColumns = 1 << 30, kMany = 1 << 10;

struct row_tuning {
  int columns = kAnyColumns;  // for rows of so many numbers at most
  int numbers;                // of a row in one thread, at most
  int block = 512;            // threads of a block that rows share
  int threads = 512;          // of a row in a block, at most: longer rows are shared by the blocks of a cluster
  int resident = 512;         // threads that registers must leave room for on an SM; with copies the grid has as many
  int stages;                 // rows that copies run ahead by
  // Values are not held, but made again from the copies, which must find room: for lines whose words take few flops.
  bool recomputes = false;
  bool ahead = false;    // and the next row is read while this row's statistics are on their way
  int sums = kMany;      // for so many column sums at most
  int repeated = kMany;  // for so many operands at most of which one row serves all
  int cluster = 8;       // blocks that share a row, at most
  int busy = 0;          // where so many percent of its threads' lanes are within the row, at least
  int least_flops = 0;   // for lines with so many flops for 16 bits of x, at least, in words beside the row word
  int features = 0;      // only for lines whose rows end in so many features, at least
  int rounds = 0;        // where a row's threads take so many rows one after the other, at least
};

struct tuning {
  elementwise_tuning forward_16_bits = {.threads = 128, .unroll = 2, .resident = 1280, .blocks_per_sm = 16};
  elementwise_tuning forward = {.threads = 128, .unroll = 4, .resident = 1024, .blocks_per_sm = 16};
  elementwise_tuning backward = {.threads = 64, .unroll = 2, .resident = 1024, .blocks_per_sm = 16};
  // Without column sums, and of nothing but gradients: dropout's 252 us where the one above takes 319 (32768 x 4096,
  // float32); with an activation before it it would take 422 for 375.
  elementwise_tuning backward_of_gradients = {.threads = 128, .unroll = 2, .resident = 1280, .blocks_per_sm = 16};
  // Lanes of fewer than 16 bytes.
  elementwise_tuning forward_short = {.threads = 128, .unroll = 4, .resident = 1536, .blocks_per_sm = 16};
  // With results that leave through shared memory.
  elementwise_tuning forward_staged = {.threads = 128, .unroll = 2, .resident = 1536, .blocks_per_sm = 16};
  elementwise_tuning backward_staged = {.threads = 64, .unroll = 1, .resident = 1024, .blocks_per_sm = 16};

  few_rows_tuning few_rows = {.unroll = 2, .down = 64, .resident = 512};

  // The first that has room for the row; a row that none has room for is taken in parts.
  row_tuning forward_rows[16] = {
      {.columns = 1024, .numbers = 32, .block = 256, .stages = 2, .busy = 86, .features = 2},
      {.columns = 512, .numbers = 32, .block = 256, .stages = 2, .busy = 86, .features = 1, .rounds = 48},
      {.columns = 1024, .numbers = 32, .stages = 2, .busy = 86, .least_flops = 16},
      {.columns = 128, .numbers = 32, .block = 128, .resident = 1024, .stages = 0, .busy = 86},
      {.columns = 1024, .numbers = 32, .block = 128, .resident = 768, .stages = 0, .busy = 86},
      {.columns = 1536, .numbers = 48, .block = 128, .resident = 768, .stages = 0, .busy = 80},
      {.columns = 2048, .numbers = 64, .block = 64, .stages = 0, .least_flops = 7},
      {.columns = 2048, .numbers = 32, .block = 128, .resident = 1024, .stages = 0},
      {.columns = 8192, .numbers = 64, .block = 256, .stages = 0},
      {.columns = 32768, .numbers = 32, .stages = 3, .least_flops = 16},
      {.columns = 16384, .numbers = 64, .block = 256, .stages = 0},
      {.columns = 131072, .numbers = 32, .block = 1024, .threads = 1024, .resident = 1024, .stages = 2, .repeated = 0},
      {.numbers = 64, .stages = 3, .recomputes = true, .ahead = true},
      {.columns = 65536, .numbers = 32, .stages = 3},
      {.numbers = 32, .stages = 3, .least_flops = 4},
      {.numbers = 64, .stages = 2}};
  row_tuning backward_rows[15] = {
      {.columns = 512, .numbers = 16, .block = 128, .stages = 3, .busy = 80},
      {.columns = 8192, .numbers = 32, .block = 64, .resident = 384, .stages = 2, .least_flops = 20},
      {.columns = 1024, .numbers = 16, .block = 128, .stages = 3, .busy = 80},
      {.columns = 16384, .numbers = 16, .block = 256, .stages = 3, .busy = 80},
      {.columns = 8192, .numbers = 24, .block = 128, .resident = 384, .stages = 3},
      {.columns = 16384, .numbers = 32, .block = 256, .resident = 384, .stages = 3, .sums = 1, .busy = 92},
      {.columns = 16384, .numbers = 16, .block = 256, .stages = 3},
      {.numbers = 32, .stages = 2, .recomputes = true, .ahead = true, .sums = 0},
      {.numbers = 16, .stages = 3, .recomputes = true, .ahead = true},
      {.numbers = 16, .stages = 3},
      {.numbers = 16, .stages = 3, .recomputes = true, .ahead = true, .cluster = 16},
      {.numbers = 16, .stages = 3, .cluster = 16},
      {.numbers = 32, .stages = 2, .recomputes = true, .ahead = true, .sums = 1, .cluster = 16},
      {.numbers = 32, .stages = 2, .sums = 1, .cluster = 16},
      {.numbers = 32, .stages = 2, .recomputes = true}};
  int held_vectors = 16;   // of a row in a thread, at most: each takes registers besides its numbers
  int again_flops = 8;     // of a number, in words beside the row word, that may be computed again
  int least_across = 8;    // threads of a row, at least, where it has so many lanes: 128 bytes in a row
  int sum_numbers = 64;    // column sums that fit in a thread's registers beside the row
  int part_threads = 256;  // of a block that has a part of a row, lanes at a time, and parts' lanes a thread
  int part_lanes_at_once = 4;
  int part_lanes = 16;
  unsigned column_sum_threads =
      512;  // of a block of the second kernel, columns of a thread, and threads down the parts
  unsigned column_sum_columns = 4;
  unsigned column_sum_down = 64;
};

inline constexpr tuning kTuning{};

// Tiles of 128 rows in one kernel with a matrix product (onepass/kernel/linear/gemm_sm90.cuda.h).
struct linear_tile {
  int columns;
  int buffers;  // of products: 2 for all of a tile, 1 for half of it, which leaves room for one stage more
  // Time of a column, beside other tiles: alone, with an activation behind, with short rows made before, with a norm
  // deferred.
  double time, time_finishing, time_making, time_deferring;
};
struct linear_tuning {
  linear_tile narrow[2] = {{64, 2, 1, 1, 1, 1}, {128, 2, 1, 1, 1, 1}};
  linear_tile wide[3] = {
      {256, 1, 1.0, 1.04, 1.05, 1.2}, {192, 2, 1.0, 1.01, 1.12, 1.0}, {256, 2, 1.05, 1.05, 1.0, 1.05}};
  int activation_flops = 4, short_rows = 2048;
  int stages = 8;                         // at most
  int group = 8, group_making_input = 4;  // tiles below each other that are taken in turn
};
inline constexpr linear_tuning kLinearTuning{};

// A matrix that streams past few rows (onepass/kernel/linear/small_m.cuda.h).
struct streamed_tuning {
  int rows = 16;     // at most
  int numbers = 64;  // of a row in one thread, at most
  int ahead = 4;     // steps that a warp asks for ahead
};
inline constexpr streamed_tuning kStreamedTuning{};

// Short rows past a small matrix (onepass/kernel/linear/small_k.cuda.h).
struct resident_tuning {
  int depth = 256;  // at most
  // Of a block: where a thread holds x as it is stored, where it holds what words make of it, where there are few rows.
  int threads = 512, threads_computing = 384, few_threads = 128;
};
inline constexpr resident_tuning kResidentTuning{};

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

// Seconds, on the H200: what decides between a kernel for all and three. docs/measured-facts.md, "linear".
struct linear_speed {
  double flops = 800e12, flops_wide = 50e12;  // a second, of the library's product; float32's
  double launch = 2e-6, call = 4e-6;          // of a kernel; of a product
  double tile_column = 4.15e-11;              // of a turn's column, for each number of the depth
  double finish_column = 2e-8;                // to the end of the line
  double rows_round = 3e-6;                   // for the rows that a block makes at a time
  double moments = 4.2e-9;                    // of 128 rows, for each number of the depth
  double moments_turn = 2e-6;                 // and to hand them over
  double norm_column = 5e-9;                  // to apply a deferred norm, which the next tile's product waits for
  double first_rows = 5.4e-9, later_rows = 2.4e-13;  // for each number of the depth, of all tensors
  // A matrix that streams past few rows: beside its bytes, of them at most and for each step ahead, and for each number
  // in a thread of the rows that a block makes at a time.
  double streamed_call = 1.5e-6, streamed_bytes = 4.4e12, streamed_ahead = 3.5e12, streamed_number = 2.9e-8;
  // Scores: for each, for each number of the depth, and for each tensor beside them; by warps, in tiles, and with
  // values.
  double score = .55e-12, score_depth = 1.03e-14, score_tensor = .42e-12;
  double tile_score = .75e-12, tile_score_depth = 5e-15, tile_score_tensor = .56e-12, tile_block = 1.6e-8;
  double attended = .5e-12, attended_depth = 3.1e-15, attended_tensor = .2e-12;
  double warp_attended = .6e-12, warp_attended_depth = 8e-15, warp_attended_tensor = .45e-12;
  // Short rows past a small matrix: for each number of x, and each product.
  double resident_call = 4e-6, resident_number = .87e-12, resident_product = 7e-15;
  // Rows that end in dot products: for each product. From instruction counts, not yet from measurements.
  double dots_call = 3e-6, dots_product = .1e-12;
};

}  // namespace onepass::cuda
