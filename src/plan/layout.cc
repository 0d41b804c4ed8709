// From shapes and strides to rows: broadcast, drop and merge dimensions until every tensor is rows of a few strides.
#include "src/plan/layout.h"

#include <algorithm>
#include <cstddef>

namespace onepass::spec {
namespace {

struct common_dimension {
  std::int64_t size;
  std::vector<std::int64_t> strides;  // by tensor
};

std::int64_t stride_in(const strided& t, const shape& x, int d) {
  const int own = d - (x.dim - t.dim);
  return own < 0 || t.sizes[own] == 1 ? 0 : t.strides[own];
}

// Merges adjacent dimensions where, in every tensor, a step of the outer one is a whole run of the inner one.
std::vector<common_dimension> merged(const shape& x, const std::vector<strided>& tensors, int dims) {
  std::vector<common_dimension> result;
  for (int d = 0; d < dims; ++d) {
    if (x.sizes[d] == 1) continue;
    common_dimension next{x.sizes[d], {}};
    for (const strided& t : tensors) next.strides.push_back(stride_in(t, x, d));
    const bool merges = !result.empty() && [&] {
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        if (result.back().strides[i] != next.strides[i] * next.size) return false;
      }
      return true;
    }();
    if (merges) next.size *= result.back().size, result.back() = next;
    else result.push_back(std::move(next));
  }
  return result;
}

void set_views(const std::vector<strided>& tensors, const std::vector<common_dimension>& rows,
               const std::vector<int>& column_strides, arguments& a) {
  const std::size_t first = kMaxDims - rows.size();
  for (std::size_t d = 0; d < kMaxDims; ++d) set_size(a, static_cast<int>(d), d < first ? 1 : rows[d - first].size);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    view& v = *tensors[i].out;
    v.data = tensors[i].data;
    v.type = tensors[i].type;
    v.column_stride = column_strides[i];
    for (std::size_t d = 0; d < kMaxDims; ++d) v.stride[d] = d < first ? 0 : rows[d - first].strides[i];
  }
}

bool is_contiguous(const strided& t, const shape& x) {
  if (t.dim != x.dim) return false;
  std::int64_t expected = 1;
  for (int d = t.dim - 1; d >= 0; --d) {
    const bool is_last = d == t.dim - 1;
    if (t.sizes[d] * (is_last ? t.shared_by : 1) != x.sizes[d] && !(t.number && is_last)) return false;
    if (t.sizes[d] != 1 && t.strides[d] != expected) return false;
    expected *= t.sizes[d];
  }
  return true;
}

// The fast path of nearly every call: single dimensions are not looked at.
void set_contiguous(const std::vector<strided>& tensors, bool flatten, arguments& a) {
  if (flatten) a.columns *= a.rows, a.rows = 1;
  set_rows(a, a.rows);
  for (const strided& t : tensors)
    *t.out = {t.data, {0, 0, 0, t.number ? 1 : a.columns / t.shared_by}, t.type, t.number ? 0 : t.shared_by};
}

}  // namespace

std::int64_t shape::rows() const {
  std::int64_t product = 1;
  for (int d = 0; d + 1 < dim; ++d) product *= sizes[d];
  return product;
}

row_groups groups_of(const shape& x, std::uint64_t has) {
  std::int64_t sizes[4] = {1, 1, 1, 1};  // dimensions that it has, has not, has, has not
  std::size_t turn = 0;
  for (int d = 0; d + 1 < x.dim; ++d) {
    if (x.sizes[d] == 1) continue;
    const bool is_there = (has >> (x.dim - 2 - d) & 1) != 0;
    if (is_there != (turn % 2 == 0)) ++turn;
    sizes[turn] *= x.sizes[d];
  }
  const auto [first, outer, kept, inner] = sizes;
  return {0, first * kept, outer * inner, outer, kept, inner, 1, 1};
}

