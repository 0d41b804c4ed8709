// How results of attention lie in memory.
#include "src/torch/attention/order.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace onepass::binding {
namespace {

using numbers = std::vector<std::int64_t>;

// The dimensions of a dense tensor in like's order, outermost first.
std::vector<std::size_t> order_of(const Tensor& like) {
  std::vector<std::size_t> order(like.sizes().size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto strides = like.strides();
  if (order.empty() || strides.back() != 1 || std::count(strides.begin(), strides.end(), 0) > 0) return order;
  std::stable_sort(order.begin(), order.end() - 1,
                   [&](std::size_t one, std::size_t other) { return strides[one] > strides[other]; });
  return order;
}

numbers strides_in_order(const Tensor& like, const numbers& sizes) {
  const std::vector<std::size_t> order = order_of(like);
  numbers strides(sizes.size());
  std::int64_t stride = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d)
    strides[*d] = stride, stride *= std::max(sizes[*d], std::int64_t{1});
  return strides;
}

Tensor empty_of(const numbers& sizes, const numbers& strides, dtype type, const device& on) {
  return empty_strided(sizes.data(), strides.data(), static_cast<int>(sizes.size()), type, on);
}

}  // namespace

Tensor empty_in_order(const Tensor& like, std::int64_t columns, dtype type) {
  numbers sizes(like.sizes().begin(), like.sizes().end());
  sizes.back() = columns;
  return empty_of(sizes, strides_in_order(like, sizes), type, device_of(like));
}

Tensor in_order(const Tensor& like, const Tensor& t) {
  const numbers sizes(t.sizes().begin(), t.sizes().end()), strides = strides_in_order(like, sizes);
  const auto found = t.strides();
  if (std::equal(found.begin(), found.end(), strides.begin(), strides.end())) return t;
  Tensor result = empty_of(sizes, strides, dtype_of(t), device_of(t));
  torch::stable::copy_(result, t);
  return result;
}

}  // namespace onepass::binding
