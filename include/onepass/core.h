// onepass from C++, without PyTorch: a line on arrays of the CPU, forward and backward (examples/cpp shows it whole).
//
//   const onepass::line line("bias | gelu");
//   const onepass::values call{.x = {x, onepass::dtype::f32, {rows, columns}}, ...};
//   line.forward(call);
//   line.backward(call, {.y = grad_y, .x = grad_x, .operands = {grad_bias}});
//
// What is wrong with a line or a tensor is a std::invalid_argument that says which, what was expected and what came.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "onepass/lane/types.h"

namespace onepass {
struct parsed_line;

// An array of the caller's, described as PyTorch does: strides count numbers, and without them it is contiguous. Where
// `data` is null there is none.
struct tensor {
  void* data = nullptr;
  dtype type = dtype::f32;
  std::vector<std::int64_t> sizes = {};
  std::vector<std::int64_t> strides = {};
};

// The tensors of one call; backward takes the same as forward. Those of x's shape must have neighbouring numbers side
// by side in a row, or one number for all of it.
struct values {
  tensor x;                           // [..., N]
  std::vector<tensor> operands = {};  // as the words take them: a column [N], a tensor that broadcasts to x, a matrix
  // The result, of x's shape and dtype where the line has no product; of an ending one number a row, of x's shape
  // without its last dimension, float32, or float64 where x is.
  tensor y = {};
  // Likewise, one for each `keep`, and for each ending behind the first; of `keep(float32)` float32, or float64 as
  // above. Of `quantize` the scales, [..., 1], or [..., N / G] of groups of G columns.
  std::vector<tensor> kept = {};
  tensor statistics = {};  // [line.statistics(x's dtype), rows], float32, or float64 where x is: for backward only
  const int64* dropout_state = nullptr;  // {seed, offset}, where the line has dropout
};

// y and kept are read, and count as zeros where there are none; x and operands are written where there are any, each of
// its value's shape and dtype.
struct gradients {
  tensor y;
  std::vector<tensor> kept = {};
  tensor x = {};
  std::vector<tensor> operands = {};
};

// It may be called by several threads at once.
//
// With `linear`, whose operand is a matrix [M, N], what stands behind it has shape [..., M] and the matrix's dtype: y,
// the values that are kept there, and operands. Without words before it, x has that dtype too. Some rows at a time go
// through the words before, the GEMM and the words behind in a core's cache; backward recomputes the
// GEMM's result where it reads it. (Endings behind `linear`, which give one number a row, have all of it in memory; in
// Python a chunk of rows at a time.)
//
// With `scores`, x is [..., L, N] and the keys are [..., S, N] of its dtype, with the batch sizes of x; the last of
// those may be 1, for rows of x that share keys. What stands behind has shape [..., L, S]. With `values` [..., S, M]
// y is [..., L, M]. Without them y is contiguous, and so is a value that is kept right before `values`.
//
// Both have float32 and float64, and bfloat16 where the processor multiplies it (AVX512_BF16, but not AMX). Matrices
// are rows or columns that are contiguous.
class line {
 public:
  explicit line(std::string_view text);

  int operands() const;
  int keeps() const;
  int statistics(dtype x) const;  // numbers for each row that backward wants of forward

  void forward(const values&) const;
  void backward(const values&, const gradients&) const;

 private:
  std::shared_ptr<const parsed_line> parsed_;
};

// Lines outside the table of common ones are compiled with the system's C++ compiler at first use, from the headers
// that lie here: the target onepass::core defines ONEPASS_INCLUDE_DIR for it.
void set_include_dir(const std::string&);

// Calls body(context, begin, end) over [0, count) in the program's own threads, at least `grain` in one call; results
// do not depend on how, nor on their number, by which `linear` is shared out. Without it the calling thread does it
// all.
using thread_count = int (*)();
using parallel_for = void (*)(int64 count, int64 grain, void (*body)(void*, int64, int64), void* context);
void set_parallel_for(parallel_for, thread_count = nullptr);

}  // namespace onepass
