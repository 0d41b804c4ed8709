// Pieces of one tensor (split, chunk, unbind, slices and views of those) seen as one tensor again, without a copy in
// either direction: a part of what is compiled with autograd_function.h.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

namespace onepass::autograd {

using at::Tensor;

// Whether a tensor is what its storage has: not negated or conjugated when it is read, not zeros without a storage.
inline bool is_as_stored(const Tensor& t) {
  return t.has_storage() && !t.is_neg() && !t.is_conj() && !t._is_zerotensor();
}

// Equal views of one storage at equal distances, so that a tensor with one dimension more has them all.
struct joined_views {
  std::vector<std::int64_t> sizes, strides;
  std::int64_t offset = 0;
  bool found = false;

  explicit joined_views(at::TensorList all) {
    const Tensor& first = all[0];
    if (!is_as_stored(first)) return;
    const auto count = static_cast<std::int64_t>(all.size());
    const std::int64_t distance = count > 1 ? all[1].storage_offset() - first.storage_offset() : first.numel();
    if (distance < 0) return;
    for (std::int64_t i = 0; i < count; ++i) {
      const Tensor& t = all[static_cast<std::size_t>(i)];
      const bool fits = is_as_stored(t) &&
                        t.storage().unsafeGetStorageImpl() == first.storage().unsafeGetStorageImpl() &&
                        t.storage_offset() == first.storage_offset() + i * distance && t.sizes() == first.sizes() &&
                        t.strides() == first.strides() && t.scalar_type() == first.scalar_type();
      if (!fits) return;
    }
    sizes = first.sizes().vec(), strides = first.strides().vec(), offset = first.storage_offset();
    sizes.insert(sizes.begin(), count), strides.insert(strides.begin(), distance);
    found = true;
  }
};

// Whether a gradient passes a node only to be put where a view's numbers are, and no one listens.
inline bool only_places(torch::autograd::Node& node) {
  static constexpr std::array kViews = {"SplitBackward0",     "SplitWithSizesBackward0", "UnbindBackward0",
                                        "SelectBackward0",    "SliceBackward0",          "ViewBackward0",
                                        "TransposeBackward0", "PermuteBackward0",        "TBackward0",
                                        "UnsqueezeBackward0", "SqueezeBackward1",        "ReshapeAliasBackward0"};
  if (!node.pre_hooks().empty() || !node.post_hooks().empty() || !node.tensor_pre_hooks().empty() ||
      !node.retains_grad_hooks().empty() || node.num_inputs() == 0)
    return false;
  const std::string name = node.name();
  return std::find(kViews.begin(), kViews.end(), name) != kViews.end();
}

// Whether all that stands between a view and the tensor that it is of are such nodes.
inline bool is_plain_view(const Tensor& view, const Tensor& base) {
  if (!view.is_view() || !view._base().is_same(base) || view.is_leaf()) return false;
  const torch::autograd::Edge end = torch::autograd::impl::gradient_edge(base);
  auto* node = view.grad_fn().get();
  while (node != nullptr) {
    if (!only_places(*node) || node->num_outputs() != 1) return false;
    const torch::autograd::Edge& next = node->next_edge(0);
    if (next.function == end.function && next.input_nr == end.input_nr) return true;
    node = next.function.get();
  }
  return false;
}

// A dense tensor's numbers in another order of its dimensions, as views whose gradient is a view too; else as strided.
inline Tensor seen_as(const Tensor& base, const joined_views& as) {
  std::vector<std::int64_t> order(as.sizes.size());
  for (std::size_t d = 0; d < order.size(); ++d) order[d] = static_cast<std::int64_t>(d);
  const auto size = [&](std::int64_t d) { return as.sizes[static_cast<std::size_t>(d)]; };
  const auto stride = [&](std::int64_t d) { return as.strides[static_cast<std::size_t>(d)]; };
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return size(a) != 1 && (size(b) == 1 || stride(a) > stride(b));  // those of size 1 behind the others
  });
  std::int64_t run = 1;
  bool dense = base.is_contiguous();
  std::vector<std::int64_t> sizes(order.size()), places(order.size());
  for (std::size_t at = order.size(); at-- > 0;) {
    const std::int64_t d = order[at];
    dense = dense && (size(d) == 1 || stride(d) == run);
    run *= size(d), sizes[at] = size(d), places[static_cast<std::size_t>(d)] = static_cast<std::int64_t>(at);
  }
  if (!dense || run == 0) return base.as_strided(as.sizes, as.strides, as.offset);
  Tensor flat = base.dim() == 1 ? base : base.view({-1});
  if (run != base.numel()) flat = flat.narrow(0, as.offset - base.storage_offset(), run);
  const Tensor seen = flat.view(sizes);
  return std::is_sorted(order.begin(), order.end()) ? seen : seen.permute(places);
}

// Of tensors of one shape: a tensor of them all, with a dimension more in front, where no copy is needed; else nothing.
inline std::vector<Tensor> joined(at::TensorList all) {
  if (all.empty()) return {};
  const joined_views as(all);
  if (!as.found) return {};
  const Tensor& first = all[0];
  const bool recorded = at::GradMode::is_enabled() &&
                        std::any_of(all.begin(), all.end(), [](const Tensor& t) { return t.requires_grad(); });
  if (!recorded) return {first.as_strided(as.sizes, as.strides, as.offset)};
  if (all.size() == 1) return {first.unsqueeze(0)};
  if (!first.is_view()) return {};
  const Tensor base(at::TensorBase(first._base()));
  if (!base.requires_grad()) return {};
  if (!std::all_of(all.begin(), all.end(), [&](const Tensor& t) { return is_plain_view(t, base); })) return {};
  return {seen_as(base, as)};
}

}  // namespace onepass::autograd
