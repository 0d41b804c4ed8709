// Which way a line with `linear` takes on CUDA: what each way moves, and how long it takes by measured rates.
#pragma once

#include <string>
#include <vector>

#include "src/cuda/driver.h"
#include "src/spec/contraction.h"

namespace onepass::cuda {

struct linear_case {
  int64 rows, depth, columns;  // x is (rows, depth), the matrix (columns, depth)
  dtype type;                  // of x and the matrix
  bool saves;                  // for backward
};

struct prediction {
  spec::strategy how;
  int64 bytes;          // through memory
  double seconds;       // infinite where it does not serve
  std::string why_not;  // empty where it does
};

// For each strategy, in the order of spec::strategy without `automatic`.
std::vector<prediction> predict(const spec::contraction&, const linear_case&, const device_facts&);
// The fastest.
const prediction& best(const std::vector<prediction>&);

}  // namespace onepass::cuda
