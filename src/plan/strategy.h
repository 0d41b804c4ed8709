// The ways to compute a line with `linear` or `scores` forward, as they are told of.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "onepass/lane/types.h"
#include "src/line/line.h"

namespace onepass::spec {

struct linear_case {
  int64 rows, depth, columns;  // x is (rows, depth), the matrix (columns, depth)
  dtype type;                  // of x and the matrix
  bool saves_product;          // for backward
  int64 matrices = 1;          // of `scores`: batches of keys
  int key_masks = 0;           // of `scores`: masks that leave keys out for all rows of a matrix

  int64 x_bytes() const { return rows * depth * size_of(type); }
  int64 result_bytes() const { return rows * columns * size_of(type); }
  int64 matrix_bytes() const { return matrices * columns * depth * size_of(type); }
};

struct prediction {
  strategy how;
  int64 bytes = 0;                                           // through memory
  double seconds = std::numeric_limits<double>::infinity();  // where it is known
  std::string why_not{};                                     // empty where it serves
};

}  // namespace onepass::spec
