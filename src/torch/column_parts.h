// Memory for the parts of column sums that backward kernels leave, of one tensor or several.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "src/cpu/row/run.h"
#include "src/cuda/row/launch.h"
#include "src/torch/call/frame.h"

namespace onepass::binding {

// Where column gradients go: of each wanted operand one view for all tensors, or one for each tensor.
using column_outputs = std::vector<std::span<const view>>;

inline column_outputs one_for_all(const std::vector<view>& outputs) {
  column_outputs all;
  for (const view& output : outputs) all.emplace_back(&output, 1);
  return all;
}

// Where a tensor has one part, that is the sum: its kernel writes the gradients themselves. of: which operands'.
inline void write_sums(frame& f, std::uint64_t wants_column, const std::vector<view>& outputs,
                       std::uint64_t of = ~std::uint64_t{0}) {
  auto output = outputs.begin();
  for (int i = 0; i < kMaxOperands; ++i) {
    if ((wants_column >> i & 1) == 0) continue;
    if ((of >> i & 1) != 0) f.a.operand_gradient[i] = *output;
    ++output;
  }
}

// Column gradients by slot, those of some operands; nothing in the place of others.
inline std::vector<view> some_of(std::uint64_t wants_column, std::vector<view> outputs, std::uint64_t of) {
  auto output = outputs.begin();
  for (int i = 0; i < kMaxOperands; ++i) {
    if ((wants_column >> i & 1) == 0) continue;
    if ((of >> i & 1) == 0) *output = {};
    ++output;
  }
  return outputs;
}

// Of each column gradient, one tensor's parts lie behind those of the one before it: what all tensors share is summed
// over all of them, in one go.
class column_parts {
 public:
  // A frame's a.parts says how many it has. From then on they say how many there are.
  column_parts(const std::vector<frame*>& all, column_outputs outputs, dtype type)
      : outputs_(std::move(outputs)), type_(type) {
    if (outputs_.empty()) return;
    for (const frame* f : all) counts_.push_back(f->empty() ? 0 : f->a.parts), total_ += counts_.back();
    columns_ = all.front()->shape.columns();
    const std::int64_t sizes[3] = {static_cast<std::int64_t>(outputs_.size()), total_, columns_};
    memory_ = empty(sizes, 3, type, all.front()->on);
    auto* at = static_cast<char*>(memory_->data_ptr());
    auto count = counts_.begin();
    for (frame* f : all) {
      f->a.column_partial = at, f->a.parts = total_;
      at += *count++ * columns_ * size_of(type);
    }
  }

  // Calls add(arguments, parts, outputs) for the parts of all tensors, and for each tensor's own; outputs may be null.
  template <class Add>
  void each(const Add& add) const {
    if (!memory_) return;
    arguments a{};
    a.columns = columns_, a.parts = total_;
    auto* at = static_cast<char*>(memory_->data_ptr());
    const auto add_of = [&](std::size_t member, bool own, std::int64_t parts) {
      std::vector<view> some;
      bool any = false;
      for (const std::span<const view> of : outputs_) {
        const bool is_own = of.size() == counts_.size() && counts_.size() > 1;
        some.push_back(is_own == own ? of[own ? member : 0] : view{});
        any = any || is_own == own;
      }
      a.column_partial = at;
      if (any) add(a, parts, some);
    };
    add_of(0, false, total_);
    if (counts_.size() == 1) return;
    for (std::size_t i = 0; i < counts_.size(); at += counts_[i++] * columns_ * size_of(type_))
      add_of(i, true, counts_[i]);
  }

  void add_on_cpu() const {
    each([](const arguments& a, std::int64_t parts, const std::vector<view>& outputs) {
      cpu::reduce_columns(a, parts, static_cast<int>(outputs.size()), outputs.data());
    });
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
  const column_outputs outputs_;
  const dtype type_;
  std::vector<std::int64_t> counts_;
  std::int64_t total_ = 0, columns_ = 0;
  std::optional<Tensor> memory_;
};

}  // namespace onepass::binding
