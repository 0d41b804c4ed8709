// Memory for the parts of several tensors' column sums.
#pragma once

#include <optional>
#include <vector>

#include "src/cuda/row/launch.h"
#include "src/torch/lists/group.h"

namespace onepass::binding {

// Of each column gradient, one tensor's parts lie behind those of the one before it: what all tensors share is summed
// over all of them, in one go.
class column_parts {
 public:
  // A frame's a.parts says how many it has. From then on they say how many there are.
  column_parts(frames& all, const column_views& outputs, dtype type) : outputs_(outputs), type_(type) {
    for (frame& f : all) counts_.push_back(f.empty() ? 0 : f.a.parts), total_ += counts_.back();
    columns_ = all.front().shape.columns();
    const std::int64_t sizes[3] = {static_cast<std::int64_t>(outputs.size()), total_, columns_};
    if (outputs.empty()) return;
    memory_ = empty(sizes, 3, type, all.front().on);
    auto* at = static_cast<char*>(memory_->data_ptr());
    auto count = counts_.begin();
    for (frame& f : all) {
      f.a.column_partial = at, f.a.parts = total_;
      at += *count++ * columns_ * size_of(type);
    }
  }

  // Calls add(arguments, parts, outputs) for those of all tensors, and for each tensor's own; outputs may be null.
  template <class Add>
  void each(const Add& add) const {
    if (!memory_) return;
    arguments a{};
    a.columns = columns_, a.parts = total_;
    auto* at = static_cast<char*>(memory_->data_ptr());
    const auto add_of = [&](std::size_t member, bool own, std::int64_t parts) {
      std::vector<view> some;
      bool any = false;
      for (const std::vector<view>& of : outputs_) {
        const bool is_own = of.size() == counts_.size() && counts_.size() > 1;
        some.push_back(is_own == own ? of[own ? member : 0] : view{});
        any = any || is_own == own;
      }
      a.column_partial = at;
      if (any) add(a, parts, some);
    };
    add_of(0, false, total_);
    for (std::size_t i = 0; i < counts_.size(); at += counts_[i++] * columns_ * size_of(type_))
      add_of(i, true, counts_[i]);
  }

  std::vector<column_sum> sums() const {
    std::vector<column_sum> all;
    each([&](const arguments& a, std::int64_t parts, const std::vector<view>& outputs) {
      const auto some = cuda::sums_of(a, type_, parts, static_cast<int>(outputs.size()), outputs.data());
      all.insert(all.end(), some.begin(), some.end());
    });
    return all;
  }

 private:
  const column_views& outputs_;
  const dtype type_;
  std::vector<std::int64_t> counts_;
  std::int64_t total_ = 0, columns_ = 0;
  std::optional<Tensor> memory_;
};

}  // namespace onepass::binding
