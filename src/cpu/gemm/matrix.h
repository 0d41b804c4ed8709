// A matrix in memory that somebody else owns.
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

// The row stride of a matrix in memory of our own: an odd number of cache lines, so that rows that are read side by
// side use all sets of the cache.
inline int64 apart(dtype type, int64 columns) { return ((columns * size_of(type) + 63) / 64 | 1) * 64 / size_of(type); }

// Fills the columns from `begin` on with zeros. Columns are contiguous.
inline void clear(const matrix& m, int64 begin) {
  for (int64 r = 0; begin < m.columns && r < m.rows; ++r)
    std::memset(address(m, r, begin), 0, static_cast<std::size_t>((m.columns - begin) * size_of(m.type)));
}

// Both have one dtype and contiguous columns.
inline void copy(const matrix& from, const matrix& to) {
  for (int64 r = 0; r < to.rows; ++r)
    std::memcpy(address(to, r, 0), address(from, r, 0), static_cast<std::size_t>(to.columns * size_of(to.type)));
}

}  // namespace onepass::cpu
