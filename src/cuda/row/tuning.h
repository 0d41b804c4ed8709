// Tuning of the kernels of rows (onepass/kernel/row): plain data. Each figure was measured on an H200; what chose it is
// in docs/measured-facts.md, "Tuning on the H200", whose words stand here in quotes.
#pragma once

#include <algorithm>
#include <iterator>

namespace onepass::cuda {

struct elementwise_tuning {
  int threads;        // of a block
  int unroll;         // lanes in flight a thread
  int resident;       // threads that registers must leave room for on an SM
  int blocks_per_sm;  // with column sums, where blocks stride over the rows
  int tiles = 0;      // of a block, without column sums; 0: one, as far as a grid has room
};

// With column sums of few rows: one block has all rows of its columns, which is one kernel less.
struct few_rows_tuning {
  int unroll;    // lanes in flight a thread
  int down;      // threads down the rows, at most
  int resident;  // threads that registers must leave room for on an SM
};

inline constexpr int kAnyColumns = 1 << 30, kMany = 1 << 10;
// Columns of rows whose one row word is an ending with a target: longer ones stream. "Losses over few classes".
inline constexpr int kMostHeldWithTarget = 1920;

struct row_tuning {
  int columns = kAnyColumns;  // for rows of so many elements at most
  int numbers;                // of a row in one thread, at most
  int block = 512;            // threads of a block that rows share
  int threads = 512;          // of a row in a block, at most: longer rows are shared by the blocks of a cluster
  int resident = 512;         // threads that registers must leave room for on an SM; with copies the grid has as many
  int stages;                 // rows that copies run ahead by
  // Values are recomputed from the copies in shared memory instead of kept in registers: for lines whose words take few
  // flops and whose copies fit.
  bool recomputes = false;
  bool ahead = false;    // and the next row is read while this row's statistics are on their way: "Two rows in flight"
  int sums = kMany;      // for so many column sums at most
  int repeated = kMany;  // for so many operands at most of which one row serves all
  int cluster = 8;       // blocks that share a row, at most
  int busy = 0;          // where so many percent of its threads' lanes are within the row, at least
  int least_flops = 0;   // for lines with so many flops for 16 bits of x, at least, in words beside the row word
  int features = 0;      // only for lines whose rows end in so many features, at least
  bool target = false;   // only for lines whose one row word is an ending with a target
  bool early = false;    // only for lines with an operand that is loaded early and is not one row for all
  // Only for lines that take columns of a batch behind the row word: where no row is copied, loaded early.
  bool of_batches = false;
  int row_words = 0;        // only for lines with so many row words, at least
  int most_flops = kMany;   // for lines with so many flops an element at most: code of more is read again and again
  int tensors = kMany;      // for lines that read so many tensors of x's size at most
  int least_numbers = 0;    // where a thread has so many of a row, at least
  bool unaligned = false;   // only for rows that do not begin at 16 bytes
  bool short_only = false;  // only for x of 16 bits
  int across = 0;           // threads of a row, at least; 0: as least_across has it
  int rounds = 0;           // where a row's threads take so many rows one after the other, at least
};

// Rows of which only numbers stay, and those that have others beside them: of both, a thread has its vectors at a time.
struct streamed_tuning {
  int threads;   // of a row, which are a block, at most: fewer where they would take fewer steps than
  int steps;     // these, of which the last may be next to empty
  int vectors;   // of a thread, at a time
  int resident;  // threads that registers must leave room for on an SM
};
// Which of them stream: shorter ones are held (of those with a target: kMostHeldWithTarget), longer ones taken in
// parts.
struct streamed_columns {
  int least;
  int least_of_several;  // of rows with several endings, one of which has a target
  int most;
};

struct tuning {
  // "Threads, lanes and threads an SM of elementwise kernels".
  elementwise_tuning forward_16_bits = {.threads = 128, .unroll = 2, .resident = 1280, .blocks_per_sm = 16};
  elementwise_tuning forward = {.threads = 128, .unroll = 4, .resident = 1024, .blocks_per_sm = 16};
  elementwise_tuning backward = {.threads = 64, .unroll = 2, .resident = 1024, .blocks_per_sm = 16};
  // Without column sums, and of nothing but gradients: dropout's 252 us where the one above takes 319 (32768 x 4096,
  // float32); with an activation before it it would take 422 for 375.
  elementwise_tuning backward_of_gradients = {.threads = 128, .unroll = 2, .resident = 1280, .blocks_per_sm = 16};
  // Of endings alone: "Losses over few classes".
  elementwise_tuning backward_of_endings = {
      .threads = 128, .unroll = 1, .resident = 2048, .blocks_per_sm = 16, .tiles = 4};
  // With lanes of fewer than 16 bytes.
  elementwise_tuning forward_short = {.threads = 128, .unroll = 4, .resident = 1536, .blocks_per_sm = 16};
  // With results that leave through shared memory.
  elementwise_tuning forward_staged = {.threads = 128, .unroll = 2, .resident = 1536, .blocks_per_sm = 16};
  elementwise_tuning backward_of_endings_staged = {.threads = 128, .unroll = 2, .resident = 1536, .blocks_per_sm = 16};
  elementwise_tuning backward_staged = {.threads = 64, .unroll = 1, .resident = 1024, .blocks_per_sm = 16};

