// Which kernel serves a call: the numbers that a CUDA kernel is compiled for, chosen from shapes, alignment and chip.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include "onepass/kernel/configuration.h"
#include "src/cuda/row/way.h"
#include "src/cuda/runtime/driver.h"
#include "src/plan/frame.h"

namespace onepass::cuda {

constexpr int64 ceil_div(int64 a, int64 b) { return (a + b - 1) / b; }

// What a kernel's blocks have: whole rows, held from the first row word to the last; whole rows of which only numbers
// stay; both of two whole rows, likewise; of rows too long for a cluster parts, for each row word, whose statistics are
// then combined; tiles of all rows.
enum class part : int { whole, streamed, paired, parts, combined, tiles };

// All that selects a kernel besides the arguments. Flops: of an element in this direction, in the words beside the row
// word.
struct request {
  bool rowwise = false, backward = false;
  std::string line;   // the C++ type (spec::type_text)
  std::string words;  // its text, where somebody listens (tuned.h); empty of one that no text says
  dtype x = dtype::none;
  dtype operand[kMaxOperands] = {};
  dtype result = dtype::none, kept[kMaxKeeps] = {};  // their own, of forward's rows; none: x's
  uint64 wants_column = 0, wants_tensor = 0;
  bool has_groups = false;  // of rows, for some of those columns
  bool wants_dx = false, wants_recompute = false;
  int operands = kMaxOperands, keeps = kMaxKeeps, parameters = kMaxParameters;  // that the arguments have room for
  int features = 0;                                                             // that end its rows
  int row_words = 0;
  uint64 summed = 0;          // bits of the row words whose backward needs sums over the row
  bool gives_number = false;  // the result is one number a row
  bool only_endings = false;  // all of its row words give a number
  bool has_target = false;    // one of its row words has a target
  bool paired = false;        // its row word has another row beside its own
  int group = 0;              // forward: columns that share a scale of its codes; 0: none do
  int flops = 0;
  bool draws = false;   // has dropout
  int rope = -1;        // the first of its tables among the operands; -1: it has none
  int64 turned = 0;     // how many of a row's first numbers it turns; 0: all
  uint64 channels = 0;  // bits of the operands of words by channels
  uint64 tensors = 0;   // bits of the operands of x's shape
  // Bits of the operands that are columns of batches: a single batch's have the same kernel, and the same bits.
  uint64 of_batches = 0;
  uint64 behind = 0;  // bits of the operands, of a number for each column, of words behind the first row word
  int unit = 1;       // columns whose gradients are added up for them
  bool begins_with_row = false;  // its first word is a row word
  bool only_statistics = false;  // forward of a row word: nothing else is written
  bool in_place = false;         // dx lies where dy does: see may_be_in_place
  bool scales_alone = false;     // its only word multiplies by a tensor

  request() = default;
  request(const spec::line&, bool backward);
};
// Of a call whose tensors are in; line: its C++ type in this direction.
request request_of(const spec::frame&, bool backward, std::string line);
request request_of(const spec::frame&, const spec::gradients&, std::string line);  // backward

// The numbers that a kernel is compiled for (onepass/kernel/configuration.h), and those that its Config has by another
// name or not at all. Plain numbers throughout: its bytes are part of a kernel's key.
struct configuration {
  part of;
  int blocks_per_sm;  // that registers must leave room for
  int small;          // an int counts the elements
  int threads;        // of the block, where they are more than across times down
  int members;        // tensors that the launch has room for, each with arguments of its own; 0: one (group.h)
#define ONEPASS_MEMBER(member, name) int member;
#define ONEPASS_SET(member, name) uint64 member;
  ONEPASS_CONFIGURATION(ONEPASS_MEMBER, ONEPASS_MEMBER, ONEPASS_SET)
#undef ONEPASS_MEMBER
#undef ONEPASS_SET
};
static_assert(std::has_unique_object_representations_v<configuration>);  // no padding in a key

struct plan {
  configuration with;
  unsigned grid_x, grid_y;
  unsigned shared_bytes;
  int64 parts;                    // of column sums: rows of column_partial
  int64 row_columns;              // of a part of a row, where rows are taken in parts
  int64 group_blocks;             // of a group of rows (row_groups)
  const kernel* built = nullptr;  // of `with`, where it has been looked up already
};

// Rows taken in parts: elements of a row in the workspace besides those of its parts, which are what its row words save
// or their sums.
constexpr int64 row_numbers(const request& r) { return 3 * (r.row_words > 1 ? r.row_words : 1); }

// Whether a kernel's blocks have whole rows; others have tiles, or, of rows in parts, a part each.
constexpr bool has_whole_rows(const request& r, const configuration& c) {
  return r.rowwise && (c.of == part::whole || c.of == part::streamed || c.of == part::paired);
}

int result_bits(const request&);  // significant ones of the results, at most

// What tensors, dtypes and alignment say, before anything is chosen.
// may_be_ragged: of a kernel of rows, whose accesses may go on behind a row's end.
configuration describe(const request&, const arguments&, bool may_be_ragged = false);

// The kernels of a call, in order: one, or a long row's parts. Column sums come from the last.
// Pure arithmetic: the same shapes, alignment and chip give the same plans.
std::vector<plan> choose(const request&, const arguments&, const device_facts&, const configuration& described);
std::vector<plan> choose(const request&, const arguments&, const device_facts&);
// By that way, whatever the table says. None where the call's rows cannot be shared out so.
std::vector<plan> lay_out(const way&, const request&, const arguments&, const device_facts&,
                          const configuration& described);

// Of a call whose rows are held, by what else the table has: with copies of what it loads early, in its order, then
// with three quarters of the threads an SM where those fill it.
std::vector<plan> other_rows(const request&, const arguments&, const device_facts&, const configuration& described);
// A held row's plan as most calls have it: of many rows that lie dense, whose elements an int counts, in one batch, and
// whose statistics are saved. What depends on it depends on none of these.
plan usual_form(const request&, const arguments&, plan);

// Shares groups of rows out to so many blocks (clusters) that fill the chip, one row of each at a time.
void share_groups(const row_groups&, int64 most, plan&);

// Small accesses would load the gradient by windows, in which other threads write.
constexpr bool may_be_in_place(dtype type, int64 columns) { return columns * size_of(type) % 16 == 0; }

// Of how many operands, say, a kernel's arguments have room where its line has `count`.
constexpr int room_for(int count) { return count > 0 ? count : 1; }

}  // namespace onepass::cuda
