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
namespace spec {
struct line;
}

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
  std::vector<tensor> operands = {};  // as the words take them: a column [N], or a tensor that broadcasts to x
  tensor y = {};                      // the result, of x's shape and dtype
  std::vector<tensor> kept = {};      // likewise, one for each `keep`
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

// A line without `linear`, `scores` and `values`, whose products are a library's work. It may be called by several
// threads at once.
class line {
 public:
  explicit line(std::string_view text);

  int operands() const;
  int keeps() const;
  int statistics(dtype x) const;  // numbers for each row that backward wants of forward

  void forward(const values&) const;
  void backward(const values&, const gradients&) const;

 private:
  std::shared_ptr<const spec::line> parsed_;
};

// Lines outside the table of common ones are compiled with the system's C++ compiler at first use, from the headers
// that lie here: the target onepass::core defines ONEPASS_INCLUDE_DIR for it.
void set_include_dir(const std::string&);

// Calls body(context, begin, end) over [0, count) in the program's own threads, at least `grain` in one call; results
// do not depend on how. Without it the calling thread does it all.
using parallel_for = void (*)(int64 count, int64 grain, void (*body)(void*, int64, int64), void* context);
void set_parallel_for(parallel_for);

}  // namespace onepass