  // "Column sums of few rows in one kernel".
  few_rows_tuning few_rows = {.unroll = 2, .down = 64, .resident = 512};

  // The first that has room for the row; a row that none has room for is taken in parts. "Lines with many flops want
  // other shapes of rows", "Long rows with many flops forward", "Threads an SM for rows of up to 1024 numbers", and for
  // rows that end in features "Few features".
  row_tuning forward_rows[30] = {
      {.columns = 1024, .numbers = 32, .block = 256, .stages = 2, .busy = 86, .features = 2},
      {.columns = 512, .numbers = 32, .block = 256, .stages = 2, .busy = 86, .features = 1, .rounds = 48},
      {.columns = 1024, .numbers = 32, .stages = 2, .busy = 86, .least_flops = 16},
      {.columns = kMostHeldWithTarget,
       .numbers = 64,
       .block = 128,
       .resident = 640,
       .stages = 0,
       .busy = 86,
       .target = true,
       .across = 1},
      {.columns = 64, .numbers = 32, .block = 128, .resident = 1024, .stages = 0, .busy = 86},
      {.columns = 1024, .numbers = 32, .block = 128, .resident = 768, .stages = 0, .busy = 86},
      {.columns = 4096, .numbers = 48, .block = 128, .resident = 640, .stages = 0, .busy = 100, .of_batches = true},
      {.columns = 6144, .numbers = 48, .block = 128, .stages = 0, .busy = 100, .of_batches = true},
      {.columns = 1536, .numbers = 48, .block = 128, .resident = 640, .stages = 2, .of_batches = true},
      {.columns = 8192, .numbers = 64, .block = 256, .stages = 2, .of_batches = true},
      {.columns = 2560, .numbers = 32, .block = 128, .resident = 768, .stages = 0, .row_words = 2},
      {.columns = 3584, .numbers = 64, .block = 256, .stages = 0, .row_words = 2},
      {.columns = 4096, .numbers = 32, .block = 128, .resident = 768, .stages = 0, .row_words = 2},
      {.columns = 1536, .numbers = 48, .block = 128, .resident = 768, .stages = 0, .busy = 80},
      {.columns = 2048, .numbers = 64, .block = 64, .stages = 0, .least_flops = 7},
      {.columns = 2048, .numbers = 32, .block = 128, .resident = 768, .stages = 0, .early = true},
      {.columns = 2048, .numbers = 32, .block = 128, .resident = 1024, .stages = 0},
      {.columns = 16384,
       .numbers = 48,
       .block = 128,
       .resident = 768,
       .stages = 0,
       .tensors = 1,
       .least_numbers = 33,
       .short_only = true},
      {.columns = 8192, .numbers = 64, .block = 256, .stages = 0},
      {.columns = 14336, .numbers = 64, .block = 256, .stages = 2, .least_flops = 16, .tensors = 1, .short_only = true},
      {.columns = 16384, .numbers = 32, .stages = 3, .least_flops = 16},
      {.columns = 28672, .numbers = 64, .stages = 3, .least_flops = 16},
      {.columns = 32768, .numbers = 32, .stages = 3, .least_flops = 16},
      {.columns = 16384, .numbers = 64, .block = 256, .stages = 0},
      {.columns = 131072,
       .numbers = 32,
       .block = 1024,
       .threads = 1024,
       .resident = 1024,
       .stages = 2,
       .repeated = 0,
       .busy = 100},
      {.columns = 131072, .numbers = 64, .stages = 3, .repeated = 0},
      {.numbers = 64, .stages = 3, .recomputes = true, .ahead = true},
      {.columns = 65536, .numbers = 32, .stages = 3},
      {.numbers = 32, .stages = 3, .least_flops = 4},
      {.numbers = 64, .stages = 2}};
  row_tuning backward_rows[22] = {
      {.columns = 16384,
       .numbers = 24,
       .block = 128,
       .resident = 768,
       .stages = 3,
       .sums = 0,
       .tensors = 1,
       .unaligned = true},
      {.columns = 512, .numbers = 16, .block = 128, .stages = 3, .busy = 80},
      {.columns = 8192, .numbers = 32, .block = 64, .resident = 384, .stages = 2, .least_flops = 20, .most_flops = 80},
      {.columns = 1024, .numbers = 16, .block = 128, .stages = 3, .busy = 80},
      {.columns = 16384, .numbers = 16, .block = 256, .stages = 3, .busy = 80},
      {.columns = 8192, .numbers = 24, .block = 128, .resident = 384, .stages = 3},
      {.columns = 16384, .numbers = 32, .block = 256, .resident = 384, .stages = 3, .sums = 1, .busy = 92},
      {.columns = 9208, .numbers = 16, .block = 256, .stages = 3, .sums = 1},
      {.columns = 9208, .numbers = 24, .block = 128, .resident = 384, .stages = 3, .short_only = true},
      {.columns = 16384, .numbers = 16, .block = 256, .stages = 3},
      {.columns = 65536,
       .numbers = 32,
       .block = 64,
       .threads = 256,
       .resident = 384,
       .stages = 2,
       .sums = 0,
       .tensors = 2,
       .unaligned = true},
      {.numbers = 24, .block = 128, .resident = 384, .stages = 3, .sums = 0, .tensors = 2, .unaligned = true},
      {.columns = 32768, .numbers = 32, .block = 64, .resident = 384, .stages = 2, .sums = 0},
      {.columns = 57344, .numbers = 16, .block = 128, .stages = 3, .sums = 0},
      {.numbers = 32, .stages = 2, .recomputes = true, .ahead = true, .sums = 0},
      {.numbers = 16, .stages = 3, .recomputes = true, .ahead = true},
      {.numbers = 16, .stages = 3},
      {.numbers = 16, .stages = 3, .recomputes = true, .ahead = true, .cluster = 16},
      {.numbers = 16, .stages = 3, .cluster = 16},
      {.numbers = 32, .stages = 2, .recomputes = true, .ahead = true, .sums = 1, .cluster = 16},
      {.numbers = 32, .stages = 2, .sums = 1, .cluster = 16},
      {.numbers = 32, .stages = 2, .recomputes = true}};
  // "Rows that stream".
  streamed_columns streams = {.least = 2048, .least_of_several = 1024, .most = 1 << 18};
  streamed_tuning streamed = {.threads = 256, .steps = 14, .vectors = 4, .resident = 1024};
  streamed_tuning paired = {.threads = 256, .steps = 14, .vectors = 2, .resident = 1024};
  int held_vectors = 16;              // lanes of a row in a thread, at most: each takes registers besides its elements
  int other_registers = 21;           // of a thread, beside its row's numbers and what is loaded early: "Loaded early"
  int again_flops = 8;                // flops of an element, in words beside the row word, that may be computed again
  int least_across = 8;               // threads of a row, at least, where it has so many lanes: 128 bytes in a row
  int least_across_forward = 4;       // where it is held from its statistics on: "Rows of 64 and 128 numbers"
  int sum_numbers = 64;               // numbers of column sums that fit in a thread's registers beside the row
  int most_ragged_endings = 16384;    // longer rows' backward of endings alone is taken in tiles
  int unit_columns = 8192;            // longer rows whose column sums are of units are taken in parts
  int part_threads = 256;             // threads of a block that has a part of a row
  int part_lanes_at_once = 4;         // lanes of a part that a thread has in flight
  int part_lanes = 16;                // lanes of a part in a thread
  unsigned column_sum_threads = 512;  // threads of a block of the second kernel
  unsigned column_sum_columns = 4;    // columns of a thread there: "Column sums: four columns a thread"
  unsigned column_sum_down = 64;      // threads down the parts there, at most
};

inline constexpr tuning kTuning{};

// Calls body(tuning) for each way to hold a row in one direction, in order, until it says true.
template <class Body>
void each_row_tuning(bool backward, const Body& body) {
  const auto in = [&](const auto& tunings) {
    static_cast<void>(std::any_of(std::begin(tunings), std::end(tunings), body));
  };
  if (backward) in(kTuning.backward_rows);
  else in(kTuning.forward_rows);
}

}  // namespace onepass::cuda