std::vector<std::int64_t> sizes_of_groups(const shape& x, std::uint64_t has) {
  std::vector<std::int64_t> sizes(x.sizes, x.sizes + x.dim);
  for (int d = 0; d + 1 < x.dim; ++d)
    if ((has >> (x.dim - 2 - d) & 1) == 0) sizes[static_cast<std::size_t>(d)] = 1;
  return sizes;
}

std::string shape_text(const std::int64_t* sizes, int dim) {
  std::string text = "[";
  for (int d = 0; d < dim; ++d) text += (d ? ", " : "") + std::to_string(sizes[d]);
  return text + "]";
}

std::optional<dimension> one_dimension(const strided& t, int begin, int end) {
  dimension all{1, 0};
  for (int i = end - 1; i >= begin; --i) {
    if (t.sizes[i] == 1) continue;
    if (all.size > 1 && t.strides[i] != all.stride * all.size) return {};
    if (all.size == 1) all.stride = t.strides[i];
    all.size *= t.sizes[i];
  }
  return all;
}

int own_batch_sizes(const shape& keys) {
  int own = keys.dim - 2;
  while (own > 0 && keys.sizes[own - 1] == 1) --own;
  return own;
}

bool broadcasts(const strided& tensor, const shape& to) {
  if (!leading_broadcast(tensor, to)) return false;
  return tensor.dim == 0 || tensor.sizes[tensor.dim - 1] == 1 || tensor.sizes[tensor.dim - 1] == to.columns();
}

bool leading_broadcast(const strided& tensor, const shape& to) {
  if (tensor.dim > to.dim) return false;
  for (int own = 0; own + 1 < tensor.dim; ++own) {
    const std::int64_t size = tensor.sizes[own];
    if (size != 1 && size != to.sizes[own + to.dim - tensor.dim]) return false;
  }
  return true;
}

fit lay_out(const shape& x, std::vector<strided>& tensors, bool flatten, arguments& a, std::vector<bool>& needs_copy) {
  a.rows = x.rows();
  a.columns = x.columns();
  a.inverse_columns = 1.0 / static_cast<double>(a.columns);
  a.matrix_rows = x.dim > 1 ? x.sizes[x.dim - 2] : 1;
  if (std::all_of(tensors.begin(), tensors.end(), [&](const strided& t) { return is_contiguous(t, x); })) {
    set_contiguous(tensors, flatten, a);
    return fit::rows;
  }
  needs_copy.assign(tensors.size(), false);
  if (flatten) {
    const std::vector<common_dimension> all = merged(x, tensors, x.dim);
    const bool one_run = all.size() <= 1 && std::all_of(tensors.begin(), tensors.end(), [&](const strided& t) {
                           const std::int64_t stride =
                               all.empty() ? 1 : all[0].strides[static_cast<std::size_t>(&t - tensors.data())];
                           return stride == 0 || stride == 1;
                         });
    if (one_run) {
      std::vector<int> column_strides;
      for (std::size_t i = 0; i < tensors.size(); ++i)
        column_strides.push_back(all.empty() || all[0].strides[i] == 1 ? tensors[i].shared_by : 0);
      a.columns *= a.rows;
      a.rows = 1;
      set_views(tensors, {}, column_strides, a);
      return fit::rows;
    }
  }
  bool copies = false;
  std::vector<int> column_strides;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::int64_t stride = tensors[i].number ? 0 : a.columns == 1 ? 1 : stride_in(tensors[i], x, x.dim - 1);
    if (stride != 0 && stride != 1) needs_copy[i] = copies = true;
    column_strides.push_back(stride == 1 ? tensors[i].shared_by : static_cast<int>(stride));
  }
  if (copies) return fit::copies;
  const std::vector<common_dimension> rows = merged(x, tensors, x.dim - 1);
  if (rows.size() > kMaxDims) {
    for (std::size_t i = 0; i < tensors.size(); ++i) needs_copy[i] = !is_contiguous(tensors[i], x);
    return fit::copies;
  }
  set_views(tensors, rows, column_strides, a);
  return fit::rows;
}

}  // namespace onepass::spec
