// The tensors of a call, as kernels of rows see them.
#pragma once

#include <algorithm>
#include <cstddef>

#include "onepass/kernel/common/shapes.h"
#include "src/cuda/row/configuration.h"

namespace onepass::cuda {

inline constexpr int kWarp = 32;

// Whether one row serves all.
inline bool is_repeated(const view& v) {
  return v.data && v.column_stride != 0 && std::all_of(v.stride, v.stride + kMaxDims, [](int64 s) { return s == 0; });
}

// The tensors (by stream) of which `holds` is true.
template <class Holds>
inline uint64 tensors_of(const arguments& a, const Holds& holds) {
  uint64 tensors = 0;
  const auto add = [&](stream s, const view& v) { tensors |= v.data && holds(v) ? bit_of(s) : 0; };
  add(stream::x, a.x), add(stream::y, a.y);
  for (int i = 0; i < kMaxOperands; ++i) add(stream::operand + i, a.operand[i]);
  for (int k = 0; k < kMaxKeeps; ++k)
    add(stream::kept + k, a.kept[k]), add(stream::kept_gradient + k, a.kept_gradient[k]);
  return tensors;
}

// Whether its rows are as long as x's.
inline bool has_rows_of_x(const request& r, const arguments& a, const view& v) {
  const bool is_table = r.rope >= 0 && &v >= a.operand + r.rope && &v < a.operand + r.rope + 2;
  const std::ptrdiff_t operand = &v - a.operand;
  const bool of_channels = operand >= 0 && operand < kMaxOperands && (r.channels >> operand & 1) != 0;
  return v.column_stride == 1 && !of_channels && !(is_table && r.turned > 0);
}

// Lanes in shared memory are of 16 bytes.
inline bool has_long_lanes(const request& r, const configuration& c) { return c.vector_size * size_of(r.x) > 16; }

// Columns that threads have together, which are neighbours in a warp: a group's, or a unit's.
inline int together(const request& r) { return std::max(r.group, r.unit); }

}  // namespace onepass::cuda
