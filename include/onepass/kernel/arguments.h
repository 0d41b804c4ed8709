// What a kernel is called with: addresses, strides and numbers. Plain data, the same for CPU and CUDA.
#pragma once

#include "onepass/lane/types.h"

namespace onepass {

constexpr int kMaxDims = 4;  // leading dimensions left after collapsing; more are copied to contiguous first
constexpr int kMaxOperands = 12;
constexpr int kMaxKeeps = 4;
constexpr int kMaxParameters = 12;

// For how many of each there is room. A CUDA kernel is compiled with what its line has: what a kernel is called with is
// sent with every launch.
#ifndef ONEPASS_OPERANDS
#define ONEPASS_OPERANDS kMaxOperands
#define ONEPASS_KEEPS kMaxKeeps
#define ONEPASS_PARAMETERS kMaxParameters
#define ONEPASS_GROUPS
#endif
constexpr int kOperands = ONEPASS_OPERANDS;
constexpr int kKeeps = ONEPASS_KEEPS;
constexpr int kParameters = ONEPASS_PARAMETERS;

// A tensor seen as rows. Strides count elements; column_stride is 0 (one number for the row), 1, or how many of the
// row's columns share a number: kOneForTwo, as tables of `rope` may have it, or a group's, of scales.
// A column operand has zero row strides. data is null where a gradient is not wanted.
constexpr int kOneForTwo = 2;
struct view {
  void* data;
  int64 stride[kMaxDims];
  dtype type;
  int column_stride;
};

// Rows whose gradient of an operand is a sum: those that share its row. Of the leading dimensions the operand has some
// and repeats along the others; they are taken as four at most, which it has and has not in turn: row number w of group
// g is row ((g / kept * outer + w / inner) * kept + g % kept) * inner + w % inner.
struct row_groups {
  uint64 operands;  // bits: column gradients with a row for each group; others are sums over all rows. 0: no groups
  int64 count, rows;
  int64 outer, kept, inner;
  // CUDA: blocks that share a group; CPU: tasks. One alone adds the group up, and stores the gradient's row.
  int64 blocks;
  int64 each;  // CPU: groups of a task

  constexpr bool together() const { return kept == 1; }  // its rows follow each other
};

// Quotients of numbers from 0 up to 2^31 by one number, which is at least 1: a product, a sum and a shift in the place
// of a division (Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994, figure 4.1).
struct divisor {
  uint32 multiplier;
  int shift;

  static constexpr divisor of(int64 number) {
    if (number < 1 || number >= int64{1} << 31) return {0, 31};  // nothing is divided, or its quotients are 0
    if (number == 1) return {1, 0};                              // as nearly all leading dimensions
    int shift = 0;
    while (int64{1} << shift < number) ++shift;
    const auto by = static_cast<uint64>(number), rest = (uint64{1} << shift) - by;
    return {static_cast<uint32>((rest << 32) / by + 1), shift};
  }
  constexpr uint32 quotient_of(uint32 n) const {
    return (static_cast<uint32>(uint64{multiplier} * n >> 32) + n) >> shift;
  }
};

struct arguments {
  int64 rows, columns;
  double inverse_columns;
  int64 size[kMaxDims];       // the leading dimensions, outermost first, padded in front with 1; their product is rows
  divisor by_size[kMaxDims];  // where rows are fewer than 2^31
  int64 matrix_rows;          // x.shape[-2], for `causal`

  view x;   // forward and backward: the input, where it is read; backward: the result, where the line resumes there
  view y;   // forward: the result.  backward: its gradient.  One number a row, of an ending: float (double where x is
            // f64), with a column stride of 0
  view dx;  // backward
  // Backward: the recomputed result, where it is asked for; never where backward starts from the result. On the CPU
  // src/cpu/row/run.cc writes it, not the kernel.
  view recomputed;
  view operand[kOperands];
  // Column gradients go through column_partial, and where one part is the sum on to here.
  view operand_gradient[kOperands];
  view kept[kKeeps];  // forward: written; numbers as y may be, or scales.  backward: read where the line resumes there
  view kept_gradient[kKeeps];

  void* statistics;      // [statistics][rows], float (double where x is f64); null: not saved
  void* row_parts;       // CUDA, rows too long for a cluster: [rows][parts][kPartNumbers], as statistics
                         // (kernel/row/split_rows.cuda.h)
  void* totals;          // and their two sums in backward: [2][rows]
  void* column_partial;  // [column gradients wanted][parts][columns]; CPU: double, CUDA: as statistics
  int64 parts;           // where several tensors share them, column_partial points to this one's first
  uint64
      wants_column;  // bit i: operand i's gradient is wanted, a sum. Slots of column_partial count these bits upwards.

  int unit;  // columns whose gradients are added up for words by channels; their slots have columns / unit numbers

  const int64* dropout_state;  // {seed, offset}
  double parameter[kParameters];

  int64 task_rows, task_columns;  // CPU: the partition; CUDA: columns of a part of a row. A function of shapes only
  int stream_stores;              // CPU: write past the caches
  // CPU: bits of the results that are numbers or scales, or codes: 0 for y, 1 + k for kept k, and their gradients.
  int numbers;

  // Of one tensor of several.
  int64 first_row;               // dropout counts the rows of those before it
  unsigned first_block, blocks;  // CUDA: where they share a launch, the tensor's own (kernel/common/batch.cuda.h)

#ifdef ONEPASS_GROUPS
  row_groups groups;  // in backward
#endif
};

// A leading dimension's, and what divides by it.
constexpr void set_size(arguments& a, int dimension, int64 size) {
  a.size[dimension] = size, a.by_size[dimension] = divisor::of(size);
}
// Of one leading dimension.
constexpr void set_rows(arguments& a, int64 rows) {
  for (int d = 0; d < kMaxDims; ++d) set_size(a, d, d + 1 < kMaxDims ? 1 : rows);
  a.rows = rows;
}

// Where a row begins in a tensor, in elements.
constexpr int64 offset_of(const arguments& a, const view& v, int64 row) {
  int64 offset = 0;
  for (int d = kMaxDims - 1; d > 0; row /= a.size[d--]) offset += row % a.size[d] * v.stride[d];
  return offset + row * v.stride[0];
}
// The row's integer in a tensor that has one for each.
constexpr int64 integer_of(const arguments& a, const view& v, int64 row) {
  const int64 at = offset_of(a, v, row);
  return v.type == dtype::i32 ? static_cast<const int*>(v.data)[at] : static_cast<const int64*>(v.data)[at];
}

}  // namespace onepass
