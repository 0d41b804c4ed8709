// Layouts that the kernels of rows and their launchers share.
#pragma once

#include "onepass/lane/types.h"

namespace onepass {

// One column sum of the second stage (kernel/row/column_sum.cuda.h).
struct column_sum {
  const void* partial;  // [parts][columns], float or double, the parts so many numbers apart
  int64 parts, columns, stride;
  void* data;
  dtype type;
};

// Rows taken in parts (kernel/row/split_rows.cuda.h): elements of a part in arguments::row_parts.
inline constexpr int kPartNumbers = 4;

}  // namespace onepass
