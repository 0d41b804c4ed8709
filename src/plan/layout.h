// From shapes and strides to rows: broadcast, drop and merge dimensions until every tensor is rows of a few strides.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "onepass/kernel/arguments.h"

namespace onepass::spec {

// A tensor as PyTorch describes it. What to do with it is written to `out`.
struct strided {
  void* data;
  dtype type;
  int dim;
  const std::int64_t* sizes;
  const std::int64_t* strides;
  view* out;
  bool number = false;  // one number a row: the last size is 1, and its view has a column stride of 0
  int shared_by = 1;    // columns that share a number
};

enum class fit {
  rows,    // done
  copies,  // some tensors must be made contiguous (and expanded) first: those with needs_copy set
};

// Shape of x; the last dimension is the row (a 0-d tensor is one row of one).
struct shape {
  int dim;
  const std::int64_t* sizes;
  std::int64_t columns() const { return dim ? sizes[dim - 1] : 1; }
  std::int64_t rows() const;
};

// The groups of rows that the leading dimensions `has` (signature.h) make, and the shape of a row for each.
row_groups groups_of(const shape& x, std::uint64_t has);
std::vector<std::int64_t> sizes_of_groups(const shape& x, std::uint64_t has);

std::string shape_text(const std::int64_t* sizes, int dim);  // "[4, 8]"

bool broadcasts(const strided& tensor, const shape& to);
// Likewise, but for the last dimension.
bool leading_broadcast(const strided& tensor, const shape& to);

// Rows of numbers for the columns, each of which serves some rows.
inline bool is_batch_of_columns(const strided& tensor, const shape& of) {
  return tensor.dim > 1 && tensor.sizes[tensor.dim - 1] == of.columns() && broadcasts(tensor, of);
}

// Likewise of channels, which are as many columns each.
inline bool is_batch_of_channels(const strided& tensor, const shape& of) {
  if (tensor.dim == 0) return false;
  const std::int64_t channels = tensor.sizes[tensor.dim - 1];
  return channels > 0 && of.columns() % channels == 0 && leading_broadcast(tensor, of);
}

// Fills rows, columns, size and every tensor's view. flatten: no word looks at its column, so that a tensor set that
// is contiguous throughout becomes one long row. Every tensor broadcasts to the shape.
fit lay_out(const shape& x, std::vector<strided>& tensors, bool flatten, arguments& a, std::vector<bool>& needs_copy);

// Merges dimensions [begin, end) into one; nothing where their strides do not allow it.
struct dimension {
  std::int64_t size, stride;
};
std::optional<dimension> one_dimension(const strided&, int begin, int end);

// The keys' batch sizes without the last ones that are 1, along which queries share keys.
int own_batch_sizes(const shape& keys);

}  // namespace onepass::spec
