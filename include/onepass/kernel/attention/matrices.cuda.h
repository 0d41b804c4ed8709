// Where the rows of attention's tensors lie in memory.
#pragma once

#include "onepass/kernel/attention/arguments.h"
#include "onepass/lane/cuda.h"

ONEPASS_BEGIN

// A batch of keys, and one of the query heads that share them.
struct batch_index {
  int outer, inner, query_head;
};

ONEPASS_FUNCTION uint16* row_of(const strided_matrices& of, batch_index at, int64 row) {
  return static_cast<uint16*>(of.data) + at.outer * of.outer_stride + at.inner * of.inner_stride +
         at.query_head * of.query_head_stride + row * of.row_stride;
}
// The same of batches counted through outer and inner, whose query heads' rows, of `rows` each, are counted through.
ONEPASS_FUNCTION uint16* row_of_batch(const strided_matrices& of, int64 batch, int64 inner, int64 row, int64 rows) {
  const batch_index at{static_cast<int>(batch / inner), static_cast<int>(batch % inner), static_cast<int>(row / rows)};
  return row_of(of, at, row % rows);
}

ONEPASS_END
