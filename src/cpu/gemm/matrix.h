// Matrices in memory that something else holds.
#pragma once

#include <cstring>

#include "onepass/kernel/arguments.h"

namespace onepass::cpu {

struct matrix {
  void* data;
  dtype type;
  int64 rows, columns, row_stride, column_stride;
};

// Always inlined: files are compiled for different processors.
[[gnu::always_inline]] inline char* address(const matrix& m, int64 row, int64 column) {
  return static_cast<char*>(m.data) + (row * m.row_stride + column * m.column_stride) * size_of(m.type);
}

[[gnu::always_inline]] inline matrix transposed(const matrix& m) {
  return {m.data, m.type, m.columns, m.rows, m.column_stride, m.row_stride};
}

// From row to row of a matrix in memory of its own: an odd number of cache lines, since many rows are read side by
// side.
inline int64 apart(dtype type, int64 columns) { return ((columns * size_of(type) + 63) / 64 | 1) * 64 / size_of(type); }

// Zeros in the columns from `begin` on; columns are contiguous.
inline void clear(const matrix& m, int64 begin) {
  for (int64 r = 0; begin < m.columns && r < m.rows; ++r)
    std::memset(address(m, r, begin), 0, static_cast<std::size_t>((m.columns - begin) * size_of(m.type)));
}

// Of one dtype, columns contiguous.
inline void copy(const matrix& from, const matrix& to) {
  for (int64 r = 0; r < to.rows; ++r)
    std::memcpy(address(to, r, 0), address(from, r, 0), static_cast<std::size_t>(to.columns * size_of(to.type)));
}

}  // namespace onepass::cpu
